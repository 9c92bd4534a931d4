"""What a cluster says of its steps, and the moment that decode waits for company."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from itertools import pairwise
from typing import Any

import pytest

from pdactors import AsyncClient, Cluster

KEYS = {
    "ms", "batch", "kv_tokens", "attention_ms", "gemm_ms", "sampling_ms", "waiting_ms", "flops_share", "bandwidth_share"
}  # fmt: skip
WAIT_S = 2.0  # engine.batch_wait_ms
PLACES = 2
MakeIds = Callable[[object, int], list[int]]


async def _arrivals(
    client: AsyncClient, arrived: list[float], ids: list[int], count: int, has_begun: asyncio.Event | None = None
) -> None:
    async for _ in client.stream(prompt_token_ids=ids, max_tokens=count, ignore_eos=True):
        arrived.append(time.monotonic())
        if has_begun is not None:
            has_begun.set()


async def test_steps_are_told_of_and_decode_waits_for_company(
    start: Callable[..., AbstractContextManager[Cluster]],
    capfd: pytest.CaptureFixture[str],
    settled: Any,
    make_ids: MakeIds,
) -> None:
    keys = {"engine.slow_step_ms": 0.001, "engine.batch_wait_ms": WAIT_S * 1000, "engine.max_batch": PLACES}
    with start(**keys) as cluster:
        async with AsyncClient(cluster.zmq) as client:
            await _two_meet(client, make_ids)
            began = time.monotonic()
            while time.monotonic() - began < 2.5:
                both = (_arrivals(client, [], make_ids((began, i), 200), 400) for i in range(PLACES))
                await asyncio.gather(*both)
            took_s = time.monotonic() - began
        status = settled(cluster)
    _check_status(status)
    _check_log(capfd.readouterr().err, took_s)


async def _two_meet(client: AsyncClient, make_ids: MakeIds) -> None:
    """The first token is nobody's business but the prefill's; the second comes with those of whoever came meanwhile."""
    first: list[float] = []
    second: list[float] = []
    began = time.monotonic()
    has_begun = asyncio.Event()
    task = asyncio.create_task(_arrivals(client, first, make_ids("first", 50), 9, has_begun))
    await has_begun.wait()
    assert first[0] - began < WAIT_S * 0.75, "the prefill waited for company"
    await asyncio.sleep(0.1)
    assert len(first) == 1, "decode did not wait for company"
    await asyncio.gather(task, _arrivals(client, second, make_ids("second", 50), 9))
    assert first[1] > second[0]
    assert abs(first[1] - second[1]) < 0.25
    assert first[1] - began < WAIT_S, "the batch was full, and yet it waited"


def _check_status(status: dict[str, Any]) -> None:
    found = {actor["name"]: actor for actor in status["actors"]}
    step = found["n0/decode-0"]["step_ms"]
    assert 0 < step["p50"] <= step["p99"]
    assert 0 < step["mean"] <= step["p99"]
    assert found["n0/decode-0"]["use"].keys() == {"decode"}
    assert found["n0/prefill-0"]["use"].keys() == {"prefill"}
    for use in (found["n0/decode-0"]["use"]["decode"], found["n0/prefill-0"]["use"]["prefill"]):
        assert 0 < use["flops_share"] < 1.5
        assert 0 < use["bandwidth_share"] < 1.5
    assert found["gateway"]["use"] == {}


def _check_log(log: str, took_s: float) -> None:
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    slow = [line for line in lines if line["event"] == "slow decode step"]
    times = [datetime.fromisoformat(line["timestamp"]).timestamp() for line in slow]
    assert 2 <= len(slow) <= took_s + WAIT_S + 3
    assert all(later - earlier > 0.9 for earlier, later in pairwise(times))
    for line in slow:
        assert line.keys() >= KEYS, line
        assert (line["level"], line["actor"]) == ("warning", "n0/decode-0")
        parts = line["attention_ms"] + line["gemm_ms"] + line["sampling_ms"]
        assert parts == pytest.approx(line["ms"], abs=0.3)
        assert min(line["gemm_ms"], line["sampling_ms"]) > 0 or line["ms"] < 1.0
        assert line["attention_ms"] >= 0  # of so small a model it may round to nothing
        assert 1 <= line["batch"] <= PLACES
        assert line["kv_tokens"] >= 50 * line["batch"]
        assert line["waiting_ms"] >= 0
    assert PLACES in {line["batch"] for line in slow}
    assert [line for line in lines if line["event"] == "request done"]
