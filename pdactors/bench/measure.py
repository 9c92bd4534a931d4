"""One round on one server: warm up, put the requests to it, and, when asked, look for the highest rate it holds."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pdactors.bench.busy import CPUMeter
from pdactors.bench.figures import Objective, figures, seconds_of
from pdactors.bench.load import Record, Target, closed_loop, open_loop
from pdactors.bench.rate_search import RateSearch
from pdactors.bench.results import GeneratorUse, Load, Try
from pdactors.bench.workload import Request, Source, arrive
from pdactors.errors import ConfigError

PATIENCE_S = 300.0  # that one request may take; in a search, what the objective allows
WARM_UP_S = 120.0
Told = Callable[[int, int], None]  # requests that ended, and of how many (0: not known)


def _no_accounts() -> dict[str, dict[str, Any]]:
    return {}


@dataclass(frozen=True)
class Site:
    """A server that runs. `pids` are its actors' processes and `accounts` what they say of themselves, if known."""

    connect: Callable[[], AbstractAsyncContextManager[Target]]
    pids: Mapping[str, int] = field(default_factory=dict)
    accounts: Callable[[], dict[str, dict[str, Any]]] = _no_accounts


@dataclass(frozen=True)
class Plan:
    """What is asked of a server: requests of `source` as `load` has them, after `num_warm_up` ones of `warm_up`."""

    source: Source
    warm_up: Source
    num_warm_up: int
    load: Load
    objective: Objective


@dataclass(frozen=True)
class Measured:
    """One run: its records, the busy shares by actor, and the rate that was offered or, in a search, held."""

    records: list[Record]
    busy: dict[str, float]
    generator: GeneratorUse
    rate: float | None = None
    tries: list[Try] = field(default_factory=list)


def measure(site: Site, plan: Plan, seed: str, told: Told) -> Measured:
    """Run a round; the requests are those that belong to `seed`.

    Raises:
        PDError: the server cannot be reached. What single requests meet is in their records.
        ConfigError: no request arrives in the given time, or the trace is wrong.
    """
    return asyncio.run(_measure(site, plan, seed, told))


async def _measure(site: Site, plan: Plan, seed: str, told: Told) -> Measured:
    async with site.connect() as target:
        first = itertools.islice(plan.warm_up(f"{seed} warm"), plan.num_warm_up)
        await closed_loop(target, first, plan.num_warm_up, patience_s=WARM_UP_S)
        if plan.load.find_max_rate:
            return await _search(site, target, plan, seed, told)
        return await _run(site, target, plan, plan.load.rate, seed, told)


async def _search(site: Site, target: Target, plan: Plan, seed: str, told: Told) -> Measured:
    """Try rates, each with new requests. Returns the run at the highest rate that was held, else the last one."""
    search = RateSearch()
    tries: list[Try] = []
    best: Measured | None = None
    while (rate := search.next_rate()) is not None:
        found = await _run(site, target, plan, rate, f"{seed} {len(tries)}", told)
        share = figures(found.records, seconds_of(found.records), plan.objective).slo_share
        tries.append(Try(round(rate, 4), share, share >= plan.objective.share))
        search.add(rate, tries[-1].is_held)
        if tries[-1].is_held or not search.held:
            best = found  # a held try is always higher than those before it
    assert best is not None
    return Measured(best.records, best.busy, best.generator, round(search.held, 4), tries)


async def _run(site: Site, target: Target, plan: Plan, rate: float | None, seed: str, told: Told) -> Measured:
    load = plan.load
    made = plan.source(seed) if rate is None else arrive(plan.source(seed), rate, seed)
    wanted = itertools.islice(made, load.requests)
    patience_s = PATIENCE_S
    if load.concurrency is not None:
        meter, began = CPUMeter(site.pids), (time.monotonic(), time.process_time())
        seconds = float("inf") if load.seconds is None else load.seconds
        records = await closed_loop(
            target,
            wanted,
            load.concurrency,
            patience_s=patience_s,
            seconds=seconds,
            done=lambda ended: told(ended, load.requests or 0),
        )
    else:
        requests = _arriving(wanted, load.seconds)
        if load.find_max_rate:
            patience_s = plan.objective.patience_s(max(request.max_tokens for request in requests))
        meter, began = CPUMeter(site.pids), (time.monotonic(), time.process_time())
        records = await open_loop(
            target, requests, patience_s=patience_s, done=lambda ended: told(ended, len(requests))
        )
    busy = (time.process_time() - began[1]) / max(time.monotonic() - began[0], 1e-9)
    late_ms = [(record.sent_s - record.begin_s) * 1000 for record in records]
    late = float(np.percentile(late_ms, 99)) if late_ms else 0.0
    return Measured(records, meter.shares(), GeneratorUse(round(busy, 3), round(late, 3)), rate)


def _arriving(requests: Iterator[Request], seconds: float | None) -> list[Request]:
    """Make all requests that arrive in that time beforehand, so that sending costs next to nothing."""
    if seconds is not None:
        requests = itertools.takewhile(lambda request: request.at_s < seconds, requests)
    made = list(requests)
    if not made:
        raise ConfigError(f"no request arrives within {seconds or 0:g} s; give more seconds, or a higher rate")
    return made
