"""What the tests of a whole cluster share: ways to ask and to let go, and the books that must be right afterwards."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import pytest
from ray_machines import ray_machines

from pdactors import AsyncClient, Client, Cluster, PDError
from pdactors.bench import reference
from pdactors.bench.reference import Expected, Job
from pdactors.text.tokenizer import Tokenizer

LET_GO_S = 2.0  # one second, and the rest of the step that runs
ENGINES = ("prefill", "decode", "worker")
WAYS = ("tcp cancel", "tcp disconnect", "zmq cancel", "zmq disconnect")

Status = dict[str, Any]
Start = Callable[..., AbstractContextManager[Cluster]]


@pytest.fixture(scope="session")
def make_ids(tiny_model: Path) -> Callable[[object, int], list[int]]:
    """Make prompts for the tiny model, the same for the same seed: `make_ids(seed, count)`."""
    tokenizer = Tokenizer(tiny_model)
    pieces = {token: tokenizer.decode([token]) for token in range(tokenizer.vocab_size)}
    words = [token for token, piece in pieces.items() if len(piece) > 1 and piece.isascii()]

    def make(seed: object, count: int) -> list[int]:
        rng = random.Random(str(seed))
        return [rng.choice(words) for _ in range(count)]

    return make


# ---- Books --------


def engines(status: Status) -> list[Status]:
    return [actor for actor in status["actors"] if actor["role"] in ENGINES]


def _wrong(status: Status, leaks: dict[str, Any]) -> list[str]:
    """Say what is held although nothing is in flight, and where the blocks do not add up (I5)."""
    wrong = [f"{actor['name']} is not idle" for actor in status["actors"] if actor["running"] or actor["waiting"]]
    wrong += [f"leaks: {what} {found}" for what, found in leaks.items() if found]
    wrong += [f"{status['requests']} requests"] if status["requests"] else []
    for actor in engines(status):
        blocks = actor["kv_blocks"]
        if blocks["used"] or blocks["leased_out"] or blocks["leased_in"]:
            wrong.append(f"{actor['name']} holds {blocks}")
    return wrong + _unbalanced(status)


def _unbalanced(status: Status) -> list[str]:
    found = []
    for actor in engines(status):
        blocks = actor["kv_blocks"]
        if sum(blocks[kind] for kind in ("free", "cached", "used", "leased_out")) != blocks["total"]:
            found.append(f"{actor['name']} does not add up: {blocks}")
    return found


@pytest.fixture(scope="session")
def settled() -> Callable[[Cluster], Status]:
    """Hold that nothing is held for nobody, at the latest after `LET_GO_S`; returns the status."""

    def hold(cluster: Cluster) -> Status:
        deadline = time.monotonic() + LET_GO_S
        with Client(cluster.zmq) as client:
            while wrong := _wrong(status := client.status(), client.leaks()):
                if time.monotonic() > deadline:
                    pytest.fail("; ".join(wrong))
                time.sleep(0.02)
        return status

    return hold


@pytest.fixture(scope="session")
def balanced() -> Callable[[Cluster], None]:
    """Hold that nothing is held for nobody while others run, at the latest after `LET_GO_S`."""

    def hold(cluster: Cluster) -> None:
        deadline = time.monotonic() + LET_GO_S
        with Client(cluster.zmq) as client:
            while any((leaks := client.leaks()).values()):
                assert time.monotonic() < deadline, leaks
                time.sleep(0.02)
            assert not _unbalanced(client.status())

    return hold


@pytest.fixture(scope="session")
def counted() -> Callable[[Status, str], int]:
    """Add up a counter of all engines: `counted(status, "preempted")`."""
    return lambda status, what: sum(actor[what] for actor in engines(status))


@pytest.fixture
def until() -> Callable[..., Any]:
    """Wait in a coroutine until the cluster's status is as wanted: `await until(client, condition)`; return it."""

    async def wait(client: AsyncClient, condition: Callable[[Status], object], timeout_s: float = 30.0) -> Status:
        deadline = time.monotonic() + timeout_s
        while not condition(status := await client.status()):
            assert time.monotonic() < deadline, status
        return status

    return wait


# ---- Asking --------


class Asked(Protocol):
    """One request: its tokens as they come, its end, and a way to leave it."""

    token_ids: list[int]
    ends: list[str]  # what ended it; exactly one event for whoever stays to hear it

    async def seen(self, index: int) -> None:
        """Wait for that token, or the end."""

    async def over(self) -> None:
        """Wait for the end."""

    async def leave(self) -> None:
        """Cancel it in this request's way."""


class _Asked:
    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.ends: list[str] = []
        self._changed = asyncio.Condition()

    async def _note(self, token_id: int | None, end: str | None) -> None:
        async with self._changed:
            self.token_ids += [] if token_id is None else [token_id]
            self.ends += [] if end is None else [end]
            self._changed.notify_all()

    async def seen(self, index: int) -> None:
        async with asyncio.timeout(30), self._changed:
            await self._changed.wait_for(lambda: len(self.token_ids) > index or self.ends)

    async def over(self) -> None:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self.ends)


