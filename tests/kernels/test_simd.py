from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numba import njit

from pdactors.kernels import pairs, simd
from pdactors.kernels.powers import exp2, exp2_coarse
from pdactors.kernels.simd import load, store

few = settings(max_examples=40, deadline=None)
GUARD = 7  # elements on both sides; odd, so that nothing is aligned
ordinary = st.floats(width=32, allow_subnormal=False)
finite = st.floats(width=32, allow_subnormal=False, allow_nan=False, allow_infinity=False)
moderate = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


def lanes(values: Any, count: int = 16) -> Any:
    return st.lists(values, min_size=count, max_size=count).map(lambda value: np.array(value, np.float32))


@njit
def copy(source, source_at, target, target_at):
    store(target, target_at, load(source, source_at))


@njit
def copy_scalar(source, source_at, target, target_at):
    simd.store_scalar(target, target_at, simd.load_scalar(source, source_at))


@njit
def store_pair(source, line, line_at):
    pairs.store_pair(line, line_at, load(source, 0), load(source, 16))


@njit
def add_pair(sums, line, line_at, factors, at):
    store(sums, 0, pairs.add_pair(load(sums, 0), line, line_at, factors, at))


@njit
def add_tile(out, to, rows, at, stride, packed, packed_at):
    pairs.store_four(out, to, pairs.add_tile(pairs.load_four(out, to), rows, at, stride, packed, packed_at))


@njit
def add_pairs(out, to, rows, at, stride, packed, packed_at, count):
    for row in range(16):
        sums = load(out, to + row * 16)
        for i in range(0, count, 2):
            sums = pairs.add_pair(sums, packed, packed_at + i * 16, rows, at + row * stride + i)
        store(out, to + row * 16, sums)


@njit
def powers(values, fine, coarse):
    for i in range(0, len(values), 16):
        store(fine, i, exp2(load(values, i)))
        store(coarse, i, exp2_coarse(load(values, i)))


@njit
def calculate(a, b, count, lanes, scalars):
    left, right = load(a, 0), load(b, 0)
    store(lanes, 0, simd.keep_below(left, count, right))
    store(lanes, 16, simd.keep_if_at_most(left, left, right, right))
    store(lanes, 32, simd.ceil(left))
    store(lanes, 48, simd.maximum(left, right))
    store(lanes, 64, simd.minimum(left, right))
    store(lanes, 80, simd.fma(left, right, left))
    scalars[0] = simd.total(left)
    scalars[1] = simd.largest(left)
    scalars[2] = simd.same(left, right)
    scalars[3] = simd.same(left, left)


@njit
def stride(source, at, stride, target):
    store(target, 0, simd.load_strided(source, at, stride))


def calculated(a: Any, b: Any, count: int = 0) -> tuple[Any, Any]:
    lanes, scalars = np.zeros(96, np.float32), np.zeros(4, np.float32)
    calculate(a, b, count, lanes, scalars)
    return lanes.reshape(6, 16), scalars


def same_or_nan(kind: Any, got: Any, wanted: Any) -> bool:
    nan = kind.is_nan(wanted)
    return np.array_equal(kind.is_nan(got), nan) and np.array_equal(got[~nan], wanted[~nan])


# ---- Memory --------


@few
@given(values=lanes(ordinary))
def test_a_register_is_stored_rounded_to_nearest_even(kind: Any, values: Any) -> None:
    target = np.full(16 + 2 * GUARD, 3, kind.dtype)
    copy(values, 0, target, GUARD)
    assert same_or_nan(kind, target[GUARD:-GUARD], kind.elements(values))
    assert (np.delete(target, np.s_[GUARD:-GUARD]) == 3).all()


@few
@given(
    high=st.integers(0x0080, 0x7F7E), low=st.sampled_from([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF]), sign=st.booleans()
)
def test_ties_are_rounded_to_even(kind: Any, high: int, low: int, sign: bool) -> None:
    value = np.array([sign << 31 | high << 16 | low], np.uint32).view(np.float32).repeat(16)
    target = np.zeros(17, kind.dtype)
    copy(value, 0, target, 0)
    copy_scalar(value, 0, target, 16)
    assert np.array_equal(target, kind.elements(value[[0] * 17]))


