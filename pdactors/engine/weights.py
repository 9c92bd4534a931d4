"""Reads models of the Llama and Qwen families for our kernels, and says which can be read so."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pdactors.engine.machine import TORCH_DTYPES
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.shape import ModelDtype, ModelShape, weights_files
from pdactors.errors import ModelError
from pdactors.kernels import forward
from pdactors.kernels.pack import DEPTH, DTYPES, ROWS, pack, packed_size, zeros
from pdactors.kernels.simd import LANES

FAMILIES = ("llama", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")  # those whose frequencies do not depend on the length
_LOG2E = 1.4426950408889634


def objection(config: Mapping[str, Any], shape: ModelShape, dtype: ModelDtype) -> str | None:
    """Say why a model cannot run on the lean decoder; None if it can. `config` is config.json."""
    family = config.get("model_type")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    hidden, inner = config.get("hidden_size", 0), config.get("intermediate_size", 0)
    for wrong, what in (
        (family not in FAMILIES, f"model_type {family}"),
        (dtype not in DTYPES, f"dtype {dtype}"),
        ("quantization_config" in config, "quantised weights"),
        (config.get("hidden_act") != "silu", f"hidden_act {config.get('hidden_act')}"),
        (bool(config.get("mlp_bias")), "a bias in its MLP"),
        (bool(config.get("attention_bias")) and family != "qwen2", "a bias in its attention's output"),
        (bool(config.get("use_sliding_window")), "sliding windows"),
        ("sliding_attention" in (config.get("layer_types") or ()), "sliding windows"),
        (kind not in _ROPES, f"rope_type {kind}"),
        (float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))) != 1.0, "partial rotation"),
        (bool(shape.head_dim % DEPTH), f"head_dim {shape.head_dim}, no multiple of {DEPTH}"),
        (bool(hidden % LANES or inner % LANES or not hidden or not inner), f"sizes {hidden} and {inner}"),
        (bool(shape.num_heads % shape.num_kv_heads), f"{shape.num_heads} heads on {shape.num_kv_heads} KV heads"),
    ):
        if wrong:
            return what
    return None


class _Reader:
    """Tensors of a folder by name, converted to a dtype; checks every shape."""

    def __init__(self, folder: Path, dtype: ModelDtype) -> None:
        self._folder = folder
        self._torch_dtype = TORCH_DTYPES[dtype]
        self._files: dict[str, Any] = {}
        for path in weights_files(folder):
            file: Any = safe_open(path, "pt")
            self._files.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def matrix(self, name: str, *size: int) -> NDArray[np.generic]:
        """Return a tensor as uint16 (bfloat16) or float32."""
        tensor = self._tensor(name, size).to(self._torch_dtype).contiguous()
        if tensor.dtype == torch.bfloat16:
            tensor = tensor.view(torch.uint16)
        values: NDArray[np.generic] = tensor.numpy()
        return values

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """Return a tensor as the model's dtype holds it, in float32."""
        values: NDArray[np.float32] = self._tensor(name, (size,)).to(self._torch_dtype).to(torch.float32).numpy()
        return values

    def _tensor(self, name: str, size: tuple[int, ...]) -> Any:
        if name not in self._files:
            raise ModelError(f"{self._folder}: the weights files lack {name}")
        tensor = self._files[name].get_tensor(name)
        if tuple(tensor.shape) != size:
            raise ModelError(f"{self._folder}: {name} has the shape {tuple(tensor.shape)}, expected {size}")
        return tensor


