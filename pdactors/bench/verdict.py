"""Which server wins on this machine at this load, and why, in words. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pdactors.bench.figures import Figures, Spread
from pdactors.bench.results import ServerResult

IDLE_GAP = 0.25  # of a core, between the busiest engine and the idlest, that is worth a word
PRICE = 1.1  # how much better another must be in something for that to be named


@dataclass(frozen=True)
class Criterion:
    """One figure that decides; servers within `equal` of the best are equal in it."""

    name: str
    unit: str
    value: Callable[[ServerResult], float | None]
    is_more_better: bool
    equal: float

    def keep(self, values: Mapping[str, float]) -> list[str]:
        """Return the servers that are as good as the best, but for noise; the best first."""
        ranked = sorted(values, key=lambda name: values[name], reverse=self.is_more_better)
        best = values[ranked[0]]
        return [name for name in ranked if self.times(best, values[name]) <= self.equal]

    def times(self, better: float, worse: float) -> float:
        """How many times as good the better is."""
        high, low = (better, worse) if self.is_more_better else (worse, better)
        if high == low:
            return 1.0
        return high / low if low > 0 else float("inf")


def _overall(
    pick: Callable[[Figures], Spread | float | None], field: str = ""
) -> Callable[[ServerResult], float | None]:
    def value(result: ServerResult) -> float | None:
        found = None if result.overall is None else pick(result.overall)
        return getattr(found, field) if isinstance(found, Spread) else found

    return value


MAX_RATE = Criterion("highest rate within the objective", "/s", lambda result: result.max_rate, True, 1.1)
GOODPUT = Criterion("goodput", "/s", _overall(lambda figures: figures.goodput_s), True, 1.03)
ITL = Criterion("P99 inter-token latency", " ms", _overall(lambda figures: figures.itl_ms, "p99"), False, 1.05)
TTFT = Criterion("median TTFT", " ms", _overall(lambda figures: figures.ttft_ms, "p50"), False, 1.05)
TPOT = Criterion("median TPOT", " ms", _overall(lambda figures: figures.tpot_ms, "p50"), False, 1.05)
CRITERIA = (MAX_RATE, GOODPUT, ITL, TTFT, TPOT)  # in order: an earlier one decides
REASONS = {
    ("disaggregated", ITL): "no prompt runs between its decode steps",
    ("disaggregated", TPOT): "no prompt runs between its decode steps",
    ("disaggregated", TTFT): "its prompts wait for no decode step",
    ("kvstore", ITL): "no prompt runs between its decode steps",
    ("kvstore", TPOT): "no prompt runs between its decode steps",
    ("kvstore", TTFT): "its prompts wait for no decode step",
    ("chunked", ITL): "a step takes no more of a prompt than its token budget",
    ("chunked", TTFT): "every engine takes prompts, and decode steps do not wait for whole ones",
    ("colocated", TTFT): "every engine takes prompts, whole ones before any decode step",
    ("colocated", ITL): "whole prompts seldom came while others decoded",
}
SHARED = "any engine does whatever there is to do"


def verdict(servers: Mapping[str, ServerResult]) -> str:
    """Say who wins here, by what, why, and what it pays for it. The earlier of `CRITERIA` decide."""
    measured = {name: result for name, result in servers.items() if result.overall is not None and result.overall.done}
    if not measured:
        return "Nothing was measured: no server answered a request."
    if len(measured) == 1:
        return f"Only {next(iter(measured))} was measured; there is nothing to hold it against."
    left = list(measured)
    for criterion in CRITERIA:
        values = _values(criterion, {name: measured[name] for name in left})
        if len(values) < len(left):
            continue  # not known of all
        kept = criterion.keep(values)
        if len(kept) < len(left):
            lost = {name: values[name] for name in left if name not in kept}
            if len(kept) == 1:
                return _sentence(kept[0], criterion, values[kept[0]], lost, measured)
            left = [name for name in left if name in kept]
    names = ", ".join(left[:-1]) + f" and {left[-1]}"
    beaten = [name for name in measured if name not in left]
    than = f", ahead of {' and '.join(beaten)}" if beaten else ""
    return f"{names} are equal here, as far as noise lets one say{than}."


def _sentence(
    winner: str, criterion: Criterion, value: float, lost: Mapping[str, float], measured: Mapping[str, ServerResult]
) -> str:
    against = " and ".join(f"{_number(found)}{criterion.unit} of {name}" for name, found in lost.items())
    text = f"{winner} wins here: its {criterion.name} is {_number(value)}{criterion.unit} against {against}"
    reason = _reason(winner, criterion, lost, measured)
    text += f", because {reason}." if reason else "."
    prices = [price for other in CRITERIA if (price := _price(winner, other, measured))]
    return f"{text} It pays with {' and '.join(prices)}." if prices else text


def _reason(winner: str, criterion: Criterion, lost: Mapping[str, float], measured: Mapping[str, ServerResult]) -> str:
    known = REASONS.get((winner, criterion), "")
    if known or criterion not in (MAX_RATE, GOODPUT):
        return known
    idle = [words for name in lost if (words := _idle(name, measured[name]))]
    if idle and winner in ("chunked", "colocated"):
        return f"{SHARED}, while {' and '.join(idle)}"
    return SHARED if winner in ("chunked", "colocated") else ""


def _idle(name: str, result: ServerResult) -> str:
    """Say which engine of a server had little to do while another was busy; "" if none had."""
    shares = result.busy_shares()
    if not shares:
        return ""
    most, least = max(shares, key=lambda key: shares[key]), min(shares, key=lambda key: shares[key])
    if shares[most] - shares[least] < IDLE_GAP:
        return ""
    return f"in {name} {least} was busy for {shares[least]:.0%} of the time and {most} for {shares[most]:.0%}"


def _price(winner: str, criterion: Criterion, measured: Mapping[str, ServerResult]) -> str:
    """Say in what another server is clearly better; "" if in nothing."""
    values = _values(criterion, measured)
    if winner not in values:
        return ""
    best = criterion.keep(values)[0]
    times = criterion.times(values[best], values[winner])
    if times < max(PRICE, criterion.equal):
        return ""
    found, other = _number(values[winner]), _number(values[best])
    return f"a {criterion.name} of {found}{criterion.unit} ({best}: {other}{criterion.unit})"


def _values(criterion: Criterion, results: Mapping[str, ServerResult]) -> dict[str, float]:
    found = {name: criterion.value(result) for name, result in results.items()}
    return {name: value for name, value in found.items() if value is not None}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
