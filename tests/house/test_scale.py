"""Engines come and go under load, share their weights, and two clusters on a machine do not meet."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdactors import AsyncClient, BadRequest, Client, Cluster
from pdactors.engine.shape import ModelShape

NUM_CLIENTS = 6
FIRST = {"n0/prefill-0", "n0/decode-0"}
MakeIds = Callable[[object, int], list[int]]
Names = Callable[[dict[str, Any]], dict[str, int]]


@pytest.fixture
def load(make_ids: MakeIds) -> Any:
    """Ask all the time: `async with load(cluster) as answers`; any error, or an answer that differs, fails the test."""

    @asynccontextmanager
    async def run(cluster: Cluster) -> AsyncIterator[list[float]]:
        requests = [
            {"prompt_token_ids": make_ids(("load", i), 40 * i + 1), "max_tokens": 60, "ignore_eos": True}
            for i in range(NUM_CLIENTS)
        ]
        answers: list[float] = []
        is_over = asyncio.Event()

        async def work(client: AsyncClient, fields: dict[str, Any], wanted: tuple[int, ...]) -> None:
            while not is_over.is_set():
                answer = await client.generate(**fields)
                assert answer.token_ids == wanted
                answers.append(asyncio.get_running_loop().time())

        async with AsyncClient(cluster.zmq) as client:
            alone = [(await client.generate(**fields)).token_ids for fields in requests]
            working = asyncio.gather(*(work(client, *item) for item in zip(requests, alone, strict=True)))
            try:
                yield answers
                is_over.set()
                await working
            finally:
                working.cancel()

    return run


async def _answers_go_on(client: AsyncClient, until: Any, answers: list[float]) -> None:
    """Wait for two rounds of answers from now on."""
    wanted = len(answers) + 2 * NUM_CLIENTS
    await until(client, lambda _: len(answers) >= wanted, 60.0)


async def _gone(client: AsyncClient, until: Any, name: str) -> None:
    await until(client, lambda status: name not in {actor["name"] for actor in status["actors"]})


async def _scale(client: AsyncClient, until: Any, names_of: Names, role: str, count: int) -> dict[str, int]:
    await client.scale("n0", role, count)  # type: ignore[arg-type]

    def is_done(status: dict[str, Any]) -> bool:
        here = [actor for actor in status["actors"] if actor["role"] == role]
        return len(here) == count and all(actor["state"] == "ready" for actor in here)

    return names_of(await until(client, is_done, 60.0))


async def test_decode_engines_come_and_go_under_load(
    growing: Cluster, load: Any, until: Any, settled: Any, names_of: Names
) -> None:
    async with load(growing) as answers, AsyncClient(growing.zmq) as client:
        first = names_of(await client.status())
        assert first.keys() == FIRST
        three = await _scale(client, until, names_of, "decode", 3)
        assert three.keys() == FIRST | {"n0/decode-1", "n0/decode-2"}
        await _answers_go_on(client, until, answers)
        steps = {actor["name"]: actor["step_ms"]["p50"] for actor in (await client.status())["actors"]}
        assert all(steps[name] > 0 for name in three), f"somebody has nothing to do: {steps}"
        one = await _scale(client, until, names_of, "decode", 1)
        assert one == first
        await _answers_go_on(client, until, answers)
        two = await _scale(client, until, names_of, "decode", 2)
        assert two.keys() == FIRST | {"n0/decode-1"}
        assert two["n0/decode-1"] > three["n0/decode-1"]
        assert (await client.drain("n0/decode-0"))["draining"] == ["n0/decode-0"]
        await _gone(client, until, "n0/decode-0")
        await _answers_go_on(client, until, answers)
        again = await _scale(client, until, names_of, "decode", 2)
        assert again["n0/decode-0"] > first["n0/decode-0"]
        await _scale(client, until, names_of, "decode", 1)
        await _answers_go_on(client, until, answers)
    status = settled(growing)
    total = sum(actor["kv_blocks"]["total"] for actor in status["actors"])
    assert total == 512, "the memory of those that are gone is lost"


async def test_prefill_engines_come_and_go_under_load(
    growing: Cluster, load: Any, until: Any, settled: Any, names_of: Names
) -> None:
    async with load(growing) as answers, AsyncClient(growing.zmq) as client:
        assert len(await _scale(client, until, names_of, "prefill", 2)) == 3
        await _answers_go_on(client, until, answers)
        await client.drain("n0/prefill-0")
        await _gone(client, until, "n0/prefill-0")
        await _answers_go_on(client, until, answers)
        await _scale(client, until, names_of, "prefill", 2)
        await _scale(client, until, names_of, "prefill", 1)
    settled(growing)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["chunked", "colocated"])
async def test_workers_come_and_go_under_load(
    start: Callable[..., AbstractContextManager[Cluster]],
    load: Any,
    until: Any,
    settled: Any,
    names_of: Names,
    mode: str,
) -> None:
    with start(**{"cluster.mode": mode, "node.0.workers": 1, "engine.chunk_tokens": 128}) as cluster:
        async with load(cluster) as answers, AsyncClient(cluster.zmq) as client:
            assert len(await _scale(client, until, names_of, "worker", 3)) == 3
            await _answers_go_on(client, until, answers)
            await client.drain("n0/worker-0")
            await _gone(client, until, "n0/worker-0")
            await _answers_go_on(client, until, answers)
            await _scale(client, until, names_of, "worker", 1)
            await _answers_go_on(client, until, answers)
        settled(cluster)


async def test_who_scales_twice_at_once_is_told_to_ask_again(
    growing: Cluster, until: Any, settled: Any, names_of: Names
) -> None:
    async with AsyncClient(growing.zmq) as client:
        outcomes = await asyncio.gather(*(client.scale("n0", "decode", 2) for _ in range(3)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [dict, BadRequest, BadRequest]
        await client.scale("n0", "decode", 2)
        assert len(await _scale(client, until, names_of, "decode", 2)) == 3
        await client.scale("n0", "decode", 3)
        await client.scale("n0", "decode", 1)  # before it is ready
        assert (await _scale(client, until, names_of, "decode", 1)).keys() == FIRST
    settled(growing)


@pytest.mark.slow
async def test_slots_are_used_again_more_often_than_there_are_slots(
    growing: Cluster, load: Any, until: Any, settled: Any, names_of: Names
) -> None:
    async with load(growing), AsyncClient(growing.zmq) as client:
        for _ in range(20):
            await _scale(client, until, names_of, "decode", 2)
            await _scale(client, until, names_of, "decode", 1)
    settled(growing)


@pytest.mark.parametrize(
    ("ask", "reason"),
    [
        (lambda client: client.drain("n0/nobody"), "no engine is called n0/nobody; there are n0/decode-"),
        (lambda client: client.drain("router"), "no engine is called router"),
        (lambda client: _drain_all(client, "decode"), "is the last decode; scale up"),
        (lambda client: _drain_all(client, "prefill"), "is the last prefill; scale up"),
        (lambda client: client.scale("n7", "decode", 2), "no node is called n7"),
        (lambda client: client.scale("n0", "decode", 0), "at least one decode is needed"),
        (
            lambda client: client.scale("n0", "worker", 1),
            "has prefill and decode engines, no worker",
        ),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(
    growing: Cluster, settled: Any, ask: Callable[[Client], object], reason: str
) -> None:
    with Client(growing.zmq) as client:
        with pytest.raises(BadRequest, match=re.escape(reason)):
            ask(client)
        assert {actor["state"] for actor in client.status()["actors"]} == {"ready"}
        assert client.generate("x", max_tokens=2).finish_reason == "length"
    settled(growing)


def _drain_all(client: Client, role: str) -> None:
    for actor in client.status()["actors"]:
        if actor["role"] == role:
            client.drain(actor["name"])


async def test_two_clusters_at_once_keep_to_themselves(
    growing: Cluster, session_cluster: Cluster, load: Any, until: Any, settled: Any
) -> None:
    async with load(growing) as ours, load(session_cluster) as theirs:
        for cluster, answers in ((growing, ours), (session_cluster, theirs)):
            async with AsyncClient(cluster.zmq) as client:
                await _answers_go_on(client, until, answers)
                status = await client.status()
                assert not any((await client.leaks()).values())
            assert status["run_id"] == cluster.ready.run_id
            assert status["requests"] <= NUM_CLIENTS
    settled(growing)
    settled(session_cluster)


# ---- Weights are shared --------


def _pss_bytes(cluster: Cluster) -> int:
    """Return what the run's processes take, shared pages divided among those that share them."""
    launcher = psutil.Process(cluster.ready.pid)
    total = 0
    for process in [launcher, *launcher.children(recursive=True)]:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        total += int(re.search(r"^Pss:\s+(\d+) kB$", rollup, re.MULTILINE).group(1)) * 1024  # type: ignore[union-attr]
    return total


