"""Attention of a step over the arena, read in place: one kernel for prompts and for single tokens.

Scores are computed transposed, S = K Q: rows are the 32 tokens of a chunk as they lie in their K plane, columns are 16
queries, so that the queries' maxima and sums are one register each. The query heads that share a KV head and the tokens
of a prompt are columns alike. Then O = V P, whose rows are those of the V plane.

Chunks begin at multiples of 32 tokens and are taken in order, one by one; what a query does not see changes nothing.
Hence an element's value depends neither on how a prompt was cut nor on what else is in the step. Maxima are rounded up
to whole powers of two: scaling sums by them rounds nothing, and is seldom needed.
"""

from __future__ import annotations

from numba import njit

from pdactors.kernels.chunk import FEW, ask, clear, collect, put_down, score, take_up
from pdactors.kernels.pack import DEPTH, ROWS
from pdactors.kernels.pairs import store_pair
from pdactors.kernels.powers import exp2, exp2_for
from pdactors.kernels.product import tiled
from pdactors.kernels.simd import (
    LANES,
    ceil,
    fma,
    keep_below,
    keep_if_at_most,
    load,
    load_scalar,
    load_strided,
    maximum,
    prefetch,
    same,
    splat,
    store,
)

CHUNK = DEPTH  # tokens that are taken at once; it divides the blocks
_PAGE_AHEAD = 6  # chunks by which the pages of KV are asked for: each has its own, and its address is dear to find
_NEVER = -1e30  # a maximum before any score
_MASKED = -1e38  # finite, and stays so when it is scaled


def scratch_floats(head_dim: int) -> int:
    """Return how many float32 one thread needs: two chunks' scores `[32, 16]` and O `[head_dim, 16]`."""
    return (2 * DEPTH + head_dim) * LANES


def scratch_elements(head_dim: int) -> int:
    """Return how many elements of the KV's dtype one thread needs: a chunk's probabilities, and the last one's V."""
    return DEPTH * LANES + head_dim * DEPTH


@njit(nogil=True)
def _mask(floats, at, token, seen):
    """Hide tokens from the queries before them."""
    masked = splat(_MASKED)
    for row in range(DEPTH):
        value = load(floats, at + row * LANES)
        store(floats, at + row * LANES, keep_if_at_most(value, splat(token + row + 1), seen, masked))


@njit(nogil=True)
def _highest(floats, at):
    top0, top1 = load(floats, at), load(floats, at + LANES)
    top2, top3 = load(floats, at + 2 * LANES), load(floats, at + 3 * LANES)
    for row in range(4, DEPTH, 4):
        top0 = maximum(top0, load(floats, at + row * LANES))
        top1 = maximum(top1, load(floats, at + (row + 1) * LANES))
        top2 = maximum(top2, load(floats, at + (row + 2) * LANES))
        top3 = maximum(top3, load(floats, at + (row + 3) * LANES))
    return maximum(maximum(top0, top1), maximum(top2, top3))


