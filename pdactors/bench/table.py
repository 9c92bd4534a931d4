"""The table of a serving measurement, for terminals and reports. Pure."""

from __future__ import annotations

from pdactors.bench.figures import Figures, Spread
from pdactors.bench.results import ServeBench

COLUMNS = ("server", "kind", "n", "failed", "TTFT", "TPOT", "ITL", "req/s", "tokens/s", "goodput/s", "in time")
LEGEND = "TTFT and TPOT: P50/P99, ITL: P50/P99/largest, in milliseconds"


def rows(bench: ServeBench) -> list[tuple[str, ...]]:
    """Return a row for each kind of request of each server, and for all of them where there are several kinds."""
    found = []
    for name, result in bench.servers.items():
        if result.overall is None:
            continue
        if len(result.kinds) > 1:
            found.append(_row(name, "all", result.overall))
        found += [_row(name, kind, figures) for kind, figures in result.kinds.items()]
    return found


def notes(bench: ServeBench) -> list[str]:
    """Return what the table does not hold: highest rates, busy shares, whether the generator kept up, what failed."""
    found = []
    for name, result in bench.servers.items():
        if result.max_rate is not None:
            held = f"{result.max_rate:.2f} requests/s" if result.max_rate else "no rate that was tried"
            found.append(f"{name}: the highest rate within the objective is {held}")
        if shares := result.busy_shares():
            found.append(f"{name}: busy {', '.join(f'{actor} {share:.0%}' for actor, share in shares.items())}")
        if result.overall is not None and result.overall.errors:
            counts = ", ".join(f"{count} {code}" for code, count in sorted(result.overall.errors.items()))
            found.append(f"{name}: failed: {counts}")
        if result.error is not None:
            found.append(f"{name}: {result.error}")
    runs = [run.generator for result in bench.servers.values() for run in result.rounds]
    if runs and not bench.simulated:
        found.append(
            f"generator: busy {max(run.busy_share for run in runs):.0%} of a core at most, sent at most "
            f"{max(run.late_ms_p99 for run in runs):.1f} ms late (P99)"
        )
    return found


def load_words(bench: ServeBench) -> str:
    """Say what was asked, and how."""
    load = bench.load
    if load.find_max_rate:
        how = "looking for the highest rate"
    elif load.concurrency is not None:
        how = f"{load.concurrency} in flight"
    else:
        how = "at the trace's own times" if load.rate is None else f"Poisson arrivals at {load.rate:g}/s"
    end = f"{load.requests} requests" if load.requests is not None else ""
    end = end or (f"{load.seconds:g} s" if load.seconds is not None else "to its end")
    objective = bench.objective
    return (
        f"workload {bench.workload}, {how}, {end}; in time: TTFT within {objective.ttft_ms:g} ms and TPOT within "
        f"{objective.tpot_ms:g} ms"
    )


def _row(name: str, kind: str, figures: Figures) -> tuple[str, ...]:
    return (
        name,
        kind,
        f"{figures.requests}",
        f"{figures.requests - figures.done}",
        _spread(figures.ttft_ms),
        _spread(figures.tpot_ms),
        _spread(figures.itl_ms, with_max=True),
        f"{figures.requests_s:.2f}",
        f"{figures.tokens_s:.1f}",
        f"{figures.goodput_s:.2f}",
        f"{figures.slo_share:.0%}",
    )


def _spread(spread: Spread | None, *, with_max: bool = False) -> str:
    if spread is None:
        return "-"
    values = (spread.p50, spread.p99, spread.max) if with_max else (spread.p50, spread.p99)
    return "/".join(f"{value:.0f}" if value >= 100 else f"{value:.1f}" for value in values)
