"""How far another machine's clock is ahead, and how sure that is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors.policy.clocks import DRIFT, Clocks
from pdactors.stamps import Clock, Echo

delays = st.floats(0.0, 0.5)


def echo(ahead_s: float, news_s: float, there_s: float, held_s: float, name: str = "theirs") -> Echo:
    heard_s = news_s + there_s + ahead_s
    return Echo(name, news_s, heard_s, heard_s + held_s)


def test_actors_of_our_own_host_need_no_measurement() -> None:
    clocks = Clocks("ours")
    clocks.heard("n0/decode-0", Echo("ours", 5.0, 5.1, 5.2), 5.3)
    assert clocks.of("n0/decode-0", 9.0) == Clock(0.0, 0.0, is_shared=True)
    assert clocks.of("n1/decode-0", 9.0) is None


def test_half_the_round_trip_is_the_bound() -> None:
    clocks = Clocks("ours")
    clocks.heard("a", echo(100.0, news_s=1.0, there_s=0.010, held_s=0.3), now=1.330)
    found = clocks.of("a", 1.330)
    assert found is not None
    assert found.offset_s == pytest.approx(99.995)
    assert found.error_s == pytest.approx(0.015)
    assert clocks.of("b", 1.330) is None


@given(st.floats(-1e5, 1e5), st.lists(st.tuples(delays, delays, delays), min_size=1, max_size=20))
def test_the_truth_is_always_within_the_bound_and_more_echoes_only_narrow_it(
    ahead_s: float, trips: list[tuple[float, float, float]]
) -> None:
    clocks, now, widest = Clocks("ours"), 50.0, float("inf")
    for there_s, held_s, back_s in trips:
        told = echo(ahead_s, now, there_s, held_s)
        now += there_s + held_s + back_s
        clocks.heard("a", told, now)
        found = clocks.of("a", now)
        assert found is not None
        assert abs(found.offset_s - ahead_s) <= found.error_s + 1e-9
        assert found.error_s <= (there_s + back_s) / 2 + 1e-9
        assert found.error_s <= widest + DRIFT * 2 + 1e-9
        widest = found.error_s


def test_a_clock_that_drifts_is_followed() -> None:
    clocks, now = Clocks("ours"), 0.0
    for _ in range(200):
        ahead_s = 7.0 + 0.5 * DRIFT * now
        clocks.heard("a", echo(ahead_s, now, 0.001, 0.0), now + 0.003)
        now += 10.0
    found = clocks.of("a", now)
    assert found is not None
    assert abs(found.offset_s - (7.0 + 0.5 * DRIFT * now)) <= found.error_s


def test_a_clock_that_was_set_is_measured_anew() -> None:
    clocks = Clocks("ours")
    clocks.heard("a", echo(10.0, 1.0, 0.001, 0.0), 1.002)
    clocks.heard("a", echo(-10.0, 2.0, 0.001, 0.0), 2.002)
    found = clocks.of("a", 2.002)
    assert found is not None
    assert found.offset_s == pytest.approx(-10.0)


def test_an_echo_that_cannot_be_true_says_nothing() -> None:
    clocks = Clocks("ours")
    clocks.heard("a", Echo("theirs", news_s=5.0, heard_s=1.0, sent_s=9.0), 5.0)  # it held it longer than it was away
    assert clocks.of("a", 5.0) is None


def test_a_machine_is_forgotten_with_its_last_actor() -> None:
    clocks = Clocks("ours")
    for name in ("a", "b"):
        clocks.heard(name, echo(1.0, 0.0, 0.1, 0.0), 0.2)
    clocks.forget("a")
    assert clocks.of("b", 0.2) is not None
    clocks.forget("b")
    clocks.heard("c", Echo("theirs", 1.0, 0.0, 9.0), 1.0)
    assert clocks.of("c", 0.2) is None
