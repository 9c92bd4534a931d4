"""KV codecs: blocks to frames that are smaller, and back with a bounded error. Pure: no I/O, no clock.

What a frame holds is in `kernels/quantise.py`. Frames of a codec and a layout have one size, whatever the block holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from pdactors.kernels import quantise
from pdactors.kv.layout import KVDtype, KVLayout

CodecName = Literal["int8", "int4"]

_ELEMENTS: dict[KVDtype, type[np.generic]] = {"bfloat16": np.uint16, "float16": np.int16, "float32": np.float32}


@dataclass(frozen=True, slots=True)
class Form:
    """What a codec consists of. `sizes` are layers, kv_heads, head_dim and block_tokens; arrays are flat.

    `encode(elements, rows, block_elements, *sizes, frames)` writes the frames of the blocks in `rows`, one after
    the other; `decode(frames, rows, block_elements, *sizes, elements)` is its reverse. bfloat16 elements are uint16.
    """

    frame_bytes: Callable[[int, int, int, int], int]
    encode: Callable[..., None]
    decode: Callable[..., None]


FORMS: dict[str, Form] = {
    "int8": Form(quantise.frame_bytes8, quantise.encode8, quantise.decode8),
    "int4": Form(quantise.frame_bytes4, quantise.encode4, quantise.decode4),
}


def encoded_bytes(codec: CodecName, layout: KVLayout) -> int:
    """Return the bytes of one block's frame.

    Raises:
        ValueError: there is no such codec.
    """
    return _codec(codec).frame_bytes(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_tokens)


def encode(
    codec: CodecName,
    layout: KVLayout,
    source: NDArray[np.uint8],
    out: NDArray[np.uint8],
    *,
    blocks: Sequence[int] | NDArray[np.int64] | None = None,
) -> None:
    """Encode blocks, all of `source` or those that `blocks` names, into `out`.

    `source` is uint8 `[num_blocks, block_bytes]`, `out` uint8 `[n, encoded_bytes]`. A number that is not finite spoils
    those of its own group (16 or 32 channels of its token) and no other.

    Raises:
        ValueError: there is no such codec, an array does not fit, or a block is not in the source.
    """
    found = _codec(codec)
    elements, rows = _blocks("source", layout, source, blocks)
    frames = _frames(codec, layout, out, len(rows))
    if not out.flags.writeable:
        raise ValueError("out cannot be written to")
    found.encode(elements, rows, layout.block_bytes // layout.itemsize, *_sizes(layout), frames)


def decode(
    codec: CodecName,
    layout: KVLayout,
    frames: NDArray[np.uint8],
    target: NDArray[np.uint8],
    *,
    blocks: Sequence[int] | NDArray[np.int64] | None = None,
) -> None:
    """Decode `frames`, uint8 `[n, encoded_bytes]`, into blocks: all of `target`, or those that `blocks` names.

    Any bytes can be decoded; what is not finite among a frame's scales is not finite in the block.

    Raises:
        ValueError: as `encode`, or a block is named twice.
    """
    found = _codec(codec)
    elements, rows = _blocks("target", layout, target, blocks)
    if not target.flags.writeable:
        raise ValueError("target cannot be written to")
    if len(np.unique(rows)) != len(rows):
        raise ValueError("a block of the target is named twice")
    given = _frames(codec, layout, frames, len(rows))
    found.decode(given, rows, layout.block_bytes // layout.itemsize, *_sizes(layout), elements)


def prepare(codec: CodecName, layout: KVLayout) -> None:
    """Have a codec compiled for the layout's dtype, or loaded from the cache: takes seconds the first time.

    Raises:
        ValueError: there is no such codec.
    """
    small = KVLayout(1, 1, 1, 1, layout.dtype)
    block, frame = np.zeros((1, small.block_bytes), np.uint8), np.zeros((1, encoded_bytes(codec, small)), np.uint8)
    encode(codec, small, block, frame)
    decode(codec, small, frame, block)


def _codec(name: str) -> Form:
    if name not in FORMS:
        raise ValueError(f"no codec {name!r}; there are {', '.join(FORMS)}")
    return FORMS[name]


def _sizes(layout: KVLayout) -> tuple[int, int, int, int]:
    return layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_tokens


def _blocks(
    what: str, layout: KVLayout, array: NDArray[np.uint8], blocks: Sequence[int] | NDArray[np.int64] | None
) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return an array of blocks as flat elements, and the rows in use."""
    _check(what, array, layout.block_bytes)
    elements = array.reshape(-1).view(_ELEMENTS[layout.dtype])
    if not elements.flags.aligned:
        raise ValueError(f"{what} is not aligned to {layout.dtype}")
    rows = np.arange(len(array)) if blocks is None else np.asarray(blocks, np.int64).reshape(-1)
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(array)):
        raise ValueError(f"blocks {rows.min()} to {rows.max()} are not all among the {len(array)} of the {what}")
    return elements, rows


def _frames(codec: CodecName, layout: KVLayout, frames: NDArray[np.uint8], count: int) -> NDArray[np.uint8]:
    _check("frames", frames, encoded_bytes(codec, layout))
    if len(frames) != count:
        raise ValueError(f"{len(frames)} frames for {count} blocks")
    return frames.reshape(-1)


def _check(what: str, array: NDArray[np.uint8], width: int) -> None:
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != width or not array.flags.c_contiguous:
        raise ValueError(f"{what} of {array.dtype}{list(array.shape)}: expected contiguous uint8 [n, {width}]")
