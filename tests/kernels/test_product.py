from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import njit

from pdactors.kernels import cpu, product
from pdactors.kernels.pack import pack, packed_size, padded, tiled_size
from pdactors.kernels.threads import share
from pdactors.kernels.tiles import tile_config, tile_release

CONFIGURES = cpu.HAS_AMX
SHAPES = cpu.tile_shapes()
GUARD = 48  # elements on both sides of what a call may touch
MARK = 12345.0
some = settings(max_examples=20, deadline=None)
row_counts, sizes, seeds = st.integers(1, 70), st.integers(1, 100), st.integers(0, 2**32 - 1)


@njit
def multiply(shapes, a, rows, w, at, inputs, outputs, out, width, adds, block, base, threads):
    if CONFIGURES:
        tile_config(shapes)
    for thread in range(threads):
        product.multiply(a, rows, w, at, inputs, outputs, out, width, adds, block, base, thread, threads)
    if CONFIGURES:
        tile_release()


@njit
def multiply_gated(shapes, a, rows, w, at, inputs, outputs, out, depth_out, block, base, threads):
    if CONFIGURES:
        tile_config(shapes)
    for thread in range(threads):
        product.multiply_gated(a, rows, w, at, inputs, outputs, out, depth_out, block, base, thread, threads)
    if CONFIGURES:
        tile_release()


