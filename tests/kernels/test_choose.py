from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdactors.kernels.choose import scan

some = settings(max_examples=60, deadline=None)


def scanned(logits: Any, width: int) -> list[int]:
    """Scan rows that lie `width` apart, with NaN between them."""
    rows, count = logits.shape
    wide = np.full((rows, width), np.nan, np.float32)
    wide[:, :count] = logits
    best = np.full(rows + 1, -7, np.int64)
    scan(wide.reshape(-1), rows, width, count, best)
    assert best[rows] == -7
    return list(best[:rows])


@some
@given(rows=st.integers(1, 5), count=st.integers(1, 100), extra=st.integers(0, 40), seed=st.integers(0, 2**32 - 1))
def test_the_most_likely_token_is_that_of_numpy(rows: int, count: int, extra: int, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(size=(rows, count)).astype(np.float32)
    assert scanned(logits, count + extra) == list(logits.argmax(1))


@some
@given(count=st.integers(1, 100), values=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_the_lowest_id_of_equals_is_taken(count: int, values: int, seed: int) -> None:
    logits = np.random.default_rng(seed).integers(-values, 0, size=(3, count)).astype(np.float32)
    assert scanned(logits, count) == list(logits.argmax(1))


def test_zeros_of_both_signs_are_equal() -> None:
    assert scanned(np.array([[-1.0, -0.0, 0.0] * 7], np.float32), 32) == [1]


@some
@given(
    count=st.integers(1, 100),
    wrong=st.sampled_from([np.nan, np.inf, -np.inf]),
    row=st.integers(0, 2),
    seed=st.integers(0, 2**32 - 1),
    data=st.data(),
)
def test_a_row_that_is_not_finite_has_no_token(count: int, wrong: float, row: int, seed: int, data: Any) -> None:
    logits = np.random.default_rng(seed).normal(size=(3, count)).astype(np.float32)
    wanted = list(logits.argmax(1))
    wanted[row] = -1
    logits[row, data.draw(st.integers(0, count - 1))] = wrong
    assert scanned(logits, count) == wanted


@pytest.mark.parametrize("count", [1, 15, 16, 17, 40])
def test_the_greatest_finite_logits_are_fine(count: int) -> None:
    most = np.finfo(np.float32).max
    assert scanned(np.full((1, count), most, np.float32), count) == [0]
    assert scanned(np.full((1, count), -most, np.float32), count) == [0]
