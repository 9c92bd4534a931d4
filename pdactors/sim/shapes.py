"""`ModelSize`: the sizes of a model that a cost model needs, from a Hugging Face config.json; no weights are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdactors.engine.shape import ModelDtype
from pdactors.errors import ConfigError

DTYPE_BYTES: dict[ModelDtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
_CONFIGS: dict[str, dict[str, Any]] = {
    "llama-3-8b": {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "llama-3-70b": {
        "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192,
    },
    "smollm2-135m": {
        "num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    },
}  # fmt: skip
for _size in ("8b", "70b"):
    _CONFIGS[f"llama-3.1-{_size}"] = _CONFIGS[f"llama-3-{_size}"] | {"max_position_embeddings": 131072}
PRESETS = tuple(_CONFIGS)


@dataclass(frozen=True)
class ModelSize:
    """A dense decoder. `num_mlp_matrices` is 3 with a gate, as Llama's, else 2."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_mlp_matrices: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    has_own_head: bool

    @classmethod
    def find(cls, model: str) -> ModelSize:
        """Return a preset's sizes, or those of a folder or a config.json in Hugging Face format.

        Raises:
            ConfigError: there is no such thing, or it is no dense decoder that we know the sizes of.
        """
        if model in _CONFIGS:
            return cls.of(model, _CONFIGS[model])
        path = Path(model).expanduser()
        path = path / "config.json" if path.is_dir() else path
        try:
            config = json.loads(path.read_bytes())
        except OSError as error:
            known = ", ".join(PRESETS)
            raise ConfigError(f"{model} is neither {known} nor a readable config.json: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON: {error}") from error
        if not isinstance(config, dict):
            raise ConfigError(f"{path} holds no object")
        return cls.of(path.parent.name or model, config | (config.get("text_config") or {}))

    @classmethod
    def of(cls, name: str, config: Mapping[str, Any]) -> ModelSize:
        """Read a config; raises ConfigError that names the key."""
        if any((config.get(key) or 1) > 1 for key in _EXPERTS):
            raise ConfigError(f"{name} is a mixture of experts; only dense models can be simulated")
        hidden = _number(name, config, "hidden_size", "n_embd", "d_model")
        heads = _number(name, config, "num_attention_heads", "n_head", "n_heads")
        return cls(
            name=name,
            num_layers=_number(name, config, "num_hidden_layers", "n_layer", "n_layers"),
            hidden_size=hidden,
            intermediate_size=_number(name, config, "intermediate_size", "ffn_dim", "n_inner", default=4 * hidden),
            num_mlp_matrices=3 if config.get("intermediate_size") else 2,
            num_heads=heads,
            num_kv_heads=_number(name, config, "num_key_value_heads", default=heads),
            head_dim=_number(name, config, "head_dim", default=hidden // heads),
            vocab_size=_number(name, config, "vocab_size"),
            max_position=_number(name, config, "max_position_embeddings", "n_positions", "n_ctx", default=2**20),
            has_own_head=not config.get("tie_word_embeddings", False),
        )

    @property
    def body_params(self) -> int:
        """Weights of all layers: what each token is multiplied with."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        mlp = self.num_mlp_matrices * self.hidden_size * self.intermediate_size
        return self.num_layers * (attention + mlp)

    @property
    def head_params(self) -> int:
        """Weights of the head, which only rows that are sampled from are multiplied with."""
        return self.vocab_size * self.hidden_size

    @property
    def num_params(self) -> int:
        """All weights, but for norms and biases."""
        return self.body_params + self.head_params * (2 if self.has_own_head else 1)

    def weight_bytes(self, dtype: ModelDtype) -> int:
        """Bytes of the weights."""
        return self.num_params * DTYPE_BYTES[dtype]

    @property
    def pair_flops(self) -> int:
        """Operations of attention for one token and one token of its context, over all layers."""
        return 4 * self.head_dim * self.num_heads * self.num_layers


def _number(name: str, config: Mapping[str, Any], *keys: str, default: int | None = None) -> int:
    for key in keys:
        value = config.get(key)
        if value is not None:
            if type(value) is not int or value < 1:
                raise ConfigError(f"{name}: {key} must be a positive integer, got {value!r}")
            return value
    if default is None:
        raise ConfigError(f"{name}: its config has no {' or '.join(keys)}")
    return default