async def test_a_second_decode_engine_adds_at_most_half_of_the_weights(
    start: Callable[..., AbstractContextManager[Cluster]], real_model: Path, until: Any, names_of: Names, settled: Any
) -> None:
    weights = ModelShape.read(real_model).weight_bytes_as("bfloat16")
    text = "The quick brown fox jumps over the lazy dog. " * 8

    async def ask(client: AsyncClient, count: int) -> None:
        asked = [client.generate(f"{i}: {text}", max_tokens=16, ignore_eos=True) for i in range(count)]
        await asyncio.gather(*asked)
        status = await client.status()
        busy = [a["name"] for a in status["actors"] if a["role"] == "decode" and a["step_ms"]["p50"] > 0]
        assert len(busy) == count, f"not every decode engine decoded: {busy}"

    keys = {"model.path": real_model, "model.dtype": "bfloat16", "kv.memory": "64MiB", "model.max_model_len": 512}
    with start(**keys) as cluster:
        async with AsyncClient(cluster.zmq) as client:
            await ask(client, 1)
            before = _pss_bytes(cluster)
            await _scale(client, until, names_of, "decode", 2)
            await ask(client, 2)
            added = _pss_bytes(cluster) - before
        print(f"weights {weights >> 20} MiB, before {before >> 20} MiB, added {added >> 20} MiB")
        assert added <= weights / 2
        settled(cluster)
