"""The products of attention for a chunk of 32 tokens and 16 queries: on AMX tiles, or on registers.

On tiles, O stays there from chunk to chunk where it fits (`head_dim` 64); otherwise, and on registers, it is in memory.

A core keeps few lines on their way at once, so whoever streams KV from memory asks for as much of a later chunk as it
has just used, evenly: asked for in one go they hold each other up, and memory is idle in between.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.extending import overload

from pdactors.kernels import cpu
from pdactors.kernels.pack import DEPTH, ROWS
from pdactors.kernels.pairs import add_pair, add_tile, load_four, store_four
from pdactors.kernels.simd import LANES, load, prefetch, splat, store
from pdactors.kernels.tiles import tile_load, tile_multiply, tile_store, tile_zero

FEW = 4  # columns: 16 rows of so many fit into registers side by side
_HAS_LANES = cpu.HAS_AVX512
_HELD = 4 * ROWS  # so many rows of O fit into tiles; there are four left for the products


def score(
    arena: Any, keys: int, queries: Any, at: int, few: bool, head_dim: int, out: Any, to: int, streams: bool, later: int
) -> None:
    """Write the products of 32 tokens' K with 16 queries, `[32, 16]`; if it `streams`, ask for the K at `later`.

    If there are `few` queries, up to `FEW`, the other columns may be left as they are, here as in `collect`.
    """
    raise NotImplementedError("only inside compiled code")


def collect(
    source: Any,
    values: int,
    stride: int,
    weights: Any,
    at: int,
    few: bool,
    head_dim: int,
    out: Any,
    to: int,
    streams: bool,
    later: int,
) -> None:
    """Add 32 tokens' V, whose rows begin `stride` elements apart, weighted for 16 queries, to O `[head_dim, 16]`.

    If it `streams`, ask for the V at `later`.
    """
    raise NotImplementedError("only inside compiled code")


def clear(source: Any, few: bool, head_dim: int, out: Any, scores: int, to: int) -> None:
    """Set O to zero, and of the scores, which lie before it, what `score` leaves as it is."""
    raise NotImplementedError("only inside compiled code")


def put_down(source: Any, head_dim: int, out: Any, to: int) -> None:
    """Have O in memory."""
    raise NotImplementedError("only inside compiled code")


def take_up(source: Any, head_dim: int, out: Any, to: int) -> None:
    """Go on with what was put down."""
    raise NotImplementedError("only inside compiled code")


def ask(array: Any, at: int, stride: int) -> None:
    """Ask for 16 rows of 32 elements."""
    raise NotImplementedError("only inside compiled code")


def _on_tiles(array: Any) -> bool:
    return cpu.HAS_AMX and array.dtype == types.uint16


@overload(ask)
def _ask(array, at, stride):
    lines = DEPTH * array.dtype.bitwidth // 512

    def implementation(array, at, stride):
        for row in range(ROWS):
            for line in range(lines):
                prefetch(array, at + row * stride + line * (DEPTH // lines))

    return implementation


@overload(score)
def _score(arena, keys, queries, at, few, head_dim, out, to, streams, later):
    if _on_tiles(arena):

        def on_tiles(arena, keys, queries, at, few, head_dim, out, to, streams, later):
            tile_zero(4)
            tile_zero(5)
            for i in range(0, head_dim, DEPTH):
                tile_load(7, queries, at + i * LANES, DEPTH)
                tile_load(6, arena, keys + i, head_dim)
                tile_multiply(4, 6, 7)
                if streams:
                    ask(arena, later + i * DEPTH, DEPTH)
                tile_load(6, arena, keys + ROWS * head_dim + i, head_dim)
                tile_multiply(5, 6, 7)
                if streams:
                    ask(arena, later + (i + ROWS) * DEPTH, DEPTH)
            tile_store(4, out, to, LANES)
            tile_store(5, out, to + ROWS * LANES, LANES)

        return on_tiles

    def on_registers(arena, keys, queries, at, few, head_dim, out, to, streams, later):
        each = head_dim * ROWS // DEPTH  # of what comes later, for 16 rows of this chunk
        for row in range(0, DEPTH, ROWS):
            _sixteen_rows(
                arena, keys + row * head_dim, head_dim, head_dim, queries, at, few, out, to + row * LANES, False
            )
            if streams:
                for i in range(row // ROWS * each, (row // ROWS + 1) * each, ROWS):
                    ask(arena, later + i * DEPTH, DEPTH)

    return on_registers


@overload(collect)
def _collect(source, values, stride, weights, at, few, head_dim, out, to, streams, later):
    if _on_tiles(source):

        def on_tiles(source, values, stride, weights, at, few, head_dim, out, to, streams, later):
            tile_load(7, weights, at, DEPTH)
            if head_dim == _HELD:
                quarter = ROWS * stride
                tile_load(4, source, values, stride)
                tile_multiply(0, 4, 7)
                if streams:
                    ask(source, later, stride)
                tile_load(5, source, values + quarter, stride)
                tile_multiply(1, 5, 7)
                if streams:
                    ask(source, later + quarter, stride)
                tile_load(6, source, values + 2 * quarter, stride)
                tile_multiply(2, 6, 7)
                if streams:
                    ask(source, later + 2 * quarter, stride)
                tile_load(4, source, values + 3 * quarter, stride)
                tile_multiply(3, 4, 7)
                if streams:
                    ask(source, later + 3 * quarter, stride)
                return
            for row in range(0, head_dim, ROWS):
                tile_load(4, out, to + row * LANES, LANES)
                tile_load(6, source, values + row * stride, stride)
                tile_multiply(4, 6, 7)
                tile_store(4, out, to + row * LANES, LANES)
                if streams:
                    ask(source, later + row * stride, stride)

        return on_tiles

    def on_registers(source, values, stride, weights, at, few, head_dim, out, to, streams, later):
        for row in range(0, head_dim, ROWS):
            _sixteen_rows(source, values + row * stride, stride, DEPTH, weights, at, few, out, to + row * LANES, True)
            if streams:
                ask(source, later + row * stride, stride)

    return on_registers


@overload(clear)
def _clear(source, few, head_dim, out, scores, to):
    holds = _on_tiles(source)

    def implementation(source, few, head_dim, out, scores, to):
        for i in range(to if holds or not few else scores, to + head_dim * LANES, LANES):
            store(out, i, splat(0.0))
        if holds:
            take_up(source, head_dim, out, to)

    return implementation


@overload(put_down)
def _put_down(source, head_dim, out, to):
    if not _on_tiles(source):
        return lambda source, head_dim, out, to: None

    def on_tiles(source, head_dim, out, to):
        if head_dim == _HELD:
            tile_store(0, out, to, LANES)
            tile_store(1, out, to + ROWS * LANES, LANES)
            tile_store(2, out, to + 2 * ROWS * LANES, LANES)
            tile_store(3, out, to + 3 * ROWS * LANES, LANES)

    return on_tiles


@overload(take_up)
def _take_up(source, head_dim, out, to):
    if not _on_tiles(source):
        return lambda source, head_dim, out, to: None

    def on_tiles(source, head_dim, out, to):
        if head_dim == _HELD:
            tile_load(0, out, to, LANES)
            tile_load(1, out, to + ROWS * LANES, LANES)
            tile_load(2, out, to + 2 * ROWS * LANES, LANES)
            tile_load(3, out, to + 3 * ROWS * LANES, LANES)

    return on_tiles


@njit(nogil=True)
def _sixteen_rows(a, begin, stride, depth, packed, at, few, out, to, keeps):
    """Write, or add if it `keeps`, the products of 16 rows of `a` with one column tile."""
    if _HAS_LANES and few:
        _few_columns(a, begin, stride, depth, packed, at, out, to, keeps)
    else:
        _eight_rows(a, begin, stride, depth, packed, at, out, to, keeps)
        _eight_rows(a, begin + 8 * stride, stride, depth, packed, at, out, to + 8 * LANES, keeps)


@njit(nogil=True)
def _few_columns(a, begin, stride, depth, packed, at, out, to, keeps):
    """Write, or add if it `keeps`, the products of 16 rows of `a` with the first columns of a column tile.

    Rows are lanes here, so that no lane is idle; each sum is the one that `_eight_rows` gives.
    """
    zero = splat(0.0)
    sums = load_four(out, to) if keeps else (zero, zero, zero, zero)
    step = 64 // a.itemsize
    for i in range(0, depth, step):
        sums = add_tile(sums, a, begin + i, stride, packed, at + i * LANES)
    store_four(out, to, sums)


@njit(nogil=True)
def _eight_rows(a, begin, stride, depth, packed, at, out, to, keeps):
    """Write, or add if it `keeps`, the products of eight rows of `a` with one column tile."""
    zero = splat(0.0)
    r0, r1, r2, r3, r4, r5, r6, r7 = zero, zero, zero, zero, zero, zero, zero, zero
    if keeps:
        r0, r1, r2, r3 = load(out, to), load(out, to + LANES), load(out, to + 2 * LANES), load(out, to + 3 * LANES)
        r4, r5 = load(out, to + 4 * LANES), load(out, to + 5 * LANES)
        r6, r7 = load(out, to + 6 * LANES), load(out, to + 7 * LANES)
    for i in range(0, depth, 2):
        line, x = at + i * LANES, begin + i
        r0, r1 = add_pair(r0, packed, line, a, x), add_pair(r1, packed, line, a, x + stride)
        r2, r3 = add_pair(r2, packed, line, a, x + 2 * stride), add_pair(r3, packed, line, a, x + 3 * stride)
        r4, r5 = add_pair(r4, packed, line, a, x + 4 * stride), add_pair(r5, packed, line, a, x + 5 * stride)
        r6, r7 = add_pair(r6, packed, line, a, x + 6 * stride), add_pair(r7, packed, line, a, x + 7 * stride)
    store(out, to, r0)
    store(out, to + LANES, r1)
    store(out, to + 2 * LANES, r2)
    store(out, to + 3 * LANES, r3)
    store(out, to + 4 * LANES, r4)
    store(out, to + 5 * LANES, r5)
    store(out, to + 6 * LANES, r6)
    store(out, to + 7 * LANES, r7)
