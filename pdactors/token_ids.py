"""`TokenIds`: token ids as one run of bytes, so that a prompt costs a message next to nothing."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, Self, overload

import numpy as np
from numpy.typing import NDArray

MAX_TOKEN_ID = 2**31 - 1
_DTYPE = np.dtype("<u4")


class TokenIds(Sequence[int]):
    """An immutable sequence of token ids, `packed` as little-endian u32.

    Raises:
        ValueError: `packed` is no whole number of ids, or one of them is above `MAX_TOKEN_ID`.
    """

    __slots__ = ("_ids", "packed")

    def __init__(self, packed: bytes) -> None:
        if len(packed) % _DTYPE.itemsize:
            raise ValueError(f"token ids take {_DTYPE.itemsize} bytes each, got {len(packed)} bytes")
        self.packed = packed
        self._ids: NDArray[np.uint32] = np.frombuffer(packed, _DTYPE)
        if packed and (most := int(self._ids.max())) > MAX_TOKEN_ID:
            raise ValueError(f"a token id is at most {MAX_TOKEN_ID}, got {most}")

    @classmethod
    def of(cls, ids: Sequence[int]) -> Self:
        """Pack ids.

        Raises:
            ValueError: one of them is no integer or out of range.
        """
        try:
            return cls(struct.pack(f"<{len(ids)}I", *ids))
        except struct.error as error:
            raise ValueError(f"a token id is an integer in 0..{MAX_TOKEN_ID}: {error}") from error

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> list[int]: ...

    def __getitem__(self, index: int | slice) -> int | list[int]:
        found = self._ids[index]
        return found.tolist() if isinstance(index, slice) else int(found)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __eq__(self, other: object) -> bool:
        return self.packed == other.packed if isinstance(other, TokenIds) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.packed)

    def __repr__(self) -> str:
        return f"TokenIds.of({self._ids.tolist()})"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        """Let numpy read the ids without going through Python integers."""
        return np.array(self._ids, dtype, copy=copy)


NO_TOKENS = TokenIds(b"")


def to_wire(value: object) -> bytes:
    """Encode `TokenIds` for msgspec; TypeError for anything else that it does not know itself."""
    if not isinstance(value, TokenIds):
        raise TypeError(f"a {type(value).__name__} cannot travel in a message")
    return value.packed


def from_wire(kind: type, value: object) -> TokenIds:
    """Decode `TokenIds` for msgspec; ValueError for what they cannot be made of."""
    if kind is not TokenIds or not isinstance(value, bytes):
        raise ValueError(f"expected packed token ids, got {type(value).__name__}")
    return TokenIds(value)
