from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdactors.bench.rate_search import HIGHEST, LOWEST, RateSearch


def found(capacity: float) -> tuple[RateSearch, list[float]]:
    """Search on a server that holds every rate up to `capacity`."""
    search, tried = RateSearch(), []
    while (rate := search.next_rate()) is not None:
        tried.append(rate)
        search.add(rate, rate <= capacity)
        assert len(tried) < 40
    return search, tried


@given(st.floats(2 * LOWEST, HIGHEST))
def test_what_is_found_is_held_and_within_the_precision(capacity):
    search, tried = found(capacity)
    assert search.held in tried
    assert search.held <= capacity <= search.held * search.precision or capacity >= HIGHEST


@given(st.floats(2 * LOWEST, HIGHEST))
def test_a_rate_is_tried_once_and_a_held_one_is_above_all_held_before(capacity):
    _, tried = found(capacity)
    assert len(set(tried)) == len(tried)
    held = [rate for rate in tried if rate <= capacity]
    assert held == sorted(held)


def test_a_server_that_holds_nothing_is_given_up():
    search, tried = found(0.0)
    assert search.held == 0.0
    assert tried[0] == 1.0
    assert tried[-1] >= LOWEST


def test_the_tries_are_doublings_and_then_means():
    _, tried = found(5.0)
    assert tried[:4] == [1.0, 2.0, 4.0, 8.0]
    assert tried[4] == 32**0.5
