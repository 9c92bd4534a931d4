"""One step of a decoder-only transformer in one call: embedding, layers, logits. Llama's order of operations.

Several threads run `forward` at once, each with its number; they meet at barriers between the parts of a layer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from pdactors.kernels import attention, cpu
from pdactors.kernels.attention import attend
from pdactors.kernels.product import BLOCK_FLOATS, multiply, multiply_gated
from pdactors.kernels.rows import embed, normalise, prepare
from pdactors.kernels.simd import LANES
from pdactors.kernels.threads import cycles, meet, share
from pdactors.kernels.tiles import tile_config, tile_release

_CONFIGURES = cpu.HAS_AMX

# Columns of `sizes`: one number each.
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, GATED, VOCAB, BLOCK_TOKENS, BLOCK_STRIDE, LAYER_STRIDE = range(10)
NUM_SIZES = 10
# Columns of `places`, one row a layer: where weights begin, and vectors (-1: there is none).
QKV, OUTPUT, GATE_UP, DOWN, NORM, BIAS, QUERY_NORM, KEY_NORM, GATED_NORM = range(9)
NUM_PLACES = 9
# Columns of `spans`, one row a sequence.
START, COUNT, CONTEXT, TABLE, TILE = range(5)
NUM_SPAN_COLUMNS = 5
# Columns of `rows`, one row a token.
TOKEN, POSITION, SPAN, SLOT_BLOCK, SLOT = range(5)
NUM_ROW_COLUMNS = 5
# What `clock` counts, in cycles of thread 0.
CLOCK_ATTENTION, CLOCK_ALL = range(2)
NUM_CLOCKS = 2


def scratch_floats(head_dim: int) -> int:
    """Return how many float32 one thread needs: what attention does, or two blocks of a product's results."""
    return max(attention.scratch_floats(head_dim), 2 * BLOCK_FLOATS)


class Model(NamedTuple):
    """What does not change: the first is int64, the last five are flat."""

    sizes: NDArray[np.int64]
    epsilon: float  # of the norms
    scale: float  # of the scores, times log2(e)
    places: NDArray[np.int64]  # [layers + 1, NUM_PLACES]; the last row is the head's
    weights: NDArray[np.generic]  # packed
    vectors: NDArray[np.float32]  # norms and biases
    table: NDArray[np.generic]  # embeddings, [vocab, hidden]
    rotations: NDArray[np.float32]  # [positions, head_dim]: cosines, then sines


class Step(NamedTuple):
    """One step, int64. `tables` are the spans' block tables one after the other, `wanted` rows get logits.

    Each layer's queries begin `layer_tiles` column tiles after those of the layer before; 0: in their place.
    """

    rows: NDArray[np.int64]
    spans: NDArray[np.int64]
    tables: NDArray[np.int64]
    wanted: NDArray[np.int64]
    layer_tiles: int = 0


class Work(NamedTuple):
    """Memory to work in, all flat; what is tiled holds zeros where its columns are padded."""

    x: NDArray[np.float32]  # the residual stream, [rows, hidden]
    normed: NDArray[np.generic]  # tiled
    qkv: NDArray[np.float32]  # [rows, heads * head_dim]
    queries: NDArray[np.generic]  # packed, [kv_heads, column tiles], of all layers if the step has `layer_tiles`
    attended: NDArray[np.generic]  # tiled
    gated: NDArray[np.generic]  # tiled
    logits: NDArray[np.float32]  # [wanted, vocab padded to 16]
    floats: NDArray[np.float32]  # a part for each thread, as `elements`
    elements: NDArray[np.generic]
    tiles: NDArray[np.uint8]  # AMX's configuration
    clock: NDArray[np.int64]
    barrier: NDArray[np.int64]


