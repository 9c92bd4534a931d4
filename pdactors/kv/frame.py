"""What stands in front of every transfer of KV on the wire: the header by which the receiver knows what he got."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple, get_args

import numpy as np
import xxhash
from numpy.typing import NDArray

from pdactors.errors import BadRequest
from pdactors.messages import Codec

_MAGIC = b"pdkv"
_VERSION = 1
# magic, version, codec, is_void, secret, layout, source's and target's incarnation, attempt, transfer, start, count,
# size of the payload in bytes, its checksum
_STRUCT = struct.Struct("<4sBBBx16s16sQQIQIIQQ")
HEADER_BYTES = 128
SECRET_BYTES = 16
_CODECS: tuple[Codec, ...] = get_args(Codec)


class Header(NamedTuple):
    """A transfer's header. The port that it comes in by knows nobody, so the `secret` is what the receiver granted.

    `is_void`: nothing follows, the sender has changed his mind. `checksum` is 0 where none was wanted.
    """

    secret: bytes
    layout: str
    source: int
    target: int
    attempt: int
    transfer: int
    start: int
    num_blocks: int
    codec: Codec
    size: int
    checksum: int = 0
    is_void: bool = False

    def pack(self) -> bytes:
        """Return `HEADER_BYTES` bytes."""
        text = _STRUCT.pack(
            _MAGIC,
            _VERSION,
            _CODECS.index(self.codec),
            self.is_void,
            self.secret,
            self.layout.encode("ascii"),
            self.source,
            self.target,
            self.attempt,
            self.transfer,
            self.start,
            self.num_blocks,
            self.size,
            self.checksum,
        )
        return text.ljust(HEADER_BYTES, b"\0")

    def differs(self, expected: Header) -> str:
        """Say what of it is not as expected, the checksum and `is_void` aside; "" if nothing."""
        for name in self._fields[:-2]:
            theirs, ours = getattr(self, name), getattr(expected, name)
            if theirs != ours:
                return "secret" if name == "secret" else f"{name}: theirs is {theirs}, ours is {ours}"
        return ""


def unpack(data: bytes) -> Header:
    """Read a header.

    Raises:
        BadRequest: these bytes are none, or one of another version.
    """
    if len(data) != HEADER_BYTES:
        raise BadRequest(f"a header has {HEADER_BYTES} bytes, not {len(data)}")
    magic, version, codec, is_void, secret, layout, *numbers = _STRUCT.unpack_from(data)
    if magic != _MAGIC or version != _VERSION or codec >= len(_CODECS):
        raise BadRequest(f"no header of version {_VERSION}: {data[:8].hex()}")
    source, target, attempt, transfer, start, count, size, checksum = numbers
    return Header(
        secret,
        layout.decode("ascii", "replace"),
        source,
        target,
        attempt,
        transfer,
        start,
        count,
        _CODECS[codec],
        size,
        checksum,
        bool(is_void),
    )


def checksum(parts: Iterable[NDArray[np.uint8]]) -> int:
    """Return the xxh3 of the parts one after the other."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part.data)
    return state.intdigest()
