"""Statistics of a run: how long tokens took, how much was done, and how much of it in time. Pure.

TTFT is the time from when a request was due to its first token, ITL the time between two tokens of an answer, TPOT the
mean of it over the answer. Goodput counts the requests that met the objective, a second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct

from pdactors.bench.load import Record


class Objective(Struct, frozen=True):
    """What a request must meet (the SLO), and the share of them that must for a rate to be held."""

    ttft_ms: float = 2000.0
    tpot_ms: float = 150.0
    share: float = 0.95

    def is_met_by(self, record: Record) -> bool:
        """Say whether a request ended well and in time."""
        if record.error is not None or not record.stamps:
            return False
        tpot = tpot_ms(record)
        return ttft_ms(record) <= self.ttft_ms and (tpot is None or tpot <= self.tpot_ms)

    def patience_s(self, max_tokens: int) -> float:
        """How long an answer of so many tokens may take at most; whatever takes longer has missed."""
        return (self.ttft_ms + self.tpot_ms * max_tokens) / 1000


class Spread(Struct, frozen=True):
    """Percentiles and the largest of some milliseconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        """Reduce `values`; None for none."""
        if not values:
            return None
        return cls(*(round(float(value), 3) for value in np.percentile(values, (50, 90, 99, 100))))


class Figures(Struct, frozen=True):
    """A run, or the requests of one kind in it. Milliseconds, and rates per second over the whole run.

    `errors` counts the others by code; `slo_share` is of all requests, failed ones too. Spreads are None where no
    answer had as many tokens as they need.
    """

    requests: int
    done: int
    errors: dict[str, int]
    prompt_tokens: int
    cached_tokens: int
    tokens: int
    requests_s: float
    tokens_s: float
    goodput_s: float
    slo_share: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    paths: dict[str, int]


def ttft_ms(record: Record) -> float:
    """Time to the first token; there must be one."""
    return (record.stamps[0] - record.begin_s) * 1000


def tpot_ms(record: Record) -> float | None:
    """Mean time of each further token; None where the answer has only one."""
    if record.num_tokens < 2 or len(record.stamps) < 2:
        return None
    return (record.stamps[-1] - record.stamps[0]) * 1000 / (record.num_tokens - 1)


def itl_ms(record: Record) -> list[float]:
    """Times between tokens as they came; a server that sends several at once shows one gap for them."""
    return [float(gap) for gap in np.diff(record.stamps) * 1000]


def figures(records: Sequence[Record], seconds: float, objective: Objective) -> Figures:
    """Reduce the records of runs that took `seconds` together."""
    done = [record for record in records if record.error is None]
    first = [record for record in done if record.stamps]
    met = sum(objective.is_met_by(record) for record in records)
    tokens = sum(record.num_tokens for record in done)
    return Figures(
        requests=len(records),
        done=len(done),
        errors=dict(Counter(record.error for record in records if record.error is not None)),
        prompt_tokens=sum(record.prompt_tokens for record in done),
        cached_tokens=sum(record.cached_tokens for record in done),
        tokens=tokens,
        requests_s=_per_second(len(done), seconds),
        tokens_s=_per_second(tokens, seconds),
        goodput_s=_per_second(met, seconds),
        slo_share=round(met / len(records), 4) if records else 0.0,
        ttft_ms=Spread.of([ttft_ms(record) for record in first]),
        tpot_ms=Spread.of([tpot for record in first if (tpot := tpot_ms(record)) is not None]),
        itl_ms=Spread.of([gap for record in first for gap in itl_ms(record)]),
        paths=dict(Counter(record.path for record in done)),
    )


def by_kind(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Part records by the kind of their request, in the order of the names."""
    parts: dict[str, list[Record]] = {}
    for record in records:
        parts.setdefault(record.kind, []).append(record)
    return dict(sorted(parts.items()))


def seconds_of(records: Sequence[Record]) -> float:
    """How long a run took, from its beginning to the last end."""
    return max((record.end_s for record in records), default=0.0)


def _per_second(count: int, seconds: float) -> float:
    return round(count / seconds, 3) if seconds > 0 else 0.0