@njit(nogil=True)
def _chunk(table, num_table, token, block_tokens, block_stride, head_dim, keys, values):
    """Return where the 32 tokens from `token` on have their K and their V."""
    block = table[num_table + token // block_tokens] * block_stride
    inside = token % block_tokens
    return block + keys + inside * head_dim, block + values + inside


@njit(nogil=True)
def _coming(span, token, block_tokens, block_stride, head_dim, keys, values):
    """Return where the chunk from `token` on lies; behind the span's last one, a chunk of what is attended for next."""
    table, num_table, last, next_table, next_last, next_plane = span
    if token <= last:
        return _chunk(table, num_table, token, block_tokens, block_stride, head_dim, keys, values)
    token, keys, values = min(token - last - DEPTH, next_last), keys + next_plane, values + next_plane
    return _chunk(table, next_table, token, block_tokens, block_stride, head_dim, keys, values)


@njit(nogil=True)
def _fade(arena, head_dim, floats, sums, fade):
    """Multiply O's columns."""
    put_down(arena, head_dim, floats, sums)
    for row in range(head_dim):
        spot = sums + row * LANES
        store(floats, spot, load(floats, spot) * fade)
    take_up(arena, head_dim, floats, sums)


@njit(nogil=True)
def _probabilities(arena, floats, scores, factor, top, elements, weights):
    """Write two to the power of the scaled scores less `top` as pair lines; return their sums."""
    total0, total1, low = splat(0.0), splat(0.0), splat(0.0) - top
    for row in range(0, DEPTH, 2):
        even = exp2_for(arena, fma(load(floats, scores + row * LANES), factor, low))
        odd = exp2_for(arena, fma(load(floats, scores + (row + 1) * LANES), factor, low))
        total0, total1 = total0 + even, total1 + odd
        store_pair(elements, weights + row * LANES, even, odd)
    return total0 + total1


@njit(nogil=True)
def _ask_all(array, at, head_dim, stride):
    """Ask for a chunk's V, or for its K, which is one run: a `stride` of 32."""
    for row in range(0, head_dim, ROWS):
        ask(array, at + row * stride, stride)


@njit(nogil=True)
def _copy_seen(arena, values, head_dim, block_tokens, count, elements, tail):
    """Copy a chunk's V, with zeros from token `count` on.

    What lies behind the context is nobody's: it may be anything, and must not be multiplied, not even by 0.
    """
    for d in range(head_dim):
        for t in range(0, DEPTH, LANES):
            element = keep_below(load(arena, values + d * block_tokens + t), count - t, splat(0.0))
            store(elements, tail + d * DEPTH + t, element)


@njit(nogil=True)
def _write(floats, at, inverse, head_dim, out, row, column, width):
    """Write a column of O to its place."""
    for d in range(0, head_dim, LANES):
        value = load_strided(floats, at + d * LANES, LANES) * splat(inverse)
        store(out, tiled(row, column + d, width), value)


# fmt: off
@njit(nogil=True)
def attend(
    queries, query_at, num_columns, group, first, past, context, arena, table, num_table, keys, values, block_stride,
    head_dim, block_tokens, scale, out, out_row, out_column, out_width, floats, floats_at, elements, elements_at,
    next_context, next_table, next_plane,
):
# fmt: on
    """Attend for up to 16 columns of one span and one KV head, and write their rows of the tiled `out`.

    `queries` from `query_at` on is a packed column tile. Column c is query head `(first + c) % group` of token
    `past + (first + c) // group`, which sees tokens up to itself. `context` tokens are in the `arena`'s blocks
    `table[num_table ..]`, K at `block * block_stride + keys`, V at `+ values`. `scale` is that of the scores times
    log2(e). What is attended for next lies in `table[next_table ..]`, `next_plane` further on in its blocks: KV that
    streams from memory is asked for two chunks ahead.
    """
    scores, coming = floats_at, floats_at + DEPTH * LANES
    sums = floats_at + 2 * DEPTH * LANES
    weights, tail = elements_at, elements_at + DEPTH * LANES
    for c in range(LANES):  # how many tokens each column sees; those that are not there see one
        floats[scores + c] = past + (first + c) // group + 1 if c < num_columns else 1
    seen = load(floats, scores)
    least, most = past + first // group + 1, past + (first + num_columns - 1) // group + 1
    last, next_last = (most - 1) // DEPTH * DEPTH, (next_context - 1) // DEPTH * DEPTH
    span = (table, num_table, last, next_table, next_last, next_plane)
    few, streams = num_columns <= FEW, num_columns < LANES  # a prompt's KV is near already
    top, total, factor = splat(_NEVER), splat(0.0), splat(scale)
    clear(arena, few, head_dim, floats, floats_at, sums)
    at_keys, at_values = _chunk(table, num_table, 0, block_tokens, block_stride, head_dim, keys, values)
    score(arena, at_keys, queries, query_at, few, head_dim, floats, scores, False, 0)
    near_keys, near_values = _chunk(
        table, num_table, min(DEPTH, last), block_tokens, block_stride, head_dim, keys, values
    )
    for token in range(0, most, DEPTH):
        values_now = at_values
        at_keys, at_values = near_keys, near_values
        near = token + 2 * DEPTH
        near_keys, near_values = _coming(span, near, block_tokens, block_stride, head_dim, keys, values)
        if streams:
            far = token + _PAGE_AHEAD * DEPTH
            far_keys, far_values = _coming(span, far, block_tokens, block_stride, head_dim, keys, values)
            prefetch(arena, far_keys)
            prefetch(arena, far_values)
        if token < last:  # the next chunk's products run beside this chunk's arithmetic
            score(arena, at_keys, queries, query_at, few, head_dim, floats, coming, streams, near_keys)
        elif streams:
            _ask_all(arena, near_keys, head_dim, DEPTH)
        if token + DEPTH > least:
            _mask(floats, scores, token, seen)
        before = top
        top = maximum(before, ceil(_highest(floats, scores) * factor))
        if not same(before, top):
            fade = exp2(before - top)
            total = total * fade
            if token:
                _fade(arena, head_dim, floats, sums, fade)
        total = total + _probabilities(arena, floats, scores, factor, top, elements, weights)
        if token + DEPTH <= context:
            collect(
                arena, values_now, block_tokens, elements, weights, few, head_dim, floats, sums, streams, near_values
            )
        else:
            if streams:
                _ask_all(arena, near_values, head_dim, block_tokens)
            _copy_seen(arena, values_now, head_dim, block_tokens, context - token, elements, tail)
            collect(elements, tail, DEPTH, elements, weights, few, head_dim, floats, sums, False, 0)
        scores, coming = coming, scores
    put_down(arena, head_dim, floats, sums)
    store(floats, scores, splat(1.0) / total)
    for c in range(num_columns):
        row, column = out_row + (first + c) // group, out_column + (first + c) % group * head_dim
        _write(floats, sums + c, load_scalar(floats, scores + c), head_dim, out, row, column, out_width)