class _Line(_Asked):
    """A request over a TCP connection of its own."""

    def __init__(self, writer: asyncio.StreamWriter, disconnects: bool) -> None:
        super().__init__()
        self._writer = writer
        self._disconnects = disconnects

    async def follow(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            event = json.loads(line)
            if event["event"] == "token":
                await self._note(event["token_id"], None)
            else:
                await self._note(None, event.get("finish_reason") or event["code"])

    async def leave(self) -> None:
        if self._disconnects:
            self._writer.close()
            await self._note(None, "left")
        else:
            self._writer.write(b'{"cancel": "it"}\n')


class _Stream(_Asked):
    """A request of the client library."""

    def __init__(self, client: AsyncClient, disconnects: bool, fields: dict[str, Any]) -> None:
        super().__init__()
        self._client = client
        self._disconnects = disconnects
        self._following = asyncio.create_task(self._follow(fields))

    async def _follow(self, fields: dict[str, Any]) -> None:
        try:
            async for event in self._client.events(**fields):
                if hasattr(event, "token_id"):
                    await self._note(event.token_id, None)
                else:
                    await self._note(None, event.finish_reason)
        except PDError as error:
            await self._note(None, error.code)

    async def leave(self) -> None:
        if self._disconnects:
            await self._client.close()
        self._following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._following
        if not self.ends:
            await self._note(None, "left")


class Ask(Protocol):
    """`async with ask(cluster, way, **fields) as asked`: what is not over by the end is cancelled."""

    def __call__(self, cluster: Cluster, way: str, **fields: Any) -> AbstractAsyncContextManager[Asked]: ...


@asynccontextmanager
async def asking(cluster: Cluster, way: str, **fields: Any) -> AsyncIterator[Asked]:
    over, how = way.split()
    asked: Asked
    async with AsyncExitStack() as stack:
        if over == "tcp":
            host, _, port = cluster.tcp.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(json.dumps({"id": "it", **fields}).encode() + b"\n")
            asked = line = _Line(writer, how == "disconnect")
            following = asyncio.create_task(line.follow(reader))
            stack.callback(following.cancel)
        else:
            client = await stack.enter_async_context(AsyncClient(cluster.zmq))
            asked = _Stream(client, how == "disconnect", fields)
            stack.push_async_callback(asked.leave)
        yield asked


@pytest.fixture(scope="session")
def ask() -> Ask:
    return asking


# ---- What is right --------


@pytest.fixture(scope="session")
def transformers_says() -> Callable[..., list[Expected]]:
    """Ask transformers, in float32 and a process of its own: `transformers_says(folder, prompts, max_tokens)`."""

    def say(folder: object, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Expected]:
        job = Job(str(folder), "float32", tuple(map(tuple, prompts)), max_tokens)
        answers = dict(reference.generate(job))
        return [answers[i] for i in range(len(prompts))]

    return say


# ---- The real model, in every mode --------

MODES: dict[str, dict[str, object]] = {
    "disaggregated, two decodes": {"node.0.decode": 2},
    "chunked": {"cluster.mode": "chunked"},
    "disaggregated": {},
    "colocated": {"cluster.mode": "colocated"},
    "kvstore": {"cluster.mode": "kvstore"},
}
SLOW_MODES = {"chunked", "disaggregated", "colocated", "kvstore"}


@pytest.fixture(
    scope="session",
    params=[pytest.param(mode, marks=[pytest.mark.slow] if mode in SLOW_MODES else []) for mode in MODES],
)
def real(request: pytest.FixtureRequest, start: Start, real_model: object) -> Iterator[Cluster]:
    """A cluster of each mode on the real model, in float32. Tests are grouped by it."""
    keys = {"model.path": real_model, "model.max_model_len": 4096, "kv.memory": "768MiB", **MODES[request.param]}
    with start(**keys) as cluster:
        yield cluster


# ---- A cluster that grows and shrinks --------


machines = pytest.fixture(ray_machines, scope="session", name="ray_machines")


@pytest.fixture(
    scope="session",
    params=[
        "disaggregated",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("kvstore", "disaggregated ray")),
    ],
)
def growing(request: pytest.FixtureRequest, start: Start) -> Iterator[Cluster]:
    """One prefill and one decode of the tiny model to begin with, and at the end of each test."""
    mode, _, launcher = request.param.partition(" ")
    if launcher:
        request.getfixturevalue("ray_machines")
    keys = {"cluster.mode": mode, "cluster.launcher": launcher or "local", "engine.chunk_tokens": 128}
    with start(**keys) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def names_of() -> Callable[[Status], dict[str, int]]:
    """The incarnation of each ready engine, by name."""
    return lambda status: {a["name"]: a["incarnation"] for a in engines(status) if a["state"] == "ready"}
