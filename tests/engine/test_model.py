from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.mistral import modeling_mistral

from pdactors.engine import paged
from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.load import load_model
from pdactors.engine.model import PagedModel
from pdactors.errors import InvariantError, ModelError

VOCAB = 97
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=24),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=16),
    "gemma2": lambda: transformers.Gemma2Config(
        **SIZES, head_dim=16, sliding_window=16, attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    ),
    "gpt2": lambda: transformers.GPT2Config(
        n_embd=64, n_layer=3, n_head=4, n_positions=128, vocab_size=VOCAB, bos_token_id=1, eos_token_id=2
    ),
    "opt": lambda: transformers.OPTConfig(
        hidden_size=64,
        ffn_dim=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        vocab_size=VOCAB,
        max_position_embeddings=128,
        word_embed_proj_dim=64,
    ),
}


@dataclass
class Sequence:
    """One sequence's tokens, cut into chunks, and the blocks that its KV goes to."""

    tokens: list[int]
    chunks: list[int]
    blocks: list[int]
    done: int = 0


def save_model(folder: Path, config: Any) -> Path:
    """Save a model with random weights large enough that attention matters."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in folders:
            folders[name] = save_model(tmp_path_factory.mktemp(name), CONFIGS[name]())
        return folders[name]

    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def models(request: pytest.FixtureRequest, saved: Callable[[str], Path]) -> tuple[PagedModel, Any]:
    folder = saved(request.param)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return load_model(folder, "float32", threads=1), reference


def bind(model: PagedModel, block_tokens: int, num_blocks: int) -> np.ndarray:
    layout = model.layout_for(block_tokens)
    payload = np.full((num_blocks, layout.block_bytes), 0xFF, np.uint8)  # NaN wherever nothing was written
    model.bind(payload, layout)
    return payload


def step_of(parts: list[tuple[Sequence, int]]) -> StepBatch:
    ids: list[int] = []
    positions: list[int] = []
    spans = []
    for sequence, size in parts:
        end = sequence.done + size
        spans.append(Span(len(ids), size, end, sequence.blocks))
        ids += sequence.tokens[sequence.done : end]
        positions += range(sequence.done, end)
    return StepBatch(ids, positions, spans, range(len(ids)))


def reference_logits(model: Any, sequence: Sequence) -> torch.Tensor:
    cache, parts, done = DynamicCache(config=model.config), [], 0
    for size in sequence.chunks:
        tokens = torch.tensor([sequence.tokens[done : done + size]])
        done += size
        with torch.inference_mode():
            parts.append(model(tokens, cache=cache, use_cache=True).logits[0])
    return torch.cat(parts)


@st.composite
def workloads(draw: st.DrawFn) -> tuple[int, list[Sequence], random.Random]:
    block_tokens = draw(st.sampled_from([4, 8, 32]))
    rng = draw(st.randoms(use_true_random=False))
    cuts = draw(st.lists(st.lists(st.integers(1, 24), min_size=1, max_size=5), min_size=1, max_size=3))
    counts = [-(-sum(chunks) // block_tokens) for chunks in cuts]
    ids = rng.sample(range(sum(counts) + 3), sum(counts))
    sequences = []
    for chunks, count in zip(cuts, counts, strict=True):
        tokens = [rng.randrange(VOCAB) for _ in range(sum(chunks))]
        sequences.append(Sequence(tokens, chunks, [ids.pop() for _ in range(count)]))
    return block_tokens, sequences, rng


@settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(workload=workloads())
def test_paged_logits_equal_those_of_transformers_own_cache(models: tuple[PagedModel, Any], workload: Any) -> None:
    model, reference = models
    block_tokens, sequences, rng = workload
    bind(model, block_tokens, sum(len(sequence.blocks) for sequence in sequences) + 3)
    found: list[list[torch.Tensor]] = [[] for _ in sequences]
    waiting = [list(sequence.chunks) for sequence in sequences]
    while any(waiting):
        able = [i for i, chunks in enumerate(waiting) if chunks]
        chosen = rng.sample(able, rng.randint(1, len(able)))
        parts = [(sequences[i], waiting[i].pop(0)) for i in chosen]
        logits = model.forward(step_of(parts))
        for i, part, (sequence, size) in zip(chosen, logits.split([size for _, size in parts]), parts, strict=True):
            found[i].append(part)
            sequence.done += size
    for sequence, logits in zip(sequences, found, strict=True):
        torch.testing.assert_close(torch.cat(logits), reference_logits(reference, sequence), rtol=1e-4, atol=1e-4)


def test_a_step_writes_only_the_slots_of_its_new_tokens(saved: Callable[[str], Path]) -> None:
    model = load_model(saved("llama"), "float32", threads=1)
    payload = bind(model, 4, 6)
    sequence = Sequence(list(range(9)), [6, 3], [4, 1, 3])
    model.forward(step_of([(sequence, 6)]))
    sequence.done = 6
    before = payload.copy()
    model.forward(step_of([(sequence, 3)]))
    planes = (payload != before).view(np.uint8).reshape(6, 3, 2, 2, -1, 4)  # [blocks, layers, K or V, heads, plane]
    keys = planes[:, :, 0].reshape(6, 3, 2, 4, -1).any(axis=(1, 2, 4))  # [blocks, block_tokens]
    values = planes[:, :, 1].reshape(6, 3, 2, -1, 4, 4).any(axis=(1, 2, 3, 5))
    changed = keys | values
    assert changed.nonzero()[0].tolist() == [1, 1, 3]
    assert changed.nonzero()[1].tolist() == [2, 3, 0]


def test_two_sequences_may_read_one_block(saved: Callable[[str], Path]) -> None:
    model = load_model(saved("llama"), "float32", threads=1)
    bind(model, 4, 4)
    first = Sequence([5, 6, 7, 8, 9], [4, 1], [2, 0])
    model.forward(step_of([(first, 4)]))
    first.done = 4
    second = Sequence([5, 6, 7, 8, 9], [4, 1], [2, 3], done=4)
    logits = model.forward(step_of([(first, 1), (second, 1)]))
    torch.testing.assert_close(logits[0], logits[1])
    assert logits.isfinite().all()


def test_attention_time_is_that_of_the_last_step(saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(saved("llama"), "float32", threads=1)
    bind(model, 8, 2)
    ticks = itertools.count()
    monkeypatch.setattr(paged, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    for _ in range(2):
        model.forward(step_of([(Sequence(list(range(9)), [9], [1, 0]), 9)]))
        assert model.attention_s == SIZES["num_hidden_layers"]


def test_only_the_wanted_rows_get_logits(models: tuple[PagedModel, Any]) -> None:
    model, _ = models
    bind(model, 8, 2)
    step = step_of([(Sequence(list(range(12)), [12], [1, 0]), 12)])
    every = model.forward(step)
    some = model.forward(StepBatch(step.input_ids, step.positions, step.spans, [11, 3]))
    torch.testing.assert_close(some, every[[11, 3]])
    assert model.forward(StepBatch(step.input_ids, step.positions, step.spans, [])).shape == (0, VOCAB)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input_ids": [1, VOCAB, 3]}, "token id"),
        ({"input_ids": [1, -1, 3]}, "token id"),
        ({"positions": [0, 1, 128]}, "position"),
        ({"positions": [0, 1]}, "2 positions"),
        ({"logit_rows": [3]}, "logit row"),
        ({"spans": [Span(0, 3, 3, [2])]}, "leave the arena"),
        ({"spans": [Span(0, 3, 3, [-1])]}, "leave the arena"),
        ({"spans": [Span(0, 3, 5, [0])]}, "cannot hold"),
        ({"spans": [Span(0, 2, 2, [0])]}, "cover 2"),
        ({"spans": [Span(0, 2, 2, [0]), Span(1, 1, 1, [1])]}, "does not follow"),
        ({"spans": [Span(0, 3, 2, [0])]}, "does not follow"),
        ({"spans": [Span(0, 2, 2, [0]), Span(2, 1, 1, [0])]}, "one slot"),
    ],
)
def test_a_bad_step_raises_before_anything_is_written(
    saved: Callable[[str], Path], change: dict[str, Any], words: str
) -> None:
    model = load_model(saved("llama"), "float32", threads=1, seq_check=False)
    payload = bind(model, 4, 2)
    good = {"input_ids": [1, 2, 3], "positions": [0, 1, 2], "spans": [Span(0, 3, 3, [0])], "logit_rows": [2]}
    with pytest.raises(InvariantError, match=words):
        model.forward(StepBatch(**{**good, **change}))
    assert (payload == 0xFF).all()
    model.forward(StepBatch(**good))
    assert (payload != 0xFF).any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_models_pass_their_checks(saved: Callable[[str], Path], dtype: Any) -> None:
    model = load_model(saved("llama"), dtype, threads=1)
    layout = model.layout_for(16)
    assert (layout.dtype, layout.itemsize) == (dtype, 2)
    bind(model, 16, 1)
    assert model.forward(step_of([(Sequence([3, 4], [2], [0]), 2)])).dtype == torch.float32


def test_an_arena_of_another_layout_is_refused(saved: Callable[[str], Path]) -> None:
    model = load_model(saved("llama"), "float32", threads=1, seq_check=False)
    half = load_model(saved("llama"), "bfloat16", threads=1, seq_check=False).layout_for(4)
    with pytest.raises(InvariantError, match="cannot hold"):
        model.bind(np.zeros((2, half.block_bytes), np.uint8), half)
    layout = model.layout_for(4)
    with pytest.raises(InvariantError, match="does not hold"):
        model.bind(np.zeros((2, layout.block_bytes + 4), np.uint8), layout)
    with pytest.raises(InvariantError, match="contiguous"):
        model.bind(np.zeros((4, layout.block_bytes), np.uint8)[::2], layout)


def test_a_closed_or_unbound_model_refuses_steps(saved: Callable[[str], Path]) -> None:
    model = load_model(saved("llama"), "float32", threads=1)
    step = step_of([(Sequence([1], [1], [0]), 1)])
    with pytest.raises(InvariantError, match="not bound"):
        model.forward(step)
    bind(model, 4, 1)
    model.close()
    model.close()
    with pytest.raises(InvariantError, match="not bound"):
        model.forward(step)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "convolution layers": (
        lambda: transformers.Lfm2Config(**SIZES, layer_types=["conv", "full_attention", "conv"]),
        "layers of type conv",
    ),
    "recurrence beside attention": (
        lambda: transformers.FalconH1Config(
            **SIZES, head_dim=16, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_state=8, mamba_expand=1
        ),
        "layers of type hybrid",
    ),
    "attention of its own": (
        lambda: transformers.FalconConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB, max_position_embeddings=64
        ),
        "pdactors_paged",
    ),
    "sinks": (
        lambda: transformers.GptOssConfig(**SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1),
        "s_aux",
    ),
    "latent heads": (
        lambda: transformers.DeepseekV3Config(
            **{**SIZES, "num_key_value_heads": 4},
            moe_intermediate_size=32,
            n_routed_experts=4,
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            q_lora_rank=16,
            kv_lora_rank=16,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
        ),
        "heads",
    ),
    "recurrent": (
        lambda: transformers.MambaConfig(hidden_size=64, num_hidden_layers=2, vocab_size=VOCAB, state_size=4),
        "num_attention_heads",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_paged_is_refused(tmp_path: Path, name: str) -> None:
    make, words = REFUSED[name]
    with pytest.raises(ModelError, match=words):
        load_model(save_model(tmp_path, make()), "float32", threads=1)


def test_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(
        d_model=32, d_ff=32, num_layers=1, num_heads=2, d_kv=16, vocab_size=VOCAB, n_positions=64
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="encoder-decoder"):
        load_model(tmp_path, "float32", threads=1)


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_a_layer_type_without_kv_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, CONFIGS["qwen2"]())
    edit_config(folder, layer_types=["full_attention", "chunked_attention", "full_attention"])
    with pytest.raises(ModelError, match="chunked_attention"):
        load_model(folder, "float32", threads=1)


def test_remote_code_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, CONFIGS["llama"]())
    edit_config(
        folder, model_type="home_made", auto_map={"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.M"}
    )
    (folder / "code.py").write_text("raise SystemExit('this must never run')")
    with pytest.raises(ModelError, match="cannot read"):
        load_model(folder, "float32", threads=1)


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    path = save_model(tmp_path, CONFIGS["llama"]()) / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.weight"]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"lack 1 tensors: model\.layers\.1"):
        load_model(tmp_path, "float32", threads=1)


def test_a_config_that_contradicts_the_weights_is_refused(tmp_path: Path) -> None:
    folder = save_model(tmp_path, CONFIGS["llama"]())
    edit_config(folder, num_key_value_heads=4)
    with pytest.raises(ModelError, match="cannot load"):
        load_model(folder, "float32", threads=1)


def test_attention_that_computes_something_else_is_refused(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = paged.paged_attention

    def wrong(module: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs["scaling"] *= 1.5
        return right(module, *args, **kwargs)

    monkeypatch.setattr(paged, "paged_attention", wrong)
    with pytest.raises(ModelError, match="other logits"):
        load_model(saved("llama"), "float32", threads=1)


def test_a_mask_that_attention_is_not_told_of_is_refused(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modeling_mistral, "create_sliding_window_causal_mask", modeling_mistral.create_causal_mask)
    with pytest.raises(ModelError, match="window of 16"):
        load_model(saved("mistral"), "float32", threads=1, seq_check=False)


def test_a_layer_that_bypasses_the_interface_is_refused(
    saved: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = modeling_mistral.MistralAttention.forward

    def forward(self: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, None) if self.layer_idx == 1 else right(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(modeling_mistral.MistralAttention, "forward", forward)
    with pytest.raises(ModelError, match="2 of its 3 layers"):
        load_model(saved("mistral"), "float32", threads=1, seq_check=False)