@few
@given(values=lanes(ordinary))
def test_a_register_is_loaded_as_it_is(kind: Any, values: Any) -> None:
    source = kind.nans(16 + 2 * GUARD)
    source[GUARD:-GUARD] = kind.elements(values)
    target = np.zeros(16, np.float32)
    copy(source, GUARD, target, 0)
    assert np.array_equal(target, kind.numbers(source[GUARD:-GUARD]), equal_nan=True)


@few
@given(values=lanes(ordinary), at=st.integers(0, 15))
def test_a_scalar_is_stored_and_loaded_alone(kind: Any, values: Any, at: int) -> None:
    target = np.full(16, 3, kind.dtype)
    copy_scalar(values, at, target, at)
    assert same_or_nan(kind, target[at : at + 1], kind.elements(values)[at : at + 1])
    assert (np.delete(target, at) == 3).all()
    back = np.zeros(16, np.float32)
    copy_scalar(target, at, back, at)
    assert np.array_equal(back[at], kind.numbers(target)[at], equal_nan=True)


@few
@given(values=lanes(ordinary, 32))
def test_a_pair_line_lies_as_packed_matrices_do(kind: Any, values: Any) -> None:
    line = np.full(32 + 2 * GUARD, 3, kind.dtype)
    store_pair(values, line, GUARD)
    rounded = kind.elements(values)
    wanted = rounded.reshape(2, 16).T.ravel() if kind.dtype is np.uint16 else rounded
    assert same_or_nan(kind, line[GUARD:-GUARD], wanted)
    assert (np.delete(line, np.s_[GUARD:-GUARD]) == 3).all()


@few
@given(values=lanes(moderate, 32), factors=lanes(moderate, 2), start=lanes(moderate))
def test_a_pair_lines_products_are_added(kind: Any, values: Any, factors: Any, start: Any) -> None:
    line, two, sums = np.full(32 + 2 * GUARD, 3, kind.dtype), np.full(2 + 2 * GUARD, 3, kind.dtype), start.copy()
    store_pair(values, line, GUARD)
    two[GUARD:-GUARD] = kind.elements(factors)
    add_pair(sums, line, GUARD, two, GUARD)
    rows = kind.numbers(kind.elements(values)).astype(np.float64).reshape(2, 16)
    parts = np.stack([start, *(rows * kind.numbers(kind.elements(factors)).astype(np.float64)[:, None])])
    assert np.abs(sums - parts.sum(0)).max() <= np.finfo(np.float32).eps * 2 * np.abs(parts).sum(0).max() + 1e-30


@few
@given(seed=st.integers(0, 1 << 30), gap=st.integers(0, 9))
def test_rows_as_lanes_give_the_sums_that_columns_as_lanes_give(kind: Any, seed: int, gap: int) -> None:
    random = np.random.default_rng(seed)
    count = 64 // np.dtype(kind.dtype).itemsize
    stride = count + 2 * gap
    rows = kind.elements(random.standard_normal(16 * stride + 2 * GUARD).astype(np.float32))
    packed = kind.elements(random.standard_normal(16 * count + 2 * GUARD).astype(np.float32))
    out = random.standard_normal(256 + 2 * GUARD).astype(np.float32)
    wanted, before = out.copy(), out.copy()
    add_tile(out, GUARD, rows, GUARD, stride, packed, GUARD)
    add_pairs(wanted, GUARD, rows, GUARD, stride, packed, GUARD, count)
    found, wanted, former = (x[GUARD:-GUARD].reshape(16, 16) for x in (out, wanted, before))
    assert np.array_equal(found[:, :4], wanted[:, :4])
    assert np.array_equal(found[:, 4:], former[:, 4:]), "other columns are touched"
    assert np.array_equal(np.delete(out, np.s_[GUARD:-GUARD]), np.delete(before, np.s_[GUARD:-GUARD]))


