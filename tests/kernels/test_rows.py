from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from pdactors.kernels import rows as kernels
from pdactors.kernels.pack import padded, tiled_size

EPSILON = 1e-5
MARK = 7
some = settings(max_examples=20, deadline=None)
seeds = st.integers(0, 2**32 - 1)
widths = st.integers(1, 7).map(lambda tiles: 16 * tiles)


@njit
def embed(ids, begin, end, table, hidden, x):
    kernels.embed(ids, begin, end, table, hidden, x)


@njit
def normalise(x, source, hidden, vectors, weight, epsilon, out, target, padded):
    kernels.normalise(x, source, hidden, vectors, weight, epsilon, out, target, padded)


# fmt: off
@njit
def prepare(
    qkv, begin, end, width, heads, kv_heads, head_dim, vectors, bias, query_norm, key_norm, epsilon, rotations,
    position, queries, query_tile, num_tiles, arena, keys, values, block_tokens,
):
    for row in range(begin, end):
        index = row - begin
        kernels.prepare(
            qkv, row, width, heads, kv_heads, head_dim, vectors, bias, query_norm, key_norm, epsilon, rotations,
            position + index, queries, query_tile, num_tiles, index, arena, keys[index], values[index], block_tokens,
        )
# fmt: on


def rms_norm(values: Any, weight: Any) -> Any:
    values = values.astype(np.float64)
    return values / np.sqrt((values**2).mean(-1, keepdims=True) + EPSILON) * weight


def rotated(heads: Any, cosines: Any, sines: Any) -> Any:
    """Rotate the halves of heads `[rows, heads, head_dim]` against each other."""
    low, high = np.split(heads, 2, -1)
    return np.concatenate([low * cosines - high * sines, high * cosines + low * sines], -1)


def is_close(kind: Any, got: Any, wanted: Any) -> bool:
    return bool((abs(got - wanted) <= kind.rounding * abs(wanted) + 3e-6).all())


@some
@given(hidden=widths, count=st.integers(1, 20), seed=seeds, data=st.data())
def test_embeddings_are_rows_of_the_table(kind: Any, hidden: int, count: int, seed: int, data: Any) -> None:
    rng = np.random.default_rng(seed)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    ids = rng.integers(0, 9, size=(count, 3))
    table = kind.elements(rng.normal(size=(9, hidden)))
    x = np.full((count, hidden), MARK, np.float32)
    embed(ids[:, 1], begin, end, table.reshape(-1), hidden, x.reshape(-1))
    assert np.array_equal(x[begin:end], kind.numbers(table)[ids[begin:end, 1]])
    assert (np.delete(x, np.s_[begin:end], 0) == MARK).all()


