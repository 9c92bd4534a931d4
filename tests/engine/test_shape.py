from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from pdactors.engine.shape import ModelShape, model_fingerprint, weights_files
from pdactors.errors import ModelError

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "eos_token_id": 2,
}


def write_weights(path: Path, tensors: dict[str, tuple[str, list[int], int]], *, fill: int = 1) -> None:
    """Write a safetensors file by hand: name -> (dtype, shape, bytes)."""
    header, begin = {}, 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, begin + size]}
        begin += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes([fill]) * begin)


def write_model(folder: Path, config: dict[str, Any] | None = None, generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG if config is None else config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    write_weights(
        folder / "model.safetensors",
        {"a": ("BF16", [10, 10], 200), "b": ("F32", [5], 20), "c": ("I8", [7], 7), "d": ("F64", [1], 8)},
    )
    return folder


def test_a_shape_is_read_from_the_folder(tmp_path: Path) -> None:
    shape = ModelShape.read(write_model(tmp_path))
    assert shape == ModelShape("LlamaForCausalLM", 3, 4, 2, 16, 64, 100, 128, (2,), 235, 106, 7)


def test_weight_bytes_follow_the_target_dtype(tmp_path: Path) -> None:
    shape = ModelShape.read(write_model(tmp_path))
    assert [shape.weight_bytes_as(dtype) for dtype in ("bfloat16", "float32")] == [106 * 2 + 7, 106 * 4 + 7]


def test_older_names_of_the_keys_are_understood(tmp_path: Path) -> None:
    config = {"architectures": ["GPT2LMHeadModel"], "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32}
    shape = ModelShape.read(write_model(tmp_path, {**config, "vocab_size": 10}))
    assert (shape.num_layers, shape.num_kv_heads, shape.head_dim, shape.max_position) == (2, 4, 16, 32)


def test_a_nested_text_config_wins_over_the_outer_one(tmp_path: Path) -> None:
    config = {"architectures": ["X"], "eos_token_id": 5, "vocab_size": 7, "text_config": {**CONFIG, "head_dim": 40}}
    shape = ModelShape.read(write_model(tmp_path, config))
    assert (shape.architecture, shape.vocab_size, shape.head_dim, shape.eos_ids) == ("X", 100, 40, (2,))


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        ([7, 2], None, (2, 7)),
        (2, {"eos_token_id": [9, 2]}, (2, 9)),
        (None, {"eos_token_id": 4}, (4,)),
        (None, {}, ()),
        (-1, None, ()),
    ],
)
def test_eos_ids_are_the_union_of_both_files(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    assert (
        ModelShape.read(write_model(tmp_path, {**CONFIG, "eos_token_id": in_config}, in_generation)).eos_ids == expected
    )


@pytest.mark.parametrize(
    ("keys", "window"),
    [
        ({}, 0),
        ({"sliding_window": None}, 0),
        ({"sliding_window": 24}, 24),
        ({"sliding_window": 24, "use_sliding_window": False}, 0),
        ({"sliding_window": 24, "use_sliding_window": True}, 24),
        ({"sliding_window": 24, "layer_types": ["full_attention"]}, 0),
        ({"sliding_window": 24, "layer_types": ["full_attention", "sliding_attention"]}, 24),
    ],
)
def test_a_sliding_window_counts_where_it_is_used(tmp_path: Path, keys: dict[str, Any], window: int) -> None:
    assert ModelShape.read(write_model(tmp_path, {**CONFIG, **keys})).window == window


def test_longrope_ends_at_the_original_length(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 32}
    assert ModelShape.read(write_model(tmp_path, {**CONFIG, "rope_parameters": rope})).max_position == 32
    outside = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 64}
    assert ModelShape.read(write_model(tmp_path, {**CONFIG, **outside})).max_position == 64


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"num_attention_heads": "4"}, "num_attention_heads must be a positive integer, got '4'"),
        ({"num_attention_heads": True}, "num_attention_heads must be"),
        ({"vocab_size": 0}, "vocab_size must be"),
        ({"num_attention_heads": 5}, "5 attention heads do not divide"),
        ({"architectures": []}, "architectures must name"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"eos_token_id": "</s>"}, "eos_token_id must be"),
    ],
)
def test_a_bad_key_is_named_with_its_file(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=rf"config\.json: {words}"):
        ModelShape.read(write_model(tmp_path, {**CONFIG, **change}))