def read_weights(
    folder: Path, shape: ModelShape, dtype: ModelDtype, config: Any, progress: Progress = silent
) -> forward.Model:
    """Read and pack the weights of a model that has no `objection`; `config` is transformers'.

    Raises:
        ModelError: a tensor is missing or has another shape, or the rotation is not to be had.
    """
    reader = _Reader(folder, dtype)
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, shape.head_dim
    heads, kv_heads, vocab = shape.num_heads, shape.num_kv_heads, shape.vocab_size
    attention, qkv = heads * head_dim, (heads + 2 * kv_heads) * head_dim
    matrices = [packed_size(qkv, hidden), packed_size(hidden, attention), packed_size(2 * inner, hidden)]
    matrices.append(packed_size(hidden, inner))
    packed = zeros(shape.num_layers * sum(matrices) + packed_size(vocab, hidden), DTYPES[dtype])
    places = np.full((shape.num_layers + 1, forward.NUM_PLACES), -1, np.int64)
    vectors: list[NDArray[np.float32]] = []
    filled = 0

    def put(row: int, column: int, matrix: NDArray[np.generic]) -> None:
        nonlocal filled
        size = packed_size(*matrix.shape)
        pack(matrix, packed[filled : filled + size])
        places[row, column] = filled
        filled += size

    def note(row: int, column: int, vector: NDArray[np.float32]) -> None:
        places[row, column] = sum(map(len, vectors))
        vectors.append(vector)

    for layer in range(shape.num_layers):
        progress("load the weights", layer, shape.num_layers)
        name = f"model.layers.{layer}"
        parts = (("q", heads), ("k", kv_heads), ("v", kv_heads))
        projections = [reader.matrix(f"{name}.self_attn.{p}_proj.weight", n * head_dim, hidden) for p, n in parts]
        put(layer, forward.QKV, np.concatenate(projections))
        put(layer, forward.OUTPUT, reader.matrix(f"{name}.self_attn.o_proj.weight", hidden, attention))
        gate, up = (reader.matrix(f"{name}.mlp.{part}_proj.weight", inner, hidden) for part in ("gate", "up"))
        by_tile = np.stack([gate.reshape(-1, ROWS, hidden), up.reshape(-1, ROWS, hidden)], 1)
        put(layer, forward.GATE_UP, by_tile.reshape(2 * inner, hidden))
        put(layer, forward.DOWN, reader.matrix(f"{name}.mlp.down_proj.weight", hidden, inner))
        note(layer, forward.NORM, reader.vector(f"{name}.input_layernorm.weight", hidden))
        note(layer, forward.GATED_NORM, reader.vector(f"{name}.post_attention_layernorm.weight", hidden))
        if f"{name}.self_attn.q_proj.bias" in reader:
            biases = [reader.vector(f"{name}.self_attn.{p}_proj.bias", n * head_dim) for p, n in parts]
            note(layer, forward.BIAS, np.concatenate(biases))
        if f"{name}.self_attn.q_norm.weight" in reader:
            note(layer, forward.QUERY_NORM, reader.vector(f"{name}.self_attn.q_norm.weight", head_dim))
            note(layer, forward.KEY_NORM, reader.vector(f"{name}.self_attn.k_norm.weight", head_dim))
    note(shape.num_layers, forward.NORM, reader.vector("model.norm.weight", hidden))
    table = reader.matrix("model.embed_tokens.weight", vocab, hidden)
    tied = config.tie_word_embeddings
    put(shape.num_layers, forward.OUTPUT, table if tied else reader.matrix("lm_head.weight", vocab, hidden))
    sizes = np.zeros(forward.NUM_SIZES, np.int64)
    sizes[[forward.LAYERS, forward.HIDDEN, forward.HEADS, forward.KV_HEADS, forward.HEAD_DIM]] = (
        shape.num_layers,
        hidden,
        heads,
        kv_heads,
        head_dim,
    )
    sizes[[forward.GATED, forward.VOCAB]] = inner, vocab
    scale = head_dim**-0.5 * _LOG2E
    rotations = _rotations(config, shape)
    return forward.Model(
        sizes, config.rms_norm_eps, scale, places, packed, np.concatenate(vectors), table.ravel(), rotations
    )


def _rotations(config: Any, shape: ModelShape) -> NDArray[np.float32]:
    """Return cosines and sines by position, with transformers' own frequencies.

    Raises:
        ModelError: the configuration does not say them.
    """
    try:
        rope: Any = LlamaRotaryEmbedding(config)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise ModelError(f"rope_parameters {config.rope_parameters}: {error!r}") from error
    angles = torch.arange(shape.max_position, dtype=torch.float32)[:, None] * rope.inv_freq.float()
    both = torch.cat([angles.cos(), angles.sin()], 1) * rope.attention_scaling
    values: NDArray[np.float32] = both.to(torch.float32).numpy().ravel()
    return values
