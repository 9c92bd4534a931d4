"""A sequence whose KV was pruned: tokens keep their positions, whatever slots they lie in."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache

from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.load import load_model
from pdactors.kv.pruning import gather, select

TOKENS, BLOCK_TOKENS, VOCAB = 75, 32, 101


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("llama")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=48,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=VOCAB,
        max_position_embeddings=512,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    model.save_pretrained(found)
    return found


@pytest.mark.parametrize("way", ["lean", "transformers"])
def test_what_follows_a_pruned_prompt_is_what_transformers_says_without_those_tokens(
    folder: Path, way: Literal["lean", "transformers"]
) -> None:
    model = load_model(folder, "float32", way=way)
    layout = model.layout_for(BLOCK_TOKENS)
    arena = np.full((6, layout.block_bytes), 0xFF, np.uint8)
    model.bind(arena, layout)
    rng = np.random.default_rng(1)
    tokens = rng.integers(VOCAB, size=TOKENS + 3).tolist()
    prompt, further = tokens[:TOKENS], tokens[TOKENS:]
    model.forward(StepBatch(prompt, range(TOKENS), [Span(0, TOKENS, TOKENS, [4, 0, 5])], []))
    kept = select(rng.random((2, 2, TOKENS)), 0.6)  # other tokens in each layer and head
    count = kept.shape[2]
    gather(layout, arena, [4, 0, 5], kept, arena, [3, 1])
    arena[[4, 0, 5]] = 0xFF
    spans = [Span(0, len(further), count + len(further), [3, 1])]
    step = StepBatch(further, range(TOKENS, TOKENS + len(further)), spans, range(len(further)))
    found = model.forward(step).numpy().copy()

    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    cache = DynamicCache()
    with torch.inference_mode():
        reference(input_ids=torch.tensor([prompt]), past_key_values=cache, use_cache=True)
        for layer, chosen in zip(cache.layers, torch.from_numpy(kept), strict=True):
            index = chosen[None, :, :, None].expand(-1, -1, -1, layout.head_dim)
            layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)
        positions = torch.arange(TOKENS, TOKENS + len(further))[None]
        ids = torch.tensor([further])
        expected = reference(input_ids=ids, past_key_values=cache, position_ids=positions, use_cache=True).logits[0]
    assert np.abs(found - expected.numpy()).max() < 2e-3 * expected.abs().max()
