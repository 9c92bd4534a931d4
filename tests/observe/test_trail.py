"""What an actor remembers of a request, and what it forgets."""

from __future__ import annotations

import pytest

from pdactors.observe.trail import MAX_STAMPS, Trail, clock_id
from pdactors.stamps import Stamp, Steps


def test_moments_spans_and_writes_are_told_in_order() -> None:
    trail = Trail(4, 8)
    trail.note("a", "received", 1.0)
    trail.note("a", "chunk", 1.5, 2.0, 2, tokens=7)
    trail.written("a", 2.5)
    found = trail.of("a")
    assert found is not None
    assert found.stamps == (Stamp("received", 1.0), Stamp("chunk", 1.5, 2.0, 2, {"tokens": 7}))
    assert found.written_s == (2.5,)
    assert trail.of("b") is None


def test_a_step_is_kept_once_and_told_to_each_that_took_part() -> None:
    trail = Trail(4, 8)
    for number in range(4):
        both = ["a", "b"] if number != 2 else ["b"]  # a is preempted meanwhile
        trail.step(both, number, number + 0.5, len(both))
    a, b = trail.of("a"), trail.of("b")
    assert a is not None
    assert b is not None
    assert a.steps == Steps((0.0, 1.0, 3.0), (0.5, 1.5, 3.5), (2, 2, 2))
    assert b.steps.batch == (2, 2, 1, 2)
    assert a.num_lost == b.num_lost == 0


def test_steps_that_were_overwritten_are_counted_as_lost() -> None:
    trail = Trail(4, 3)
    for number in range(5):
        trail.step(["a"], number, number, 1)
    found = trail.of("a")
    assert found is not None
    assert found.steps.began_s == (2.0, 3.0, 4.0)
    assert found.num_lost == 2


def test_whoever_there_was_no_news_of_for_longest_is_forgotten() -> None:
    trail = Trail(2, 4)
    trail.note("a", "x", 0.0)
    trail.note("b", "x", 0.0)
    trail.step(["a"], 0.0, 1.0, 1)
    trail.note("c", "x", 0.0)
    assert [*trail] == ["a", "c"]


def test_a_request_of_endless_news_has_a_limit() -> None:
    trail = Trail(1)
    for _ in range(MAX_STAMPS + 3):
        trail.note("a", "x", 0.0)
    found = trail.of("a")
    assert found is not None
    assert (len(found.stamps), found.num_lost) == (MAX_STAMPS, 3)


@pytest.mark.parametrize("num_steps", [0, 8])
def test_nothing_is_kept_where_nothing_is_to_be(num_steps: int) -> None:
    trail = Trail(0, num_steps)
    trail.note("a", "x", 0.0)
    trail.written("a", 0.0)
    trail.step(["a"], 0.0, 1.0, 1)
    assert [*trail] == []


def test_processes_of_one_host_read_one_clock() -> None:
    assert clock_id() == clock_id() != ""