@some
@given(hidden=widths, source=st.integers(0, 40), target=st.integers(0, 40), scale=st.floats(1e-3, 1e3), seed=seeds)
def test_a_row_is_normalised(kind: Any, hidden: int, source: int, target: int, scale: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = np.full((41, hidden), np.nan, np.float32)
    x[source] = rng.normal(size=hidden) * scale
    vectors = np.full(hidden + 32, np.nan, np.float32)
    vectors[16:-16] = rng.normal(size=hidden)
    deep = padded(hidden, 32)
    out = np.full(tiled_size(41, hidden), MARK, kind.dtype)
    normalise(x.reshape(-1), source, hidden, vectors, 16, EPSILON, out, target, deep)
    wide = out.reshape(-1, deep // 32, 16, 32).transpose(0, 2, 1, 3).reshape(-1, deep)
    assert is_close(kind, kind.numbers(wide[target, :hidden]), rms_norm(x[source], vectors[16:-16]))
    assert (wide[target, hidden:] == MARK).all()
    assert (np.delete(wide, target, 0) == MARK).all()


@settings(max_examples=30, deadline=None)
@given(
    head_dim=st.sampled_from([32, 64, 96, 128]),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    count=st.integers(1, 9),
    block_tokens=st.sampled_from([32, 64]),
    has_bias=st.booleans(),
    has_norms=st.booleans(),
    seed=seeds,
)
def test_queries_keys_and_values_are_put_in_their_places_and_nowhere_else(
    kind: Any,
    head_dim: int,
    kv_heads: int,
    group: int,
    count: int,
    block_tokens: int,
    has_bias: bool,
    has_norms: bool,
    seed: int,
) -> None:
    rng = np.random.default_rng(seed)
    heads = kv_heads * group
    all_heads = heads + 2 * kv_heads
    begin, position, query_tile = (int(value) for value in rng.integers(0, 4, 3))
    qkv = np.full((begin + count + 1, all_heads * head_dim), np.nan, np.float32)
    qkv[begin:-1] = rng.normal(size=(count, all_heads * head_dim))
    values = qkv[begin:-1].astype(np.float64).reshape(count, all_heads, head_dim)
    angles = rng.normal(size=(16, head_dim // 2))
    rotations = np.concatenate([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    bias, query_norm, key_norm = (
        rng.normal(size=size).astype(np.float32) for size in (all_heads * head_dim, *[head_dim] * 2)
    )
    vectors = np.concatenate([bias, query_norm, key_norm])
    norm_at = len(bias) if has_norms else -1
    num_tiles = query_tile + -(-count * group // 16) + 1
    queries = np.full(kv_heads * num_tiles * head_dim * 16, MARK, kind.dtype)
    blocks, layers, layer = 4, 2, int(rng.integers(0, 2))
    arena = np.full((blocks, layers, 2, kv_heads, block_tokens * head_dim), MARK, kind.dtype)
    slots = [divmod(int(slot), block_tokens) for slot in rng.choice(blocks * block_tokens, count, replace=False)]
    plane = block_tokens * head_dim
    of_block = np.array([(block * layers + layer) * 2 * kv_heads * plane for block, _ in slots])
    inside = np.array([slot for _, slot in slots])

    prepare(
        qkv.reshape(-1), begin, begin + count, all_heads * head_dim, heads, kv_heads, head_dim, vectors,
        0 if has_bias else -1, norm_at, norm_at + head_dim if has_norms else -1, EPSILON, rotations.reshape(-1),
        position, queries, query_tile, num_tiles, arena.reshape(-1), of_block + inside * head_dim,
        of_block + kv_heads * plane + inside, block_tokens,
    )  # fmt: skip

    if has_bias:
        values = values + bias.reshape(all_heads, head_dim)
    q, k, v = np.split(values, [heads, heads + kv_heads], 1)
    if has_norms:
        q, k = rms_norm(q, query_norm), rms_norm(k, key_norm)
    cosines, sines = np.split(rotations[position : position + count, None].astype(np.float64), 2, -1)
    q, k = rotated(q, cosines, sines), rotated(k, cosines, sines)

    lines = (kv_heads, num_tiles, head_dim // 2, *((16, 2) if kind.dtype is np.uint16 else (2, 16)))
    columns = queries.reshape(lines)
    columns = columns.transpose(0, 1, 3, 2, 4) if kind.dtype is np.uint16 else columns.transpose(0, 1, 4, 2, 3)
    columns = columns.reshape(kv_heads, num_tiles * 16, head_dim)
    mine = np.s_[:, query_tile * 16 : query_tile * 16 + count * group]
    wanted = (
        q.reshape(count, kv_heads, group, head_dim).transpose(1, 0, 2, 3).reshape(kv_heads, count * group, head_dim)
    )
    assert is_close(kind, kind.numbers(columns[mine]), wanted)
    assert (np.delete(columns, mine[1], 1) == MARK).all()

    for index, (block, slot) in enumerate(slots):
        keys = arena[block, layer, 0].reshape(kv_heads, block_tokens, head_dim)[:, slot]
        kept = arena[block, layer, 1].reshape(kv_heads, head_dim, block_tokens)[:, :, slot]
        assert is_close(kind, kind.numbers(keys), k[index])
        assert is_close(kind, kind.numbers(kept), v[index])
        keys[:] = kept[:] = MARK
    assert (arena == MARK).all()
    assert np.isnan(qkv[:begin]).all()
    assert np.isnan(qkv[-1]).all()