def test_a_missing_or_malformed_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json: No such file"):
        ModelShape.read(tmp_path)
    write_model(tmp_path)
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"generation_config\.json: not valid JSON"):
        ModelShape.read(tmp_path)
    (tmp_path / "generation_config.json").write_text("[]")
    with pytest.raises(ModelError, match="expected a JSON object, got list"):
        ModelShape.read(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"neither model\.safetensors nor"):
        ModelShape.read(tmp_path)


@pytest.mark.parametrize("keep", [0, 5, 60, 400])
def test_a_weights_file_that_is_cut_off_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    content = path.read_bytes()
    assert keep < len(content)
    path.write_bytes(content[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors: .*cut off"):
        ModelShape.read(tmp_path)


@pytest.mark.parametrize("entry", [("F4096", [1], 8), ("F32", [3], 8), ("F32", ["x"], 8)])
def test_a_malformed_header_is_refused(tmp_path: Path, entry: Any) -> None:
    write_weights(write_model(tmp_path) / "model.safetensors", {"bad": entry})
    with pytest.raises(ModelError, match="entry 'bad' is malformed"):
        ModelShape.read(tmp_path)


def test_shards_are_found_by_the_index(tmp_path: Path) -> None:
    write_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    for name in ("x-1.safetensors", "x-2.safetensors"):
        write_weights(tmp_path / name, {name: ("F32", [4], 16)})
    index = {"weight_map": {"a": "x-2.safetensors", "b": "x-1.safetensors", "c": "x-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [path.name for path in weights_files(tmp_path)] == ["x-1.safetensors", "x-2.safetensors"]
    assert ModelShape.read(tmp_path).weight_bytes == 32
    (tmp_path / "x-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"names 'x-1\.safetensors', which is not in the folder"):
        weights_files(tmp_path)


def test_an_index_cannot_lead_out_of_the_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    write_model(folder)
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    with pytest.raises(ModelError, match="not in the folder"):
        weights_files(folder)


def test_the_fingerprint_follows_what_decides_tokens_and_kv(tmp_path: Path) -> None:
    write_model(tmp_path)
    seen = [model_fingerprint(tmp_path)]
    assert len(seen[0]) == 16
    assert seen[0] == model_fingerprint(tmp_path)
    (tmp_path / "generation_config.json").write_text("{}")
    assert model_fingerprint(tmp_path) == seen[0]

    (tmp_path / "tokenizer.json").write_text("{}")
    seen.append(model_fingerprint(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "rope_theta": 3}))
    seen.append(model_fingerprint(tmp_path))
    write_weights(tmp_path / "model.safetensors", {"a": ("F32", [100_000], 400_000)})
    seen.append(model_fingerprint(tmp_path))
    write_weights(tmp_path / "model.safetensors", {"b": ("F32", [100_000], 400_000)})
    seen.append(model_fingerprint(tmp_path))
    write_weights(tmp_path / "model.safetensors", {"b": ("F32", [100_000], 400_000)}, fill=2)
    seen.append(model_fingerprint(tmp_path))
    assert len(set(seen)) == len(seen)


def test_the_last_bytes_of_the_weights_are_sampled(tmp_path: Path) -> None:
    path = write_model(tmp_path) / "model.safetensors"
    write_weights(path, {"a": ("F32", [100_000], 400_000)})
    before = model_fingerprint(tmp_path)
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    assert model_fingerprint(tmp_path) != before
