"""What happens to each row between the products: norms, rotary embedding, and writing K and V into the arena."""

from __future__ import annotations

import math

from numba import njit

from pdactors.kernels.pack import DEPTH, ROWS
from pdactors.kernels.product import tiled
from pdactors.kernels.simd import LANES, fma, load, load_scalar, splat, store, store_scalar, total

_TILE = ROWS * DEPTH


@njit(nogil=True)
def embed(ids, begin, end, table, hidden, x):
    """Write the embeddings of rows `begin .. end` to `x`, float32 `[rows, hidden]`."""
    for row in range(begin, end):
        for i in range(0, hidden, LANES):
            store(x, row * hidden + i, load(table, ids[row] * hidden + i))


@njit(nogil=True)
def _scale(x, begin, size, epsilon):
    """Return what root mean square normalisation multiplies `size` elements by."""
    squares = splat(0.0)
    for i in range(0, size, LANES):
        value = load(x, begin + i)
        squares = fma(value, value, squares)
    return 1.0 / math.sqrt(total(squares) / size + epsilon)


@njit(nogil=True)
def normalise(x, source, hidden, vectors, weight, epsilon, out, target, padded):
    """Write RMSNorm of row `source` of `x` to row `target` of the tiled `out`, which has `padded` columns."""
    scale = splat(_scale(x, source * hidden, hidden, epsilon))
    for i in range(0, hidden, LANES):
        value = load(x, source * hidden + i) * scale * load(vectors, weight + i)
        store(out, tiled(target, i, padded), value)


@njit(nogil=True)
def _add(x, begin, size, vectors, bias):
    for i in range(0, size, LANES):
        store(x, begin + i, load(x, begin + i) + load(vectors, bias + i))


@njit(nogil=True)
def _normalise_head(x, begin, head_dim, vectors, weight, epsilon):
    scale = splat(_scale(x, begin, head_dim, epsilon))
    for i in range(0, head_dim, LANES):
        store(x, begin + i, load(x, begin + i) * scale * load(vectors, weight + i))


@njit(nogil=True)
def _rotate(x, begin, head_dim, rotations, position):
    """Apply rotary embedding to a head whose halves are rotated against each other; `rotations`: cosines, sines."""
    half = head_dim // 2
    for i in range(0, half, LANES):
        cosine = load(rotations, position * head_dim + i)
        sine = load(rotations, position * head_dim + half + i)
        low, high = load(x, begin + i), load(x, begin + half + i)
        store(x, begin + i, low * cosine - high * sine)
        store(x, begin + half + i, high * cosine + low * sine)


@njit(nogil=True)
def prepare(
    qkv,
    row,
    width,
    heads,
    kv_heads,
    head_dim,
    vectors,
    bias,
    query_norm,
    key_norm,
    epsilon,
    rotations,
    position,
    queries,
    query_tile,
    num_tiles,
    index,
    arena,
    slot_keys,
    slot_values,
    block_tokens,
):
    """Turn a row of `qkv`, float32 `[rows, width]`, into queries and stored K and V.

    `bias`, `query_norm` and `key_norm` are places in `vectors`, -1 for none. The row is its span's `index`th: query
    head h of KV head g becomes column `index * group + h` of the column tiles from `query_tile` on, in g's part of
    `queries`, which holds `num_tiles` tiles for each KV head. K goes to `slot_keys` of the arena for KV head 0, V to
    `slot_values`.
    """
    begin = row * width
    group = heads // kv_heads
    if bias >= 0:
        _add(qkv, begin, (heads + 2 * kv_heads) * head_dim, vectors, bias)
    for head in range(heads + kv_heads):
        at = begin + head * head_dim
        weight = query_norm if head < heads else key_norm
        if weight >= 0:
            _normalise_head(qkv, at, head_dim, vectors, weight, epsilon)
        _rotate(qkv, at, head_dim, rotations, position)
    for head in range(heads):
        column = index * group + head % group
        tile = (head // group) * num_tiles + query_tile + column // LANES
        lane = column % LANES
        for i in range(0, head_dim, 2):
            even, odd = load_scalar(qkv, begin + head * head_dim + i), load_scalar(qkv, begin + head * head_dim + i + 1)
            line = tile * head_dim * LANES + i * LANES
            if queries.itemsize == 2:
                store_scalar(queries, line + 2 * lane, even)
                store_scalar(queries, line + 2 * lane + 1, odd)
            else:
                store_scalar(queries, line + lane, even)
                store_scalar(queries, line + LANES + lane, odd)
    plane = block_tokens * head_dim
    keys = begin + heads * head_dim
    values = keys + kv_heads * head_dim
    for head in range(kv_heads):
        for i in range(0, head_dim, LANES):
            store(arena, slot_keys + head * plane + i, load(qkv, keys + head * head_dim + i))
        for i in range(head_dim):
            element = load_scalar(qkv, values + head * head_dim + i)
            store_scalar(arena, slot_values + head * plane + i * block_tokens, element)
