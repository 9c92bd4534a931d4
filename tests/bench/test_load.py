from __future__ import annotations

import asyncio

import pytest

from pdactors.bench.load import Answer, closed_loop, open_loop
from pdactors.bench.workload import Request
from pdactors.errors import Overloaded


class FakeTarget:
    """Answers each request with two tokens, once `gate` is open; counts what is in flight."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.expected, self.reached = 0, asyncio.Event()  # set once so many are in flight
        self.asked: list[Request] = []
        self.in_flight = self.most_in_flight = self.left = 0

    async def ask(self, request: Request, stamps: list[float]) -> Answer:
        self.asked.append(request)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        if self.in_flight == self.expected:
            self.reached.set()
        try:
            await asyncio.sleep(0)
            if request.kind == "refused":
                raise Overloaded("too many", retry_after_s=1.0)
            await self.gate.wait()
            stamps += [asyncio.get_running_loop().time()] * 2
            return Answer(2, 5, "lease")
        except asyncio.CancelledError:
            self.left += 1
            raise
        finally:
            self.in_flight -= 1


def requests(count: int, *, every_s: float = 0.0, kind: str = "chat") -> list[Request]:
    return [Request(kind, (1, 2, i), 2, i * every_s) for i in range(count)]


async def test_an_open_loop_sends_on_whatever_became_of_the_others():
    target = FakeTarget()
    target.expected = 20
    run = asyncio.create_task(open_loop(target, requests(20), patience_s=30))
    await target.reached.wait()
    target.gate.set()
    records = await run
    assert target.most_in_flight == 20
    assert [record.num_tokens for record in records] == [2] * 20


async def test_an_open_loop_sends_no_request_before_it_is_due():
    target = FakeTarget()
    target.gate.set()
    records = await open_loop(target, requests(5, every_s=0.02), patience_s=30)
    assert [record.begin_s for record in records] == pytest.approx([0.0, 0.02, 0.04, 0.06, 0.08])
    for record in records:
        assert record.begin_s <= record.sent_s <= record.stamps[0] <= record.end_s


async def test_a_closed_loop_keeps_so_many_in_flight_and_no_more():
    target = FakeTarget()
    target.expected = 3
    run = asyncio.create_task(closed_loop(target, requests(12), 3, patience_s=30))
    await target.reached.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert len(target.asked) == 3
    target.gate.set()
    assert len(await run) == 12
    assert target.most_in_flight == 3
    assert target.asked == requests(12)


async def test_a_closed_loop_stops_asking_when_its_time_is_over():
    target = FakeTarget()
    target.gate.set()
    endless = iter(lambda: Request("chat", (1,), 2), None)
    records = await closed_loop(target, endless, 2, patience_s=30, seconds=0.05)
    assert records
    assert all(record.begin_s < 0.05 for record in records)


async def test_errors_are_counted_and_stop_nothing():
    target = FakeTarget()
    target.gate.set()
    records = await open_loop(target, [*requests(2), *requests(3, kind="refused"), *requests(1)], patience_s=30)
    assert sorted(record.error or "" for record in records) == ["", "", "", "overloaded", "overloaded", "overloaded"]
    refused = next(record for record in records if record.error)
    assert (refused.reason, refused.num_tokens, refused.stamps) == ("too many", 0, ())


async def test_a_request_that_takes_too_long_is_left_and_counted():
    target = FakeTarget()
    records = await open_loop(target, requests(3), patience_s=0.02)
    assert [record.error for record in records] == ["timeout"] * 3
    assert (target.left, target.in_flight) == (3, 0)


async def test_progress_is_told_as_requests_end():
    target, told = FakeTarget(), []
    target.gate.set()
    await open_loop(target, requests(4), patience_s=30, done=told.append)
    assert told == [1, 2, 3, 4]
