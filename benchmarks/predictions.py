"""Predicted against measured: `simulate` beside `bench serve`, by mode, workload and rate, with the same requests.

    pdactors calibrate -o cost.json          # right before, on the same idle machine
    .venv/bin/python benchmarks/predictions.py cost.json measured.json [--rounds 3] [--requests 40] [--workloads W,...]

Rates are shares of the highest one that the simulator finds the first mode to hold within the objective, so that
neither is idle nor overloaded. A prediction is off by |predicted / measured - 1|; `spread` is how far two rounds of the
measurement itself differ, (largest - smallest) / median. Prints a table in Markdown, then the medians, and how
many pairs of modes whose measured goodput differs by more than a tenth are ranked alike.

What was measured is kept in measured.json, case by case; what is there already is not measured again, so that another
model of the same machine can be held against it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from pdactors.bench.figures import Figures, Objective
from pdactors.bench.results import Load, ServerResult
from pdactors.bench.serve import MODES, Traffic, bench_serve
from pdactors.sim.simulate import Costs, simulate

SHARES = (0.4, 0.8)
DIFFERS = 1.1  # goodputs whose ratio is beyond that are to be ranked


class Case(Struct):
    """One workload at one rate, and what was measured of each mode."""

    workload: str
    share: float
    rate: float
    num_requests: int
    num_rounds: int
    objective: Objective
    measured: dict[str, ServerResult]

    def traffic(self) -> Traffic:
        """Return what both are asked."""
        load = Load(rate=self.rate, requests=self.num_requests)
        return Traffic(load, self.workload, objective=self.objective, rounds=self.num_rounds)


def p50(figures: Figures, what: str) -> float:
    """Return the median of "ttft_ms" or "tpot_ms"."""
    spread = getattr(figures, what)
    assert spread is not None, f"no answer has a {what}"
    return float(spread.p50)


def spread_of(result: ServerResult, what: str) -> float:
    """Return how far the rounds of a measurement are apart."""
    values = [p50(run.overall, what) for run in result.rounds]
    return (max(values) - min(values)) / statistics.median(values)


def rank(measured: dict[str, float], predicted: dict[str, float]) -> tuple[int, int]:
    """Return how many pairs of modes differ in what was measured, and how many of these are predicted to."""
    differing = [
        (high, low) for high, low in itertools.permutations(measured, 2) if measured[high] > DIFFERS * measured[low]
    ]
    return len(differing), sum(predicted[high] > predicted[low] for high, low in differing)


def measure(options: argparse.Namespace) -> list[Case]:
    """Return every case, measured now unless the file has it."""
    file: Path = options.measured
    objective = Objective(**{name: float(value) for name, value in (p.split("=") for p in options.slo.split(","))})
    cases = msgspec.json.decode(file.read_bytes(), type=list[Case]) if file.exists() else []
    for workload, share in itertools.product(options.workloads.split(","), SHARES):
        if any((case.workload, case.share) == (workload, share) for case in cases):
            continue
        search = Traffic(Load(find_max_rate=True, requests=options.requests), workload, objective=objective)
        highest = simulate(None, search, Costs(options.cost), modes=MODES[:1]).bench.servers[MODES[0]].max_rate
        assert highest, f"{workload}: no rate is held; give a wider --slo"
        case = Case(workload, share, round(share * highest, 3), options.requests, options.rounds, objective, {})
        case.measured = bench_serve(None, case.traffic(), modes=MODES).bench.servers
        cases.append(case)
        file.write_bytes(msgspec.json.encode(cases))
    return cases


def main(options: argparse.Namespace) -> None:
    errors: dict[str, list[float]] = {"ttft_ms": [], "tpot_ms": []}
    spreads: dict[str, list[float]] = {"ttft_ms": [], "tpot_ms": []}
    num_pairs = num_right = 0
    cases = measure(options)
    print(
        "| workload | requests/s | mode | TTFT P50, ms | predicted | TPOT P50, ms | predicted | goodput/s | predicted |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for case in cases:
        predicted = simulate(None, case.traffic(), Costs(options.cost), modes=MODES).bench.servers
        goodputs: tuple[dict[str, float], dict[str, float]] = ({}, {})
        for mode in MODES:
            real, guess = case.measured[mode].overall, predicted[mode].overall
            assert real is not None, f"{mode}: {case.measured[mode].error}"
            assert guess is not None, f"{mode}: {predicted[mode].error}"
            cells = []
            for what in errors:
                errors[what].append(abs(p50(guess, what) / p50(real, what) - 1))
                spreads[what].append(spread_of(case.measured[mode], what))
                cells += [f"{p50(real, what):.0f}", f"{p50(guess, what):.0f}"]
            goodputs[0][mode], goodputs[1][mode] = real.goodput_s, guess.goodput_s
            goods = [f"{real.goodput_s:.2f}", f"{guess.goodput_s:.2f}"]
            print(f"| {' | '.join([case.workload, f'{case.rate:g}', mode, *cells, *goods])} |", flush=True)
        differing, right = rank(*goodputs)
        num_pairs, num_right = num_pairs + differing, num_right + right
    print()
    for what, name in (("ttft_ms", "TTFT"), ("tpot_ms", "TPOT")):
        off, most, spread = statistics.median(errors[what]), max(errors[what]), statistics.median(spreads[what])
        print(f"{name} P50: off by {off:.1%} at the median, {most:.1%} at most; rounds differ by {spread:.1%}")
    print(f"modes ranked right: {num_right} of {num_pairs} pairs that differ")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("cost", type=Path, help="what `pdactors calibrate` measured")
    parser.add_argument("measured", type=Path, help="where measurements are kept")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=40, help="of each round")
    parser.add_argument("--workloads", default="chat,long,mixed")
    parser.add_argument("--slo", default="ttft_ms=10000,tpot_ms=150", help="a prompt of 2,000 tokens takes seconds")
    options = parser.parse_args()
    if not options.cost.is_file():
        sys.exit(f"{options.cost} is not there: `pdactors calibrate -o {options.cost}` makes it")
    main(options)
