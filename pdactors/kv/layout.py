"""`KVLayout`: dtype, shape and inner order of a KV block, and the sizes that follow from them."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from hashlib import blake2b
from typing import Literal, get_args

KVDtype = Literal["bfloat16", "float16", "float32"]

LAYOUT_VERSION = 2  # changes when the inner order of a block does
_ITEMSIZE: dict[KVDtype, int] = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class KVLayout:
    """How one block holds `block_tokens` tokens of all layers.

    A block is one run of bytes, `[layers, 2, kv_heads, plane]`; in the second axis 0 is K, whose planes are
    `[block_tokens, head_dim]`, and 1 is V, whose planes are `[head_dim, block_tokens]`: so both products of attention
    read rows of a block as they lie.

    Raises:
        ValueError: a field is out of range.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    dtype: KVDtype

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in _ITEMSIZE:
            raise ValueError(f"dtype must be one of {', '.join(get_args(KVDtype))}, got {self.dtype!r}")

    @property
    def itemsize(self) -> int:
        """Bytes of one number."""
        return _ITEMSIZE[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.token_bytes * self.block_tokens

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`[layers, 2, kv_heads, block_tokens * head_dim]`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_tokens * self.head_dim)

    def num_blocks(self, num_tokens: int) -> int:
        """Return how many blocks hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_tokens)

    @property
    def fingerprint(self) -> str:
        """16 hex digits; equal exactly when blocks can be read by each other's rules."""
        text = ",".join(str(value) for value in (LAYOUT_VERSION, *astuple(self)))
        return blake2b(text.encode(), digest_size=8).hexdigest()
