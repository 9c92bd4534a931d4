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
from pdactors.engine.pruner import WINDOW, num_packed, num_scratch, prune
from pdactors.errors import InvariantError
from pdactors.kv.layout import KVLayout
from pdactors.kv.pruning import gather, select, spread

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


@pytest.mark.parametrize("way", ["lean", "transformers"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.05)])
@pytest.mark.parametrize("num_tokens", [TOKENS, 33, 7])
def test_the_attention_that_is_observed_is_what_transformers_pays(
    folder: Path,
    way: Literal["lean", "transformers"],
    dtype: Literal["float32", "bfloat16"],
    tolerance: float,
    num_tokens: int,
) -> None:
    model = load_model(folder, dtype, way=way, seq_check=False)
    layout = model.layout_for(BLOCK_TOKENS)
    arena = np.full((6, layout.block_bytes), 0xFF, np.uint8)
    model.bind(arena, layout)
    prompt = np.random.default_rng(2).integers(VOCAB, size=num_tokens).tolist()
    count = min(20, num_tokens)
    past = num_tokens - count
    if past:
        model.forward(StepBatch(prompt[:past], range(past), [Span(0, past, past, [4, 0, 5])], []))
    found = model.observe(
        StepBatch(prompt[past:], range(past, num_tokens), [Span(0, count, num_tokens, [4, 0, 5])], [])
    )
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        paid = reference(input_ids=torch.tensor([prompt]), output_attentions=True).attentions
    expected = torch.stack(paid)[:, 0, :, past:].unflatten(1, (2, 3)).sum((2, 3)).numpy()
    assert found.shape == (2, 2, num_tokens)
    assert np.abs(found - expected).max() < tolerance * count


def test_only_one_span_can_be_observed(folder: Path) -> None:
    model = load_model(folder, "float32", way="lean")
    layout = model.layout_for(BLOCK_TOKENS)
    model.bind(np.zeros((6, layout.block_bytes), np.uint8), layout)
    with pytest.raises(InvariantError, match="2 spans are to be observed"):
        model.observe(StepBatch([1, 2], [0, 0], [Span(0, 1, 1, [0]), Span(1, 1, 1, [1])], []))


@pytest.mark.parametrize("way", ["lean", "transformers"])
def test_pruning_keeps_what_was_attended_to_and_reads_the_prompt_only(
    folder: Path, way: Literal["lean", "transformers"]
) -> None:
    model = load_model(folder, "float32", way=way, seq_check=False)
    layout = model.layout_for(BLOCK_TOKENS)
    arena = np.full((10, layout.block_bytes), 0xFF, np.uint8)
    model.bind(arena, layout)
    prompt = np.random.default_rng(5).integers(VOCAB, size=100).tolist()
    blocks = [4, 0, 5, 7]
    model.forward(StepBatch(prompt, range(100), [Span(0, 100, 100, blocks)], []))
    before = arena[blocks].copy()
    scores = model.observe(StepBatch(prompt[-WINDOW:], range(100 - WINDOW, 100), [Span(0, WINDOW, 100, blocks)], []))
    arena[blocks] = before
    assert (num_scratch(layout, 100), num_packed(layout, 100, 0.6)) == (2, 2)
    assert prune(model, layout, arena, prompt, blocks, 0.6, [1, 2], [3, 8]) == 60
    assert (arena[blocks] == before).all()
    expected = np.full_like(arena[:2], 0xFF)
    gather(layout, np.concatenate([before, expected]), range(4), select(spread(scores), 0.6), expected, [0, 1])
    assert (arena[[3, 8]] == expected).all()
    assert prune(model, layout, arena, prompt, blocks, 1.0, [1, 2], [3, 8, 6, 9]) == 100
    full = arena[[3, 8, 6]]
    assert (full == before[:3]).all()


def test_a_prompt_that_would_take_as_many_blocks_is_not_pruned() -> None:
    layout = KVLayout(2, 2, 32, 32, "float32")
    assert [num_packed(layout, count, 0.7) for count in (1, 32, 33, 45, 46, 64, 200)] == [0, 0, 1, 1, 0, 0, 5]
    assert num_packed(layout, 10_000, 1.0) == 0