@few
@given(at=st.integers(0, 40), step=st.integers(1, 20))
def test_strided_lanes_come_from_where_they_lie(at: int, step: int) -> None:
    source, target = np.arange(400, dtype=np.float32), np.zeros(16, np.float32)
    stride(source, at, step, target)
    assert np.array_equal(target, source[at : at + 16 * step : step])


# ---- Arithmetic --------


@few
@given(values=lanes(st.floats(-125, 127, width=32)))
def test_powers_of_two_are_close(values: Any) -> None:
    fine, coarse = np.zeros(16, np.float32), np.zeros(16, np.float32)
    powers(values, fine, coarse)
    wanted = np.exp2(values.astype(np.float64))
    assert (abs(fine / wanted - 1) < 3e-7).all()
    assert (abs(coarse / wanted - 1) < 2e-4).all()


def test_powers_of_two_are_close_everywhere() -> None:
    values = np.linspace(-4, 4, 1 << 16).astype(np.float32)
    fine, coarse = np.zeros_like(values), np.zeros_like(values)
    powers(values, fine, coarse)
    wanted = np.exp2(values.astype(np.float64))
    assert abs(fine / wanted - 1).max() < 3e-7
    assert abs(coarse / wanted - 1).max() < 2e-4


def test_integers_give_exact_powers_of_two() -> None:
    values = np.append(np.arange(-126, 128), [0, 0]).astype(np.float32)
    fine, coarse = np.zeros_like(values), np.zeros_like(values)
    powers(values, fine, coarse)
    wanted = np.exp2(values.astype(np.float64))
    assert np.array_equal(fine, wanted)
    assert np.array_equal(coarse, wanted)


@pytest.mark.parametrize("low", [-160.0, -1e4, -1e30, -1e38])
def test_far_down_a_power_of_two_is_zero(low: float) -> None:
    fine, coarse = np.ones(16, np.float32), np.ones(16, np.float32)
    powers(np.full(16, low, np.float32), fine, coarse)
    assert not fine.any()
    assert not coarse.any()


@few
@given(a=lanes(moderate), b=lanes(moderate), count=st.integers(-40, 40))
def test_lanes_are_kept_below_a_count(a: Any, b: Any, count: int) -> None:
    assert np.array_equal(calculated(a, b, count)[0][0], np.where(np.arange(16) < count, a, b))


@few
@given(a=lanes(moderate | st.sampled_from([0.0, 1.0])), b=lanes(moderate | st.sampled_from([0.0, 1.0])))
def test_lanes_are_compared_one_by_one(a: Any, b: Any) -> None:
    kept, _, most, least = calculated(a, b)[0][1:5]
    assert np.array_equal(kept, np.where(a <= b, a, b))
    assert np.array_equal(most, np.maximum(a, b))
    assert np.array_equal(least, np.minimum(a, b))


@few
@given(a=lanes(finite))
def test_lanes_are_rounded_up(a: Any) -> None:
    assert np.array_equal(calculated(a, a)[0][2], np.ceil(a))


@few
@given(a=lanes(moderate), b=lanes(moderate))
def test_fma_rounds_once(a: Any, b: Any) -> None:
    exact = a.astype(np.longdouble) * b.astype(np.longdouble) + a.astype(np.longdouble)
    got = calculated(a, b)[0][5]
    assert (abs(got - exact) <= abs(exact) * 2**-24 + 1e-37).all()


@few
@given(a=lanes(moderate))
def test_the_total_is_the_pairwise_sum(a: Any) -> None:
    wanted = a.copy()
    while len(wanted) > 1:
        wanted = wanted[: len(wanted) // 2] + wanted[len(wanted) // 2 :]
    assert calculated(a, a)[1][0] == wanted[0]


@few
@given(a=lanes(finite))
def test_the_largest_lane_is_found(a: Any) -> None:
    assert calculated(a, a)[1][1] == a.max()


@few
@given(a=lanes(finite), lane=st.integers(0, 15), other=finite)
def test_registers_are_the_same_if_all_lanes_are(a: Any, lane: int, other: float) -> None:
    assume(a[lane] != np.float32(other))
    b = a.copy()
    b[lane] = other
    assert list(calculated(a, b)[1][2:]) == [0, 1]
