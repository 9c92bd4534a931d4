"""H2O pruning: which tokens' KV is kept when it moves, and packing it into fewer blocks. Pure: no I/O, no clock.

After Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference" (2023), with the attention sinks of
Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023). K is rotated already: a token keeps the
position that it had, whatever slot it lies in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from pdactors.kernels import gather as kernel
from pdactors.kv.layout import KVLayout

SINKS = 4  # first tokens, which attention rests on whatever they are
RECENT = 64  # last tokens, at most half of what is kept
REACH = 7  # tokens on each side that are kept for the sake of one
_ELEMENTS = {2: np.uint16, 4: np.uint32}


def num_kept(num_tokens: int, share: float) -> int:
    """Return how many of a prompt's tokens are kept: `share` of them rounded up, and never less than the sinks and one.

    Raises:
        ValueError: the share is not above 0 and at most 1.
    """
    if not 0 < share <= 1:
        raise ValueError(f"a share of tokens is above 0 and at most 1, not {share}")
    return min(num_tokens, max(SINKS + 1, math.ceil(share * num_tokens)))


def spread(scores: NDArray[np.floating], reach: int = REACH) -> NDArray[np.floating]:
    """Give each token `[..., tokens]` the highest score among those up to `reach` away.

    What is asked for stands next to what the question repeats: without its neighbours a token is of no use. After
    Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (2024).
    """
    edges = [(0, 0)] * (scores.ndim - 1) + [(reach, reach)]
    padded = np.pad(scores, edges, constant_values=-np.inf)
    highest: NDArray[np.floating] = np.lib.stride_tricks.sliding_window_view(padded, 2 * reach + 1, axis=-1).max(-1)
    return highest


def select(scores: NDArray[np.floating], share: float) -> NDArray[np.int64]:
    """Choose tokens by the attention that they got, float `[layers, kv_heads, tokens]`.

    Returns their indices `[layers, kv_heads, num_kept]`, ascending: the sinks, the most recent ones, and of the rest
    those with the highest scores, the first of equals.

    Raises:
        ValueError: the share or the scores' shape is wrong, or a score is not finite.
    """
    if scores.ndim != 3:
        raise ValueError(f"scores of shape {list(scores.shape)}: expected [layers, kv_heads, tokens]")
    if not np.isfinite(scores).all():
        raise ValueError("a score is not finite")
    num_tokens = scores.shape[2]
    count = num_kept(num_tokens, share)
    wanted = scores.astype(np.float64)
    wanted[..., :SINKS] = np.inf
    wanted[..., num_tokens - min(RECENT, (count - min(SINKS, count) + 1) // 2) :] = np.inf
    order = np.argsort(-wanted, axis=-1, kind="stable")[..., :count]
    return np.sort(order, axis=-1).astype(np.int64)


def gather(
    layout: KVLayout,
    source: NDArray[np.uint8],
    blocks: Sequence[int],
    kept: NDArray[np.int64],
    target: NDArray[np.uint8],
    rows: Sequence[int],
) -> None:
    """Pack tokens of a sequence in `blocks` of `source`, `kept` `[layers, kv_heads, count]`, into `rows` of `target`.

    Both arrays are uint8 `[num_blocks, block_bytes]`, and may be one. Slots behind the last token are left as they are.

    Raises:
        ValueError: an array, a token or a block does not fit; the target is too short, or names a block twice or one
            that is read.
    """
    read, written = _rows("source", layout, source, blocks), _rows("target", layout, target, rows)
    if kept.shape[:2] != (layout.num_layers, layout.num_kv_heads) or kept.ndim != 3 or kept.dtype != np.int64:
        raise ValueError(f"kept of {kept.dtype}{list(kept.shape)} is not int64 [layers, kv_heads, count] of {layout}")
    num_tokens = len(read) * layout.block_tokens
    if kept.size and not (kept.min() >= 0 and kept.max() < num_tokens):
        raise ValueError(f"tokens {kept.min()} to {kept.max()} are not all among the {num_tokens} in the blocks")
    if layout.num_blocks(kept.shape[2]) > len(written):
        raise ValueError(f"{len(written)} blocks cannot hold {kept.shape[2]} tokens")
    if len(np.unique(written)) != len(written):
        raise ValueError("a block of the target is named twice")
    if np.shares_memory(source, target) and np.intersect1d(read, written).size:
        raise ValueError("a block is both read and written")
    if not target.flags.writeable:
        raise ValueError("target cannot be written to")
    element = _ELEMENTS[layout.itemsize]
    flat, into = source.reshape(-1).view(element), target.reshape(-1).view(element)
    block_elements = layout.block_bytes // layout.itemsize
    kernel.gather(flat, read, kept, block_elements, layout.head_dim, layout.block_tokens, into, written)


def _rows(what: str, layout: KVLayout, array: NDArray[np.uint8], blocks: Sequence[int]) -> NDArray[np.int64]:
    if array.dtype != np.uint8 or array.ndim != 2 or array.shape[1] != layout.block_bytes:
        raise ValueError(f"{what} of {array.dtype}{list(array.shape)}: expected uint8 [n, {layout.block_bytes}]")
    if not (array.flags.c_contiguous and array.ctypes.data % layout.itemsize == 0):
        raise ValueError(f"{what} is not contiguous and aligned to {layout.dtype}")
    rows = np.asarray(blocks, np.int64).reshape(-1)
    if len(rows) and not (rows.min() >= 0 and rows.max() < len(array)):
        raise ValueError(f"blocks {rows.min()} to {rows.max()} are not all among the {len(array)} of the {what}")
    return rows
