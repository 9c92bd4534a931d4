"""Rounds on a model of a server, in a time of their own, and how the rounds of several are put together."""

from __future__ import annotations

import asyncio
import os
import selectors
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import pytest

from pdactors.bench.busy import CPUMeter
from pdactors.bench.figures import Objective
from pdactors.bench.load import Answer
from pdactors.bench.measure import Measured, Plan, Site, _measure
from pdactors.bench.results import Load
from pdactors.bench.serve import Traffic, _measure_all
from pdactors.bench.workload import Kind, Request, make_requests
from pdactors.errors import ConfigError, ConnectionLost

KIND = Kind("chat", (4, 8), (2, 2))
SOURCE = partial(make_requests, (KIND,), range(10, 50))
OBJECTIVE = Objective(ttft_ms=150.0, tpot_ms=150.0)


class QueueTarget:
    """One server with a queue: a request takes 1/capacity seconds, one at a time. Time is the loop's."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.asked: list[Request] = []
        self._free_s = 0.0

    async def ask(self, request: Request, stamps: list[float]) -> Answer:
        loop = asyncio.get_running_loop()
        self.asked.append(request)
        self._free_s = max(self._free_s, loop.time()) + 1 / self.capacity
        await asyncio.sleep(self._free_s - loop.time())
        stamps += [loop.time()] * 2
        return Answer(2)


class Skipping(selectors.DefaultSelector):
    """Waits for nothing: what a loop would wait is added to its time."""

    time_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.time_s += max(timeout or 0.0, 0.0)
        return super().select(0)


def measure(site: Site, plan: Plan, seed: str) -> Measured:
    """Run a round in no time."""
    selector = Skipping()
    loop = asyncio.SelectorEventLoop(selector)
    loop.time = lambda: selector.time_s  # type: ignore[method-assign]
    try:
        return loop.run_until_complete(_measure(site, plan, seed, told))
    finally:
        loop.close()


def site(target: QueueTarget) -> Site:
    @asynccontextmanager
    async def connect():
        yield target

    return Site(connect)


def plan(**load: object) -> Plan:
    return Plan(SOURCE, SOURCE, 2, Load(**load), OBJECTIVE)


def told(_ended: int, _of: int) -> None:
    pass


def test_a_round_warms_up_and_then_asks_what_belongs_to_its_seed():
    target = QueueTarget(1000.0)
    found = measure(site(target), plan(rate=200.0, requests=10), "1 0")
    assert (len(target.asked), len(found.records), found.rate) == (12, 10, 200.0)
    again = QueueTarget(1000.0)
    measure(site(again), plan(concurrency=2, requests=10), "1 0")
    assert [request.prompt for request in again.asked[2:]] == [request.prompt for request in target.asked[2:]]
    assert not {request.prompt for request in target.asked[:2]} & {request.prompt for request in target.asked[2:]}


def test_an_open_loop_of_seconds_asks_what_arrives_in_them():
    target = QueueTarget(10_000.0)
    found = measure(site(target), plan(rate=100.0, seconds=0.5), "1 0")
    assert len(found.records) == pytest.approx(50, abs=25)
    assert max(record.begin_s for record in found.records) < 0.5


def test_seconds_in_which_nothing_arrives_are_refused():
    with pytest.raises(ConfigError, match=r"no request arrives within 0\.001 s"):
        measure(site(QueueTarget(1.0)), plan(rate=0.01, seconds=0.001), "1 0")


def test_a_search_ends_near_what_the_server_can_do_and_keeps_the_run_that_was_held():
    target = QueueTarget(40.0)
    found = measure(site(target), plan(find_max_rate=True, requests=40), "1 0")
    assert found.rate is not None
    held = [one.rate for one in found.tries if one.is_held]
    assert found.rate == max(held)
    assert min(one.rate for one in found.tries if not one.is_held) > found.rate
    assert all(one.is_held == (one.slo_share >= OBJECTIVE.share) for one in found.tries)
    assert len(found.records) == 40
    prompts = [request.prompt for request in target.asked]
    assert len(set(prompts)) > len(prompts) * 0.95  # each try has its own: no cache helps


def test_a_search_on_a_server_that_holds_nothing_says_zero_and_shows_the_last_try():
    found = measure(site(QueueTarget(1.0)), plan(find_max_rate=True, requests=2), "1 0")
    assert found.rate == 0.0
    assert len(found.records) == 2
    assert not any(one.is_held for one in found.tries)


def test_rounds_take_turns_and_a_server_that_fails_stops_nobody():
    order: list[str] = []

    @contextmanager
    def opened(name):
        order.append(name)
        if name == "broken":
            raise ConnectionLost("it did not start")
        yield site(QueueTarget(1000.0))

    traffic = Traffic(Load(concurrency=2, requests=4), rounds=3, objective=OBJECTIVE)
    openers = {name: partial(opened, name) for name in ("a", "broken", "b")}
    servers, records = _measure_all(openers, plan(concurrency=2, requests=4), traffic, lambda *_: None)
    assert order == ["a", "broken", "b", "a", "b", "a", "b"]
    assert (servers["broken"].error, servers["broken"].overall) == ("it did not start", None)
    assert [len(servers[name].rounds) for name in "ab"] == [3, 3]
    assert servers["a"].overall is not None
    assert servers["a"].overall.requests == len(records["a"]) == 12
    assert servers["a"].overall.requests_s == pytest.approx(
        12 / sum(run.seconds for run in servers["a"].rounds), rel=0.01
    )


@pytest.mark.parametrize(("load", "part"), [(Load(requests=5), "needs a rate"), (Load(rate=1.0), "no end of its own")])
def test_a_load_without_arrivals_or_without_an_end_is_refused(load, part):
    with pytest.raises(ConfigError, match=part):
        Traffic(load).check()


def test_the_meter_sees_who_works_and_forgets_who_left():
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    idle = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    try:
        meter = CPUMeter({"busy": busy.pid, "idle": idle.pid, "gone": gone.pid, "me": os.getpid()})
        while (shares := meter.shares())["busy"] <= 0.0:
            pass
        assert set(shares) == {"busy", "idle", "me"}
        idle.kill()
        idle.wait()
        assert set(meter.shares()) == {"busy", "me"}
    finally:
        for process in (busy, idle):
            process.kill()
            process.wait()
