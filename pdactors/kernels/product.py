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
from pdactors.kernels.pairs import add_pair
from pdactors.kernels.powers import exp2_for
from pdactors.kernels.simd import LANES, load, minimum, prefetch, splat, store
from pdactors.kernels.threads import share
from pdactors.kernels.tiles import tile_load, tile_multiply, tile_store, tile_zero

_TILE = ROWS * DEPTH
BLOCK_FLOATS = 2 * ROWS * COLUMNS  # of a block of results
_PANEL = 1 << 19  # elements of `a` that stay in a core's cache while all weights pass
_AHEAD = 2 * _TILE  # how far before its use a weight is asked for that comes from memory
_LOG2E = 1.4426950408889634


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


def _with_tiles(finish: Any) -> Any:
    def on_tiles(job, pending, a, first, w, at, depth, count, asks, later, out, base):
        second = first + depth * _TILE
        right = at + depth * _TILE
        done, each = 0, (pending + depth - 1) // depth
        tile_zero(0)
        tile_zero(1)
        if count > ROWS:
            tile_zero(2)
            tile_zero(3)
            for k in range(0, depth * _TILE, _TILE):
                tile_load(4, a, first + k, DEPTH)
                tile_load(6, w, at + k, DEPTH)
                tile_load(7, w, right + k, DEPTH)
                if asks < 0:
                    _ask(w, at, right, k, depth * _TILE)
                tile_multiply(0, 4, 6)
                tile_multiply(1, 4, 7)
                tile_load(5, a, second + k, DEPTH)
                tile_multiply(2, 5, 6)
                tile_multiply(3, 5, 7)
                for line in range(asks):
                    prefetch(w, later + (k // _TILE * asks + line) * DEPTH)
                for row in range(done, min(done + each, pending)):
                    finish(row, *job)
                done += each
            tile_store(2, out, base + ROWS * COLUMNS, COLUMNS)
            tile_store(3, out, base + ROWS * COLUMNS + LANES, COLUMNS)
        else:
            for k in range(0, depth * _TILE, _TILE):
                tile_load(4, a, first + k, DEPTH)
                if asks < 0:
                    _ask(w, at, right, k, depth * _TILE)
                tile_load(6, w, at + k, DEPTH)
                tile_load(7, w, right + k, DEPTH)
                tile_multiply(0, 4, 6)
                tile_multiply(1, 4, 7)
                for row in range(done, min(done + each, pending)):
                    finish(row, *job)
                done += each
        tile_store(0, out, base, COLUMNS)
        tile_store(1, out, base + LANES, COLUMNS)

    return on_tiles


@njit(nogil=True)
def _four_rows(a, start, w, at, right, size, out, to):
    """Write the sums of four rows of `a` with two column tiles."""
    zero = splat(0.0)
    l0, l1, l2, l3, r0, r1, r2, r3 = zero, zero, zero, zero, zero, zero, zero, zero
    for k in range(0, size, _TILE):
        for pair in range(0, DEPTH, 2):
            left_line, right_line, i = at + k + pair * LANES, right + k + pair * LANES, start + k + pair
            l0, r0 = add_pair(l0, w, left_line, a, i), add_pair(r0, w, right_line, a, i)
            i += DEPTH
            l1, r1 = add_pair(l1, w, left_line, a, i), add_pair(r1, w, right_line, a, i)
            i += DEPTH
            l2, r2 = add_pair(l2, w, left_line, a, i), add_pair(r2, w, right_line, a, i)
            i += DEPTH
            l3, r3 = add_pair(l3, w, left_line, a, i), add_pair(r3, w, right_line, a, i)
    store(out, to, l0)
    store(out, to + LANES, r0)
    store(out, to + COLUMNS, l1)
    store(out, to + COLUMNS + LANES, r1)
    store(out, to + 2 * COLUMNS, l2)
    store(out, to + 2 * COLUMNS + LANES, r2)
    store(out, to + 3 * COLUMNS, l3)
    store(out, to + 3 * COLUMNS + LANES, r3)


@njit(nogil=True)
def _one_row(a, start, w, at, right, size, out, to):
    """Write the sums of one row of `a` with two column tiles."""
    left_sums, right_sums = splat(0.0), splat(0.0)
    for k in range(0, size, _TILE):
        for pair in range(0, DEPTH, 2):
            i = start + k + pair
            left_sums = add_pair(left_sums, w, at + k + pair * LANES, a, i)
            right_sums = add_pair(right_sums, w, right + k + pair * LANES, a, i)
    store(out, to, left_sums)
    store(out, to + LANES, right_sums)


def _with_registers(finish: Any) -> Any:
    def on_registers(job, pending, a, first, w, at, depth, count, asks, later, out, base):
        for row in range(pending):
            finish(row, *job)
        size = depth * _TILE
        for row in range(0, count, 4):
            start = first + row // ROWS * size + row % ROWS * DEPTH
            if row + 1 == count:
                _one_row(a, start, w, at, at + size, size, out, base + row * COLUMNS)
            else:  # what lies behind the last row is padding
                _four_rows(a, start, w, at, at + size, size, out, base + row * COLUMNS)

    return on_registers


def block_product(finish: Any) -> Any:
    """Return a function for compiled code: it computes a block and finishes the one before.

    `finish(row, *job)` ends a row. Arguments: `job`, `pending`, `a`, `first`, `w`, `at`, `depth`, `count`, `asks`,
    `later`, `out`, `base`. A block of results is float32 `[32, 32]` in `out` from `base` on: `count` rows of `a`, and
    what padding gives behind them.
    `first` and `at` are where the row tile and the column tile begin, `depth` is the number of tiles along the inputs.
    Meanwhile the `pending` rows of the block before are finished. At each of the `depth` steps `asks` lines of weights
    are asked for that are used later, from `later` on; -1: these weights come from memory and are used once, so they
    are asked for themselves, just ahead of their use.
    """

    def compute(*arguments: Any) -> None:
        raise NotImplementedError("only inside compiled code")

    on_tiles, on_registers = _with_tiles(finish), _with_registers(finish)

    @overload(compute)
    def _compute(job, pending, a, first, w, at, depth, count, asks, later, out, base):
        return on_tiles if cpu.HAS_AMX and a.dtype == types.uint16 else on_registers

    return compute


@njit(nogil=True)
def _lines_to_ask(rows):
    """Return how many lines of the next block of columns each step asks for, so that all are there in time."""
    return -1 if rows <= 2 * ROWS else max(1, 2 * ROWS * 2 * ROWS // rows)


@njit(nogil=True)
def _panel(rows, inputs):
    """Return how many rows to take at once: as many as fit, in equal parts."""
    parts = (rows * inputs + _PANEL - 1) // _PANEL
    return max(2 * ROWS, (rows + 2 * ROWS * parts - 1) // (2 * ROWS * parts) * 2 * ROWS)


@njit(nogil=True)
def _add_row(row, block, base, out, target, left, soon, width, adds):
    """Bring a row of a block of results to its place, or add it to what is there; ask for that of the next block."""
    prefetch(out, soon + row * width)
    prefetch(out, soon + row * width + LANES)
    source, spot = base + row * COLUMNS, target + row * width
    for half in range(0, COLUMNS, LANES):
        if left + half < width:
            value = load(block, source + half)
            if adds:
                value = value + load(out, spot + half)
            store(out, spot + half, value)


_sums = block_product(_add_row)


@njit(nogil=True)
def multiply(a, rows, w, at, inputs, outputs, out, width, adds, block, base, thread, threads):
    """Write, or add if `adds`, `a` times the packed weight at `at` to `out`, float32 `[rows, width]`.

    `inputs` and `outputs` are padded sizes; columns from `width` on are dropped. `block` has room for two blocks of
    results from `base` on.
    """
    depth, asks = inputs // DEPTH, _lines_to_ask(rows)
    begin, end = share(outputs // COLUMNS, thread, threads)
    pending, target, column, now, former = 0, 0, 0, base, base + BLOCK_FLOATS
    panel = _panel(rows, inputs)
    for top in range(0, rows, panel):
        bottom = min(rows, top + panel)
        for n in range(begin, end):
            left = n * COLUMNS
            spot, later = at + left * inputs, at + (left + COLUMNS) * inputs
            for m in range(top, bottom, 2 * ROWS):
                job = (block, former, out, target, column, m * width + left, width, adds)
                count = min(2 * ROWS, bottom - m)
                _sums(job, pending, a, m * inputs, w, spot, depth, count, asks, later, block, now)
                later += asks * depth * DEPTH
                pending, target, column = count, m * width + left, left
                now, former = former, now
    for row in range(pending):
        _add_row(row, block, former, out, target, column, target, width, adds)


@njit(nogil=True)
def _gate_row(row, block, base, out, first, column, depth_out):
    """Write SiLU(gate) * up of a row, whose first half is the gate."""
    gate = load(block, base + row * COLUMNS)
    up = load(block, base + row * COLUMNS + LANES)
    value = gate * up / (splat(1.0) + exp2_for(out, minimum(gate * splat(-_LOG2E), splat(126.0))))
    store(out, tiled(first + row, column, depth_out), value)


_gates = block_product(_gate_row)


@njit(nogil=True)
def multiply_gated(a, rows, w, at, inputs, outputs, out, depth_out, block, base, thread, threads):
    """Write SiLU(gate) * up to the tiled `out`, whose rows have `depth_out` elements.

    The weight's column tiles alternate: 16 outputs of the gate, then the same 16 of up. `block` as in `multiply`.
    """
    depth, asks = inputs // DEPTH, _lines_to_ask(rows)
    begin, end = share(outputs // COLUMNS, thread, threads)
    pending, first, column, now, former = 0, 0, 0, base, base + BLOCK_FLOATS
    for n in range(begin, end):
        spot, later = at + n * COLUMNS * inputs, at + (n + 1) * COLUMNS * inputs
        for m in range(0, rows, 2 * ROWS):
            job = (block, former, out, first, column, depth_out)
            count = min(2 * ROWS, rows - m)
            _gates(job, pending, a, m * inputs, w, spot, depth, count, asks, later, block, now)
            later += asks * depth * DEPTH
            pending, first, column = count, m, n * LANES
            now, former = former, now
    for row in range(pending):
        _gate_row(row, block, former, out, first, column, depth_out)


@njit(nogil=True)
def tiled(row, column, inputs):
    """Return where an element of a tiled matrix with `inputs` (padded) columns lies."""
    tile = row // ROWS * (inputs // DEPTH) + column // DEPTH
    return tile * _TILE + row % ROWS * DEPTH + column % DEPTH
