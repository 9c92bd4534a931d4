from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.decoder import Decoder
from pdactors.engine.load import load_model, why_not_lean
from pdactors.engine.model import PagedModel
from pdactors.engine.shape import ModelShape
from pdactors.engine.weights import objection
from pdactors.errors import InvariantError, ModelError

VOCAB = 101  # no multiple of 16
BLOCK_TOKENS = 32
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 128}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}
CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "llama-tied": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama-mha": lambda: transformers.LlamaConfig(**{**SIZES, "num_key_value_heads": 6}),
    "llama-wide-heads": lambda: transformers.LlamaConfig(**{**SIZES, "head_dim": 128}),
    "llama3-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "yarn-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=YARN),
    "linear-rope": lambda: transformers.LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES),
    "qwen3": lambda: transformers.Qwen3Config(**{**SIZES, "head_dim": 64}),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return folders of models with random weights large enough that attention matters."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            torch.manual_seed(7)
            model = AutoModelForCausalLM.from_config(CONFIGS[name]())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.normal_(1.0 if parameter.ndim == 1 else 0.0, 0.15)
            model.save_pretrained(made[name])
        return made[name]

    return folder


@pytest.fixture(scope="module")
def llama(saved: Callable[[str], Path]) -> Path:
    return saved("llama")


def bind(model: PagedModel, num_blocks: int) -> np.ndarray:
    """Give the model an arena that is all NaN."""
    layout = model.layout_for(BLOCK_TOKENS)
    payload = np.full((num_blocks, layout.block_bytes), 0xFF, np.uint8)
    model.bind(payload, layout)
    return payload


def run(model: PagedModel, *parts: tuple[list[int], int, list[int]]) -> np.ndarray:
    """Run a step of parts given as new tokens, how many are stored before them, and blocks; return all logits."""
    ids: list[int] = []
    positions: list[int] = []
    spans = []
    for tokens, past, blocks in parts:
        spans.append(Span(len(ids), len(tokens), past + len(tokens), blocks))
        ids += tokens
        positions += range(past, past + len(tokens))
    return model.forward(StepBatch(ids, positions, spans, range(len(ids)))).numpy().copy()


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(VOCAB, size=count).tolist()


