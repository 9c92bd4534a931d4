from __future__ import annotations

import pytest

from pdactors.bench.figures import Figures, Objective, Spread, by_kind, figures, itl_ms, seconds_of, tpot_ms, ttft_ms
from pdactors.bench.load import Record

OBJECTIVE = Objective(ttft_ms=500.0, tpot_ms=100.0)


def record(
    *stamps: float, begin_s: float = 0.0, kind: str = "chat", error: str | None = None, num_tokens: int | None = None
) -> Record:
    """A request that was due at `begin_s`, sent 10 ms later, and had its tokens at `stamps`."""
    end_s = stamps[-1] if stamps else begin_s + 1.0
    count = len(stamps) if num_tokens is None else num_tokens
    return Record(kind, 100, begin_s, begin_s + 0.01, stamps, end_s, 0 if error else count, error=error)


def test_ttft_counts_from_when_the_request_was_due_not_from_when_it_was_sent():
    assert ttft_ms(record(2.3, 2.4, begin_s=2.0)) == pytest.approx(300.0)


def test_tpot_is_the_mean_of_the_further_tokens_and_unknown_for_one():
    assert tpot_ms(record(1.0, 1.1, 1.5)) == pytest.approx(250.0)
    assert tpot_ms(record(1.0)) is None
    assert tpot_ms(record(1.0, 1.5, num_tokens=6)) == pytest.approx(100.0)  # several came at once
    assert itl_ms(record(1.0, 1.1, 1.5)) == pytest.approx([100.0, 400.0])


@pytest.mark.parametrize(
    ("one", "is_met"),
    [
        (record(0.5, 0.6, 0.7), True),
        (record(0.501, 0.6), False),
        (record(0.1, 0.301, 0.302), False),
        (record(0.1, 0.29, 0.3), True),  # the mean counts, not the largest
        (record(0.4), True),
        (record(0.1, 0.2, error="worker_lost"), False),
        (record(), False),
    ],
)
def test_the_objective_is_met_by_what_is_in_time_and_ended_well(one, is_met):
    assert OBJECTIVE.is_met_by(one) is is_met


def test_a_run_is_reduced_to_its_figures():
    records = [
        record(0.1, 0.2, 0.3),
        record(1.6, 1.7, begin_s=1.0),
        record(0.2, begin_s=0.0, error="overloaded"),
        record(error="overloaded"),
        record(error="timeout"),
    ]
    found = figures(records, 2.0, OBJECTIVE)
    assert (found.requests, found.done, found.errors) == (5, 2, {"overloaded": 2, "timeout": 1})
    assert (found.tokens, found.prompt_tokens, found.tokens_s) == (5, 200, 2.5)
    assert (found.requests_s, found.goodput_s, found.slo_share) == (1.0, 0.5, 0.2)
    assert found.ttft_ms is not None
    assert found.ttft_ms.max == pytest.approx(600.0)
    assert found.itl_ms is not None
    assert found.itl_ms.p50 == pytest.approx(100.0)
    assert found.paths == {"none": 2}


def test_nothing_gives_no_percentiles():
    assert figures([], 0.0, OBJECTIVE) == Figures(0, 0, {}, 0, 0, 0, 0.0, 0.0, 0.0, 0.0, None, None, None, {})
    assert Spread.of([]) is None
    assert seconds_of([]) == 0.0


def test_percentiles_lie_between_the_values():
    assert Spread.of([float(i) for i in range(101)]) == Spread(50.0, 90.0, 99.0, 100.0)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 7.0)


def test_records_are_parted_by_kind():
    records = [record(1.0, kind="long"), record(2.0), record(3.0, kind="long")]
    assert by_kind(records) == {"chat": [records[1]], "long": [records[0], records[2]]}
    assert seconds_of(records) == 3.0


def test_what_takes_longer_than_the_objective_allows_has_missed_it():
    patience_s = OBJECTIVE.patience_s(3)
    assert not OBJECTIVE.is_met_by(record(0.1, patience_s + 0.001, num_tokens=3))