@dataclass(frozen=True)
class Factors:
    """Elements of a product: rows by inputs and outputs by inputs."""

    kind: Any
    a: Any
    w: Any

    @classmethod
    def random(cls, kind: Any, rows: int, inputs: int, outputs: int, seed: int) -> Factors:
        rng = np.random.default_rng(seed)
        a, w = rng.normal(size=(rows, inputs)), rng.normal(size=(outputs, inputs)) / inputs**0.5
        return cls(kind, kind.elements(a), kind.elements(w))

    @property
    def exact(self) -> Any:
        return self.kind.numbers(self.a) @ self.kind.numbers(self.w).T

    @property
    def tolerance(self) -> Any:
        return 3e-6 * (abs(self.kind.numbers(self.a)) @ abs(self.kind.numbers(self.w)).T)

    def tiled(self) -> Any:
        """Lay the rows out in tiles; the rows that are not there are NaN."""
        rows, inputs = self.a.shape
        deep = padded(inputs, 32)
        wide = np.zeros((padded(rows, 32), deep), self.kind.dtype)
        wide[:rows, :inputs] = self.a
        wide[rows:] = self.kind.nans(1)
        tiles = wide.reshape(-1, 16, deep // 32, 32).transpose(0, 2, 1, 3).ravel()
        assert len(tiles) == tiled_size(rows, inputs)
        return tiles

    def packed(self) -> tuple[Any, int]:
        """Pack the weight between others, and say where it begins."""
        size = packed_size(*self.w.shape)
        all_weights = self.kind.nans(size + 2 * GUARD)
        all_weights[GUARD : GUARD + size] = 0
        pack(self.w, all_weights[GUARD : GUARD + size])
        return all_weights, GUARD


def block() -> tuple[Any, int]:
    return np.full(2 * product.BLOCK_FLOATS + 2 * GUARD, np.nan, np.float32), GUARD


def is_untouched_outside(memory: Any) -> bool:
    return bool(np.isnan(memory[:GUARD]).all() and np.isnan(memory[-GUARD:]).all())


def multiplied(factors: Factors, threads: int = 1, before: Any = None) -> Any:
    """Return the product, added to `before` if there is one."""
    (rows, inputs), outputs = factors.a.shape, len(factors.w)
    width = padded(outputs, 16)
    out = np.full((rows + 2, width), MARK, np.float32)
    if before is not None:
        out[:rows, :outputs] = before
        out[:rows, outputs:] = 0
    (w, at), (work, base) = factors.packed(), block()
    sizes = padded(inputs, 32), padded(outputs, 32)
    multiply(
        SHAPES, factors.tiled(), rows, w, at, *sizes, out.reshape(-1), width, before is not None, work, base, threads
    )
    assert (out[rows:] == MARK).all()
    assert not out[:rows, outputs:].any()
    assert is_untouched_outside(work)
    return out[:rows, :outputs]


def gated(kind: Any, rows: Any, gate: Any, up: Any, threads: int = 1) -> Any:
    """Return SiLU(gate) * up of rows, as numbers."""
    inner, inputs = gate.shape
    by_tile = np.stack([gate.reshape(-1, 16, inputs), up.reshape(-1, 16, inputs)], 1).reshape(2 * inner, inputs)
    factors = Factors(kind, rows, by_tile)
    deep = padded(inner, 32)
    out = np.full(tiled_size(len(rows), inner) + 2 * GUARD, 7, kind.dtype)
    (w, at), (work, base) = factors.packed(), block()
    inside = out[:-GUARD]
    multiply_gated(
        SHAPES, factors.tiled(), len(rows), w, at, padded(inputs, 32), 2 * inner, inside, deep, work, base, threads
    )
    assert (out[-2 * GUARD :] == 7).all()
    assert is_untouched_outside(work)
    wide = out[: -2 * GUARD].reshape(-1, deep // 32, 16, 32).transpose(0, 2, 1, 3).reshape(-1, deep)
    assert (wide[len(rows) :] == 7).all()
    assert (wide[:, inner:] == 7).all()
    return kind.numbers(wide[: len(rows), :inner])


def test_rows_that_are_too_many_for_the_cache_are_taken_in_parts(kind: Any) -> None:
    factors = Factors.random(kind, 350, 1536, 70, 1)
    found = multiplied(factors)
    assert (abs(found - factors.exact) <= factors.tolerance).all()
    some = Factors(kind, factors.a[300:310], factors.w)
    assert (multiplied(some) == found[300:310]).all()


@some
@given(rows=row_counts, inputs=sizes, outputs=sizes, seed=seeds)
def test_a_product_is_that_of_numpy(kind: Any, rows: int, inputs: int, outputs: int, seed: int) -> None:
    factors = Factors.random(kind, rows, inputs, outputs, seed)
    assert (abs(multiplied(factors) - factors.exact) <= factors.tolerance).all()


@some
@given(rows=row_counts, inputs=sizes, outputs=sizes, seed=seeds)
def test_a_product_can_be_added(kind: Any, rows: int, inputs: int, outputs: int, seed: int) -> None:
    factors = Factors.random(kind, rows, inputs, outputs, seed)
    before = np.random.default_rng(seed).normal(size=(rows, outputs)).astype(np.float32)
    assert np.array_equal(multiplied(factors, before=before), before + multiplied(factors))


@some
@given(rows=row_counts, inputs=sizes, outputs=sizes, threads=st.integers(2, 5), seed=seeds)
def test_threads_share_a_product(kind: Any, rows: int, inputs: int, outputs: int, threads: int, seed: int) -> None:
    factors = Factors.random(kind, rows, inputs, outputs, seed)
    assert np.array_equal(multiplied(factors, threads), multiplied(factors))


@some
@given(rows=row_counts, inputs=sizes, outputs=sizes, seed=seeds, data=st.data())
def test_a_row_is_the_same_whatever_is_beside_it(
    kind: Any, rows: int, inputs: int, outputs: int, seed: int, data: Any
) -> None:
    factors = Factors.random(kind, rows, inputs, outputs, seed)
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    part = Factors(kind, factors.a[begin:end], factors.w)
    assert np.array_equal(multiplied(part), multiplied(factors)[begin:end])


@given(count=st.integers(0, 1000), threads=st.integers(1, 64))
def test_shares_follow_each_other_and_are_even(count: int, threads: int) -> None:
    shares = [share(count, thread, threads) for thread in range(threads)]
    assert [begin for begin, _ in shares] == [0, *(end for _, end in shares[:-1])]
    assert shares[-1][1] == count
    assert max(end - begin for begin, end in shares) - min(end - begin for begin, end in shares) <= 1


@some
@given(rows=row_counts, inputs=sizes, inner=st.integers(1, 5).map(lambda tiles: 16 * tiles), seed=seeds)
def test_a_gated_product_is_that_of_numpy(kind: Any, rows: int, inputs: int, inner: int, seed: int) -> None:
    factors = Factors.random(kind, rows, inputs, 2 * inner, seed)
    gate, up = factors.w[:inner], factors.w[inner:]
    x, y = factors.exact[:, :inner], factors.exact[:, inner:]
    wanted = x / (1 + np.exp(-x)) * y
    got = gated(kind, factors.a, gate, up)
    assert (abs(got - wanted) <= kind.rounding * abs(wanted) + 1e-5).all()
    assert np.array_equal(gated(kind, factors.a, gate, up, threads=2), got)


@some
@given(rows=row_counts, inputs=sizes, seed=seeds, data=st.data())
def test_a_gated_row_is_the_same_whatever_is_beside_it(kind: Any, rows: int, inputs: int, seed: int, data: Any) -> None:
    factors = Factors.random(kind, rows, inputs, 96, seed)
    gate, up = factors.w[:48], factors.w[48:]
    begin = data.draw(st.integers(0, rows - 1))
    end = data.draw(st.integers(begin + 1, rows))
    assert np.array_equal(gated(kind, factors.a[begin:end], gate, up), gated(kind, factors.a, gate, up)[begin:end])


@pytest.mark.parametrize("size", [50.0, 90.0, 200.0, 1e4, 1e30])
def test_a_gate_far_out_is_open_or_shut(kind: Any, size: float) -> None:
    x = kind.elements(np.array([[size], [-size]]))
    ones = kind.elements(np.ones((16, 1)))
    got = gated(kind, x, ones, ones * 0)
    assert not got.any()
    opened = gated(kind, ones[:2], kind.elements(np.array([[size], [-size]])).repeat(16, 0), ones.repeat(2, 0))
    assert np.allclose(opened[:, :16], kind.numbers(x[:1]), rtol=kind.rounding)
    assert (abs(opened[:, 16:]) < 1e-7 * size).all()