# ---- Held against transformers --------


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_every_layers_kv_equal_those_of_transformers(saved: Callable[[str], Path], name: str) -> None:
    model = load_model(saved(name), "float32", way="lean")
    reference = AutoModelForCausalLM.from_pretrained(saved(name), dtype=torch.float32, attn_implementation="eager")
    payload = bind(model, 6)
    tokens, blocks = some_tokens(75), [4, 0, 5]
    found = np.concatenate(
        [
            run(model, (tokens[:40], 0, blocks)),
            run(model, (tokens[40:74], 40, blocks)),
            run(model, (tokens[74:], 74, blocks)),
        ]
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), use_cache=True)
    torch.testing.assert_close(torch.from_numpy(found), expected.logits[0], rtol=1e-4, atol=2e-4)
    shape = model.shape
    arena = payload.view(np.float32).reshape(6, shape.num_layers, 2, shape.num_kv_heads, -1)[blocks]
    for layer in range(shape.num_layers):
        keys = arena[:, layer, 0].reshape(3, -1, BLOCK_TOKENS, shape.head_dim)
        values = arena[:, layer, 1].reshape(3, -1, shape.head_dim, BLOCK_TOKENS).transpose(0, 1, 3, 2)
        cached = expected.past_key_values.layers[layer]
        for ours, theirs in ((keys, cached.keys), (values, cached.values)):
            together = ours.transpose(1, 0, 2, 3).reshape(shape.num_kv_heads, -1, shape.head_dim)[:, :75]
            torch.testing.assert_close(torch.from_numpy(together.copy()), theirs[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(saved: Callable[[str], Path], name: str) -> None:
    tokens = some_tokens(60)
    with torch.inference_mode():
        exact, rounded = (
            AutoModelForCausalLM.from_pretrained(saved(name), dtype=dtype)(torch.tensor([tokens])).logits[0].float()
            for dtype in (torch.float32, torch.bfloat16)
        )
    model = load_model(saved(name), "bfloat16", way="lean")
    bind(model, 2)
    ours = torch.from_numpy(run(model, (tokens, 0, [1, 0])))
    assert (ours - exact).abs().mean() < 1.2 * (rounded - exact).abs().mean()


# ---- What else is in a step changes no bit --------


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_prompts_cut_and_its_company_change_no_bit(saved: Callable[[str], Path], name: str, dtype: Any) -> None:
    model = load_model(saved(name), dtype, way="lean")
    payload = bind(model, 12)
    tokens, blocks = some_tokens(70), [7, 2, 9]
    whole = run(model, (tokens, 0, blocks))
    stored = payload[blocks].copy()
    others = [(some_tokens(count, count), 0, [i]) for i, count in zip((0, 1, 3), (1, 17, 30), strict=True)]
    payload[:] = 0xFF
    parts = []
    for begin, end in ((0, 1), (1, 33), (33, 64), (64, 69), (69, 70)):
        found = run(model, others[0], (tokens[begin:end], begin, blocks), *others[1:])
        parts.append(found[1 : 1 + end - begin])
    assert (np.concatenate(parts) == whole).all()
    assert (payload[blocks] == stored).all()


@pytest.mark.parametrize("threads", [2, 3, 5])
def test_the_number_of_threads_changes_no_bit(llama: Path, threads: int) -> None:
    model = load_model(llama, "bfloat16", way="lean")
    bind(model, 8)
    steps = [(some_tokens(40), 0, [0, 1]), (some_tokens(3, 2), 0, [2])]
    alone = run(model, *steps)
    model.use_threads(threads)
    assert (run(model, *steps) == alone).all()
    assert (run(model, (some_tokens(1), 0, [3])) == run(model, (some_tokens(1), 0, [4]))).all()


def test_only_the_wanted_rows_get_logits(llama: Path) -> None:
    model = load_model(llama, "float32", way="lean")
    bind(model, 2)
    tokens = some_tokens(9)
    full = run(model, (tokens, 0, [0]))
    step = StepBatch(tokens, range(9), [Span(0, 9, 9, [1])], [8, 2])
    assert (model.forward(step).numpy() == full[[8, 2]]).all()
    assert model.forward(StepBatch(tokens, range(9), [Span(0, 9, 9, [1])], [])).shape == (0, VOCAB)
    assert model.attention_s > 0


# ---- Which way --------


def test_a_supported_model_is_lean(llama: Path) -> None:
    model = load_model(llama, "bfloat16", way="lean")
    assert isinstance(model, Decoder)
    assert (model.way, model.description) == ("lean", "lean")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gpt2"}, "model_type gpt2"),
        ({"hidden_act": "gelu"}, "hidden_act gelu"),
        ({"mlp_bias": True}, "a bias in its MLP"),
        ({"attention_bias": True}, "a bias in its attention's output"),
        ({"use_sliding_window": True}, "sliding windows"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding windows"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_type dynamic"),
        ({"rope_scaling": {"type": "longrope"}, "rope_parameters": None}, "rope_type longrope"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial rotation"),
        ({"quantization_config": {}}, "quantised weights"),
        ({"hidden_size": 72}, "sizes 72 and 112"),
    ],
)
def test_what_our_kernels_cannot_compute_is_said(llama: Path, change: dict[str, Any], reason: str) -> None:
    config = {**json.loads((llama / "config.json").read_text()), **change}
    assert objection(config, ModelShape.read(llama), "float32") == reason


def test_dtype_head_size_and_blocks_decide_too(llama: Path, saved: Callable[[str], Path]) -> None:
    shape = ModelShape.read(llama)
    assert why_not_lean(llama, shape, "float16", 32) == "dtype float16"
    assert why_not_lean(llama, shape, "float32", 16) == "blocks of 16 tokens, no multiple of 32"
    assert why_not_lean(llama, shape, "float32", 64) == ""
    model = load_model(llama, "float32", block_tokens=16)
    assert model.description == "transformers: blocks of 16 tokens, no multiple of 32"
    with pytest.raises(ModelError, match="no multiple of 32: our kernels cannot compute that"):
        load_model(llama, "float32", block_tokens=16, way="lean")


def test_blocks_that_are_too_small_are_not_bound(llama: Path) -> None:
    model = load_model(llama, "float32", way="lean")
    layout = model.layout_for(16)
    with pytest.raises(InvariantError, match="reads 32 tokens at once, not 16"):
        model.bind(np.zeros((2, layout.block_bytes), np.uint8), layout)


@pytest.mark.parametrize("change", ["missing", "shape"])
def test_weights_that_do_not_fit_are_refused_by_name(llama: Path, tmp_path: Path, change: str) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name][:-1].clone()
    if change == "missing":
        del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=name.replace(".", r"\.")):
        load_model(tmp_path, "float32", way="lean")


@pytest.mark.parametrize("rope", [{"rope_type": "yarn", "rope_theta": 1e4}, {"rope_type": "linear", "rope_theta": "x"}])
def test_a_rotation_that_is_not_described_is_refused(llama: Path, tmp_path: Path, rope: dict[str, Any]) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "rope_parameters": rope}))
    with pytest.raises(ModelError):
        load_model(tmp_path, "float32", way="lean")


# ---- A step that is wrong --------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"input_ids": [1, VOCAB, 3]}, "token id"),
        ({"positions": [0, 1, 512]}, "position"),
        ({"logit_rows": [3]}, "logit row"),
        ({"spans": [Span(0, 3, 3, [2])]}, "leave the arena"),
        ({"spans": [Span(0, 3, 33, [1])]}, "cannot hold"),
        ({"spans": [Span(0, 2, 2, [1])]}, "cover 2 of the step's 3 rows"),
    ],
)
def test_a_wrong_step_writes_nothing(llama: Path, change: dict[str, Any], text: str) -> None:
    model = load_model(llama, "float32", way="lean")
    payload = bind(model, 2)
    step = {"input_ids": [1, 2, 3], "positions": [0, 1, 2], "spans": [Span(0, 3, 3, [1])], "logit_rows": [2], **change}
    with pytest.raises(InvariantError, match=text):
        model.forward(StepBatch(**step))
    assert (payload == 0xFF).all()


def test_an_unbound_model_computes_nothing(llama: Path) -> None:
    model = load_model(llama, "float32", way="lean")
    bind(model, 1)
    model.close()
    with pytest.raises(InvariantError, match="not bound"):
        run(model, ([1], 0, [0]))
