"""`ModelShape` and the fingerprint of a model folder: what can be known without loading the weights. No torch."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from pdactors.errors import ModelError

ModelDtype = Literal["bfloat16", "float16", "float32"]

_DTYPE_BYTES: dict[ModelDtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
# Bits of one element by safetensors' dtype names; those that a load converts to the target dtype are `_FLOATS`.
_STORED_BITS = {"F64": 64, "I64": 64, "U64": 64, "C64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16}
_STORED_BITS |= {"I16": 16, "U16": 16, "I8": 8, "U8": 8, "BOOL": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8}
_STORED_BITS |= {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_FLOATS = {"F64", "F32", "F16", "BF16"}
_MAX_HEADER_BYTES = 100 * 2**20  # the limit of the safetensors format itself

# The same fact under the names that model families gave it.
_NUM_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_NUM_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
_NUM_KV_HEADS = ("num_key_value_heads",)
_HIDDEN = ("hidden_size", "n_embd", "d_model")
_MAX_POSITION = ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx")

_NUM_SAMPLES = 64
_SAMPLE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model that memory planning and requests need."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    max_position: int  # positions are 0 .. max_position - 1
    eos_ids: tuple[int, ...]
    weight_bytes: int  # as stored
    num_floats: int  # elements of tensors that a load converts to the wanted dtype
    other_bytes: int  # the rest, which keeps its size
    window: int = 0  # tokens that a layer with a sliding window sees; 0: none has one

    @classmethod
    def read(cls, folder: Path) -> ModelShape:
        """Read the shape from `config.json`, `generation_config.json` and the headers of the weights files.

        Raises:
            ModelError: a file is missing or malformed, or a key is missing or ill-typed; names both.
        """
        path = folder / "config.json"
        outer = _read_json(path)
        config = {**outer, **_mapping(path, outer, "text_config")}
        num_heads = _int(path, config, _NUM_HEADS)
        if config.get("head_dim") is None:
            hidden = _int(path, config, _HIDDEN)
            if hidden % num_heads:
                raise ModelError(f"{path}: {num_heads} attention heads do not divide a hidden size of {hidden}")
            config["head_dim"] = hidden // num_heads
        vocab_size = _int(path, config, ("vocab_size",))
        stored = _stored_weights(folder)
        return cls(
            architecture=_architecture(path, outer),
            num_layers=_int(path, config, _NUM_LAYERS),
            num_heads=num_heads,
            num_kv_heads=_int(path, config, _NUM_KV_HEADS, default=num_heads),
            head_dim=_int(path, config, ("head_dim",)),
            hidden_size=_int(path, config, _HIDDEN),
            vocab_size=vocab_size,
            max_position=_max_position(path, config),
            eos_ids=_eos_ids(folder, config, vocab_size),
            weight_bytes=sum(stored.values()),
            num_floats=sum(size * 8 // _STORED_BITS[name] for name, size in stored.items() if name in _FLOATS),
            other_bytes=sum(size for name, size in stored.items() if name not in _FLOATS),
            window=_window(config),
        )

    def weight_bytes_as(self, dtype: ModelDtype) -> int:
        """Return the bytes of the weights once they are loaded as `dtype`."""
        return self.num_floats * _DTYPE_BYTES[dtype] + self.other_bytes


def model_fingerprint(folder: Path) -> str:
    """Return 16 hex digits that differ for models whose KV or token ids would differ.

    Covers config.json, tokenizer.json, and of every weights file its name, size, header and 64 evenly spaced samples of
    4 KiB, so that it costs milliseconds whatever the model's size.

    Raises:
        ModelError: a file is missing or malformed.
    """
    digest = blake2b(digest_size=8)
    for part in _fingerprint_parts(folder):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def weights_files(folder: Path) -> list[Path]:
    """Return the safetensors files that a load reads, in name order.

    Raises:
        ModelError: there are none, or one that the index names is missing.
    """
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise ModelError(f"{folder}: neither model.safetensors nor model.safetensors.index.json is there")
    names = _mapping(index, _read_json(index), "weight_map").values()
    files = []
    for name in sorted({str(name) for name in names}):
        path = folder / name
        if os.path.basename(name) != name or not path.is_file():
            raise ModelError(f"{index}: weight_map names {name!r}, which is not in the folder")
        files.append(path)
    if not files:
        raise ModelError(f"{index}: weight_map is empty")
    return files


def _fingerprint_parts(folder: Path) -> Iterator[bytes]:
    yield _read_bytes(folder / "config.json")
    tokenizer = folder / "tokenizer.json"
    yield _read_bytes(tokenizer) if tokenizer.is_file() else b""
    for path in weights_files(folder):
        size = path.stat().st_size
        yield path.name.encode()
        yield size.to_bytes(8, "little")
        with path.open("rb") as file:
            header_size = _header_size(path, file.read(8), size)
            yield file.read(header_size)
            step = max(0, size - _SAMPLE_BYTES) / (_NUM_SAMPLES - 1)
            for sample in range(_NUM_SAMPLES):
                file.seek(int(sample * step))
                yield file.read(_SAMPLE_BYTES)


def _stored_weights(folder: Path) -> dict[str, int]:
    """Return the bytes of the weights by stored dtype."""
    stored: dict[str, int] = {}
    for path in weights_files(folder):
        size = path.stat().st_size
        with path.open("rb") as file:
            header_size = _header_size(path, file.read(8), size)
            header = _parse_json(path, file.read(header_size))
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            dtype, num_bytes = _tensor_size(path, name, entry, size - 8 - header_size)
            stored[dtype] = stored.get(dtype, 0) + num_bytes
    return stored


def _header_size(path: Path, prefix: bytes, size: int) -> int:
    header_size = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or header_size > min(_MAX_HEADER_BYTES, size - 8):
        raise ModelError(f"{path}: not a safetensors file, or cut off")
    return header_size


def _tensor_size(path: Path, name: str, entry: Any, payload_bytes: int) -> tuple[str, int]:
    try:
        dtype, (begin, end) = entry["dtype"], entry["data_offsets"]
        num_bytes = math.prod(entry["shape"]) * _STORED_BITS[dtype] // 8
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path}: header entry {name!r} is malformed") from error
    if not 0 <= begin <= end or end - begin != num_bytes:
        raise ModelError(f"{path}: header entry {name!r} is malformed")
    if end > payload_bytes:
        raise ModelError(f"{path}: cut off: tensor {name!r} ends at byte {end} of {payload_bytes}")
    return dtype, num_bytes


def _architecture(path: Path, config: Mapping[str, Any]) -> str:
    names = config.get("architectures")
    if not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise ModelError(f"{path}: architectures must name the model's class, got {names!r}")
    return names[0]


def _max_position(path: Path, config: Mapping[str, Any]) -> int:
    """Return the positions that can be used.

    A longrope model turns its keys by other frequencies once *any* row of a step lies beyond the original length, so
    that sequences would influence each other; within the original length it does not.
    """
    limit = _int(path, config, _MAX_POSITION)
    for key in ("rope_parameters", "rope_scaling"):
        rope = _mapping(path, config, key)
        if "longrope" in (rope.get("rope_type"), rope.get("type")):
            original = {**config, **rope}
            return min(limit, _int(path, original, ("original_max_position_embeddings",), default=limit))
    return limit


def _window(config: Mapping[str, Any]) -> int:
    """Return the sliding window that layers have; 0 if none is used."""
    window, types = config.get("sliding_window"), config.get("layer_types")
    is_used = config.get("use_sliding_window") is not False
    is_used = is_used and (not isinstance(types, list) or "sliding_attention" in types)
    return window if is_used and type(window) is int and window > 0 else 0


def _eos_ids(folder: Path, config: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Return the union of both files' end-of-sequence ids, ascending."""
    sources = [(folder / "config.json", config)]
    generation = folder / "generation_config.json"
    if generation.is_file():
        sources.append((generation, _read_json(generation)))
    found: set[int] = set()
    for path, source in sources:
        value = source.get("eos_token_id")
        ids: Sequence[Any] = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in ids:
            if type(token_id) is not int:
                raise ModelError(f"{path}: eos_token_id must be an integer or a list of them, got {value!r}")
            if 0 <= token_id < vocab_size:  # some families write -1 for "none"
                found.add(token_id)
    return tuple(sorted(found))


def _int(path: Path, config: Mapping[str, Any], names: Sequence[str], *, default: int | None = None) -> int:
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ModelError(f"{path}: {name} must be a positive integer, got {value!r}")
        return value
    if default is None:
        raise ModelError(f"{path}: no {' or '.join(names)}: not a decoder that pdactors can serve")
    return default


def _mapping(path: Path, config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ModelError(f"{path}: {key} must be an object, got {type(value).__name__}")
    return value


def _read_json(path: Path) -> dict[str, Any]:
    return _parse_json(path, _read_bytes(path))


def _parse_json(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, got {type(value).__name__}")
    return value


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror or error}") from error