@njit(nogil=True)
def _attend_all(model, work, step, arena, keys, values, first_tile, num_tiles, width, thread, threads):
    """Attend for every span, KV head and column tile that is this thread's turn."""
    sizes = model.sizes
    kv_heads, head_dim, block_tokens = sizes[KV_HEADS], sizes[HEAD_DIM], sizes[BLOCK_TOKENS]
    group = sizes[HEADS] // kv_heads
    floats_at, elements_at = thread * (len(work.floats) // threads), thread * (len(work.elements) // threads)
    turn = 0
    for s in range(len(step.spans)):
        start, count, context = step.spans[s, START], step.spans[s, COUNT], step.spans[s, CONTEXT]
        for first in range(0, count * group, LANES):
            for head in range(kv_heads):
                turn += 1
                if turn % threads != thread:
                    continue
                tile = first_tile + head * num_tiles + step.spans[s, TILE] + first // LANES
                plane = head * block_tokens * head_dim
                soon = s
                step_on = threads  # in heads: this thread's next task, as far as it is in this span or the next
                if head + threads >= kv_heads:
                    soon = min(s + 1, len(step.spans) - 1) if first + LANES >= count * group else s
                    step_on = (head + threads) % kv_heads - head
                attend(
                    work.queries,
                    tile * head_dim * LANES,
                    min(LANES, count * group - first),
                    group,
                    first,
                    context - count,
                    context,
                    arena,
                    step.tables,
                    step.spans[s, TABLE],
                    keys + plane,
                    values + plane,
                    sizes[BLOCK_STRIDE],
                    head_dim,
                    block_tokens,
                    model.scale,
                    work.attended,
                    start,
                    head * group * head_dim,
                    width,
                    work.floats,
                    floats_at,
                    work.elements,
                    elements_at,
                    step.spans[soon, CONTEXT],
                    step.spans[soon, TABLE],
                    step_on * block_tokens * head_dim,
                )


@njit(nogil=True)
def _prepare_all(model, work, step, arena, place, keys, values, first_tile, num_tiles, width, begin, end):
    """Rotate the rows `begin .. end`, and store their K and V."""
    sizes = model.sizes
    for row in range(begin, end):
        span = step.rows[row, SPAN]
        slot = step.rows[row, SLOT]
        block = step.rows[row, SLOT_BLOCK] * sizes[BLOCK_STRIDE]
        prepare(
            work.qkv,
            row,
            width,
            sizes[HEADS],
            sizes[KV_HEADS],
            sizes[HEAD_DIM],
            model.vectors,
            place[BIAS],
            place[QUERY_NORM],
            place[KEY_NORM],
            model.epsilon,
            model.rotations,
            step.rows[row, POSITION],
            work.queries,
            first_tile + step.spans[span, TILE],
            num_tiles,
            row - step.spans[span, START],
            arena,
            block + keys + slot * sizes[HEAD_DIM],
            block + values + slot,
            sizes[BLOCK_TOKENS],
        )


@njit(nogil=True)
def _normalise_all(model, work, weight, padded, begin, end):
    for row in range(begin, end):
        normalise(work.x, row, model.sizes[HIDDEN], model.vectors, weight, model.epsilon, work.normed, row, padded)


@njit(nogil=True)
def _up(size):
    """Return the next multiple of 32, which is what inputs and outputs are padded to."""
    return (size + 31) // 32 * 32


@njit(nogil=True)
def _layer(model, work, step, arena, layer, num_tiles, thread, threads):
    sizes, weights, place = model.sizes, model.weights, model.places[layer]
    hidden, inner, num_rows = sizes[HIDDEN], sizes[GATED], len(step.rows)
    begin, end = share(num_rows, thread, threads)
    attended = sizes[HEADS] * sizes[HEAD_DIM]
    qkv = attended + 2 * sizes[KV_HEADS] * sizes[HEAD_DIM]
    block, at = work.floats, thread * (len(work.floats) // threads)
    keys = layer * sizes[LAYER_STRIDE]
    values = keys + sizes[LAYER_STRIDE] // 2
    first_tile = layer * step.layer_tiles
    _normalise_all(model, work, place[NORM], _up(hidden), begin, end)
    meet(work.barrier, threads)
    multiply(
        work.normed,
        num_rows,
        weights,
        place[QKV],
        _up(hidden),
        _up(qkv),
        work.qkv,
        qkv,
        False,
        block,
        at,
        thread,
        threads,
    )
    meet(work.barrier, threads)
    _prepare_all(model, work, step, arena, place, keys, values, first_tile, num_tiles, qkv, begin, end)
    meet(work.barrier, threads)
    entered = cycles()
    _attend_all(model, work, step, arena, keys, values, first_tile, num_tiles, _up(attended), thread, threads)
    if thread == 0:
        work.clock[CLOCK_ATTENTION] += cycles() - entered
    meet(work.barrier, threads)
    multiply(
        work.attended, num_rows, weights, place[OUTPUT], _up(attended), _up(hidden), work.x, hidden, True, block, at,
        thread, threads,
    )  # fmt: skip
    meet(work.barrier, threads)
    _normalise_all(model, work, place[GATED_NORM], _up(hidden), begin, end)
    meet(work.barrier, threads)
    multiply_gated(
        work.normed, num_rows, weights, place[GATE_UP], _up(hidden), _up(2 * inner), work.gated, _up(inner), block, at,
        thread, threads,
    )  # fmt: skip
    meet(work.barrier, threads)
    multiply(
        work.gated, num_rows, weights, place[DOWN], _up(inner), _up(hidden), work.x, hidden, True, block, at, thread,
        threads,
    )  # fmt: skip
    meet(work.barrier, threads)


@njit(nogil=True)
def _head(model, work, step, thread, threads):
    """Write the wanted rows' logits."""
    sizes, place, count = model.sizes, model.places[model.sizes[LAYERS]], len(step.wanted)
    hidden, vocab = sizes[HIDDEN], sizes[VOCAB]
    if thread == 0:
        for i in range(count):
            row = step.wanted[i]
            normalise(work.x, row, hidden, model.vectors, place[NORM], model.epsilon, work.normed, i, _up(hidden))
    meet(work.barrier, threads)
    at = thread * (len(work.floats) // threads)
    width = (vocab + LANES - 1) // LANES * LANES
    multiply(
        work.normed, count, model.weights, place[OUTPUT], _up(hidden), _up(vocab), work.logits, width, False,
        work.floats, at, thread, threads,
    )  # fmt: skip
    meet(work.barrier, threads)


@njit(nogil=True, cache=True)
def forward(model, work, step, arena, thread, threads):
    """Compute a step: write the rows' K and V to the arena, and the wanted rows' logits to `work.logits`."""
    if _CONFIGURES:
        tile_config(work.tiles)
    began = cycles()
    if thread == 0:
        work.clock[CLOCK_ATTENTION] = 0
    group = model.sizes[HEADS] // model.sizes[KV_HEADS]
    num_tiles = 0
    for s in range(len(step.spans)):
        num_tiles += (step.spans[s, COUNT] * group + LANES - 1) // LANES
    begin, end = share(len(step.rows), thread, threads)
    embed(step.rows[:, TOKEN], begin, end, model.table, model.sizes[HIDDEN], work.x)
    for layer in range(model.sizes[LAYERS]):
        _layer(model, work, step, arena, layer, num_tiles, thread, threads)
    if len(step.wanted):
        _head(model, work, step, thread, threads)
    if thread == 0:
        work.clock[CLOCK_ALL] = cycles() - began
    if _CONFIGURES:
        tile_release()
