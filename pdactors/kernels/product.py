"""Matrix products: tiled rows times packed weights, see `pack.py`.

Every element of a result is a sum over the inputs in one order, whatever the number of rows and whichever thread
computes it. So a token's numbers do not depend on what else is in its step: not in batches, not in chunks.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types
from numba.extending import overload

from pdactors.kernels import cpu
from pdactors.kernels.pack import COLUMNS, DEPTH, ROWS
from pdactors.kernels.powers import exp2
from pdactors.kernels.simd import LANES, fma, load, load_pair, load_scalar, minimum, prefetch, splat, store
from pdactors.kernels.threads import share
from pdactors.kernels.tiles import tile_load, tile_multiply, tile_store, tile_zero

_TILE = ROWS * DEPTH
_AHEAD = 2 * _TILE  # how far before its use a weight is asked for that comes from memory
_LOG2E = 1.4426950408889634


def block_product(
    a: Any, first: int, w: Any, at: int, depth: int, is_tall: bool, streams: bool, out: Any, base: int
) -> None:
    """Compute a block of results, float32 `[32, 32]` in `out` from `base` on: 32 rows of `a` (16 unless `is_tall`).

    `first` and `at` are where the row tile and the column tile begin, `depth` is the number of tiles along the inputs.
    If it `streams`, the weights come from memory and are used once: they are asked for ahead of their use.
    """
    raise NotImplementedError("only inside compiled code")


@overload(block_product)
def _block_product(a, first, w, at, depth, is_tall, streams, out, base):
    if cpu.HAS_AMX and a.dtype == types.uint16:
        return _on_tiles
    return _on_registers


@njit(nogil=True)
def _ask(array, left, right, k, size):
    """Ask for the weights of the step after next; near a block's end for those that the next block begins with.

    The next block lies right behind this one: so what `right` overruns to is its left, and `left` must pass its right.
    """
    ahead = k + _AHEAD
    begin = left + ahead if ahead < size else left + ahead + 2 * size
    for row in range(ROWS):
        prefetch(array, begin + row * DEPTH)
    for row in range(ROWS):
        prefetch(array, right + ahead + row * DEPTH)


def _on_tiles(a, first, w, at, depth, is_tall, streams, out, base):
    second = first + depth * _TILE
    right = at + depth * _TILE
    tile_zero(0)
    tile_zero(1)
    if is_tall:
        tile_zero(2)
        tile_zero(3)
        for k in range(0, depth * _TILE, _TILE):
            tile_load(4, a, first + k, DEPTH)
            tile_load(6, w, at + k, DEPTH)
            tile_load(7, w, right + k, DEPTH)
            if streams:
                _ask(w, at, right, k, depth * _TILE)
            tile_multiply(0, 4, 6)
            tile_multiply(1, 4, 7)
            tile_load(5, a, second + k, DEPTH)
            tile_multiply(2, 5, 6)
            tile_multiply(3, 5, 7)
        tile_store(2, out, base + ROWS * COLUMNS, COLUMNS)
        tile_store(3, out, base + ROWS * COLUMNS + LANES, COLUMNS)
    else:
        for k in range(0, depth * _TILE, _TILE):
            tile_load(4, a, first + k, DEPTH)
            if streams:
                _ask(w, at, right, k, depth * _TILE)
            tile_load(6, w, at + k, DEPTH)
            tile_load(7, w, right + k, DEPTH)
            tile_multiply(0, 4, 6)
            tile_multiply(1, 4, 7)
    tile_store(0, out, base, COLUMNS)
    tile_store(1, out, base + LANES, COLUMNS)


def _on_registers(a, first, w, at, depth, is_tall, streams, out, base):
    right = at + depth * _TILE
    for row in range(0, 2 * ROWS if is_tall else ROWS, 4):
        start = first + row // ROWS * depth * _TILE + row % ROWS * DEPTH
        to = base + row * COLUMNS
        zero = splat(0.0)
        l0, l1, l2, l3, r0, r1, r2, r3 = zero, zero, zero, zero, zero, zero, zero, zero
        for k in range(0, depth * _TILE, _TILE):
            for pair in range(0, DEPTH, 2):
                left_even, left_odd = load_pair(w, at + k + pair * LANES)
                right_even, right_odd = load_pair(w, right + k + pair * LANES)
                i = start + k + pair
                x, y = splat(load_scalar(a, i)), splat(load_scalar(a, i + 1))
                l0, r0 = fma(y, left_odd, fma(x, left_even, l0)), fma(y, right_odd, fma(x, right_even, r0))
                i += DEPTH
                x, y = splat(load_scalar(a, i)), splat(load_scalar(a, i + 1))
                l1, r1 = fma(y, left_odd, fma(x, left_even, l1)), fma(y, right_odd, fma(x, right_even, r1))
                i += DEPTH
                x, y = splat(load_scalar(a, i)), splat(load_scalar(a, i + 1))
                l2, r2 = fma(y, left_odd, fma(x, left_even, l2)), fma(y, right_odd, fma(x, right_even, r2))
                i += DEPTH
                x, y = splat(load_scalar(a, i)), splat(load_scalar(a, i + 1))
                l3, r3 = fma(y, left_odd, fma(x, left_even, l3)), fma(y, right_odd, fma(x, right_even, r3))
        store(out, to, l0)
        store(out, to + LANES, r0)
        store(out, to + COLUMNS, l1)
        store(out, to + COLUMNS + LANES, r1)
        store(out, to + 2 * COLUMNS, l2)
        store(out, to + 2 * COLUMNS + LANES, r2)
        store(out, to + 3 * COLUMNS, l3)
        store(out, to + 3 * COLUMNS + LANES, r3)


@njit(nogil=True)
def multiply(a, rows, w, at, inputs, outputs, out, width, adds, block, base, thread, threads):
    """Write, or add if `adds`, `a` times the packed weight at `at` to `out`, float32 `[rows, width]`.

    `inputs` and `outputs` are padded sizes; columns from `width` on are dropped.
    """
    depth = inputs // DEPTH
    begin, end = share(outputs // COLUMNS, thread, threads)
    streams = rows <= 2 * ROWS
    for n in range(begin, end):
        left = n * COLUMNS
        for m in range(0, rows, 2 * ROWS):
            is_tall = rows - m > ROWS
            block_product(a, m * inputs, w, at + left * inputs, depth, is_tall, streams, block, base)
            for row in range(min(2 * ROWS, rows - m)):
                source = base + row * COLUMNS
                target = (m + row) * width + left
                for half in range(2):
                    if left + half * LANES < width:
                        value = load(block, source + half * LANES)
                        if adds:
                            value = value + load(out, target + half * LANES)
                        store(out, target + half * LANES, value)


@njit(nogil=True)
def multiply_gated(a, rows, w, at, inputs, outputs, out, depth_out, block, base, thread, threads):
    """Write SiLU(gate) * up to the tiled `out`, whose rows have `depth_out` elements.

    The weight's column tiles alternate: 16 outputs of the gate, then the same 16 of up.
    """
    depth = inputs // DEPTH
    begin, end = share(outputs // COLUMNS, thread, threads)
    streams = rows <= 2 * ROWS
    one, log2e, most = splat(1.0), splat(-_LOG2E), splat(126.0)
    for n in range(begin, end):
        for m in range(0, rows, 2 * ROWS):
            is_tall = rows - m > ROWS
            block_product(a, m * inputs, w, at + n * COLUMNS * inputs, depth, is_tall, streams, block, base)
            for row in range(min(2 * ROWS, rows - m)):
                gate = load(block, base + row * COLUMNS)
                up = load(block, base + row * COLUMNS + LANES)
                value = gate / (one + exp2(minimum(gate * log2e, most))) * up
                store(out, tiled(m + row, n * LANES, depth_out), value)


@njit(nogil=True)
def tiled(row, column, inputs):
    """Return where an element of a tiled matrix with `inputs` (padded) columns lies."""
    tile = row // ROWS * (inputs // DEPTH) + column // DEPTH
    return tile * _TILE + row % ROWS * DEPTH + column % DEPTH
