"""Any actor dies, or falls silent, while requests are in every stage: each client gets what it would get alone."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import msgspec
import psutil
import pytest

from pdactors import AsyncClient, Client, Cluster, PDError
from pdactors.bench.mischief import cut
from pdactors.client_messages import DoneEvent, TokenEvent

pytestmark = pytest.mark.slow

MakeIds = Callable[[object, int], list[int]]
Asks = list[dict[str, Any]]
Deed = Callable[[int], Awaitable[None]]  # to a process
QUICK = {"router.heartbeat_ms": 200, "router.dead_after_ms": 1500}
SMALL = {"engine.chunk_tokens": 16, "engine.max_batch": 4, "node.0.decode": 2}  # so that there are queues, and chunks
ROLES = ("decode", "prefill", "migrator", "router", "gateway")
WHOLE_S = 60.0  # a busy machine takes long to start a process
END_S = 60.0
NUM_ANSWERS = 8  # as many as there is room for
CHUNKS_S = 0.1  # after which some prompts are half computed
ENDS = {"worker_lost", "connection"}  # how a request may end that loses its router or gateway


@pytest.fixture(scope="module")
def cluster(request: pytest.FixtureRequest, start: Any) -> Iterator[Cluster]:
    """One prefill, two decodes; KV is read in place, or moved by a migrator even inside the node."""
    if request.param == "ucx":
        pytest.importorskip("ucxx", reason="transfers need ucxx: pip install 'pdactors[ucx]'")
    with start(**QUICK, **SMALL, **{"kv.transport": request.param}) as cluster:
        yield cluster


def questions(make_ids: MakeIds, case: object) -> Asks:
    """Long answers and long prompts, greedy and sampled; more than there is room for, and the prompts new."""
    answers: Asks = [
        {"prompt_token_ids": make_ids(("recovery", i), 40 + 9 * i), "max_tokens": 1500, "min_tokens": 1400}
        for i in range(NUM_ANSWERS)
    ]
    answers[1] |= {"temperature": 1.2, "seed": 7, "top_p": 0.9, "logprobs": 2}
    answers[2] |= {"temperature": 0.8, "top_k": 20}
    answers[3] |= {"stop": ["never said"]}
    prompts: Asks = [
        {"prompt_token_ids": make_ids((case, i), 1200 + 50 * i), "max_tokens": 20, "ignore_eos": True} for i in range(8)
    ]
    return [*answers, *prompts]


class Asked:
    """What came of a request."""

    def __init__(self) -> None:
        self.tokens: list[TokenEvent] = []
        self.end: DoneEvent | PDError | None = None

    @property
    def said(self) -> tuple[Any, ...]:
        """Everything that the client reads, but for times."""
        assert isinstance(self.end, DoneEvent), self.end
        return *self.heard, self.end.finish_reason, self.end.usage.prompt_tokens, self.end.usage.completion_tokens

    @property
    def heard(self) -> list[TokenEvent]:
        return [msgspec.structs.replace(token, id=None) for token in self.tokens]

    async def ask(self, client: AsyncClient, fields: dict[str, Any]) -> None:
        try:
            async for event in client.events(**fields):
                if isinstance(event, TokenEvent):
                    self.tokens.append(event)
                else:
                    self.end = event
        except PDError as error:
            self.end = error


@pytest.fixture(scope="module")
def alone(session_cluster: Cluster) -> Callable[[Asks], list[tuple[Any, ...]]]:
    """What each is answered where nothing else runs and nothing ever broke."""
    known: dict[str, tuple[Any, ...]] = {}

    async def ask(asks: Asks) -> list[tuple[Any, ...]]:
        async with AsyncClient(session_cluster.zmq) as client:
            for fields in asks:
                if str(fields) not in known:
                    asked = Asked()
                    await asked.ask(client, fields)
                    known[str(fields)] = asked.said
        return [known[str(fields)] for fields in asks]

    return lambda asks: asyncio.run(ask(asks))


def victim(status: dict[str, Any], role: str) -> int:
    """Return the process of that role, of several the one that does most."""
    actors = [actor for actor in status["actors"] if actor["role"] == role]
    return int(max(actors, key=lambda actor: actor["running"])["pid"])


def is_whole(client: Client) -> bool:
    try:
        status, leaks = client.status(), client.leaks()
    except PDError:
        return False
    states = [(actor["role"], actor["state"]) for actor in status["actors"]]
    return (
        sorted(states) == sorted((role, "ready") for role in (*ROLES, "decode"))
        and not status["requests"]
        and not any(leaks.values())
    )


async def _hurt(cluster: Cluster, asks: Asks, role: str, deed: Deed) -> tuple[list[Asked], int]:
    """Do it to an actor while answers fill the decodes, prompts are in the prefill's chunks, and others are queued."""
    found = [Asked() for _ in asks]
    async with asyncio.timeout(END_S), AsyncClient(cluster.zmq) as client, AsyncClient(cluster.zmq) as watch:
        async with asyncio.TaskGroup() as group:

            def ask(start: int, stop: int) -> None:
                for i in range(start, stop):
                    group.create_task(found[i].ask(client, asks[i]))

            ask(0, NUM_ANSWERS)
            while not all(asked.tokens[10:] for asked in found[:NUM_ANSWERS]):
                status = await watch.status()
            ask(NUM_ANSWERS, len(asks))
            await asyncio.sleep(CHUNKS_S)
            assert not any(asked.end for asked in found)
            pid = victim(status, role)
            await deed(pid)
    return found, pid


def sending(number: signal.Signals) -> Deed:
    async def send(pid: int) -> None:
        os.kill(pid, number)

    return send


async def cut_often(pid: int) -> None:
    """Drop the process's TCP connections again and again."""
    for _ in range(10):
        reason = await asyncio.to_thread(cut, psutil.Process(pid))
        if reason:
            pytest.skip(reason)
        await asyncio.sleep(0.2)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    ("cluster", "number"),
    [("lease", signal.SIGKILL), ("lease", signal.SIGSTOP), ("ucx", signal.SIGKILL)],
    ids=["lease-SIGKILL", "lease-SIGSTOP", "ucx-SIGKILL"],
    indirect=["cluster"],
)
def test_whoever_is_lost_each_answer_is_as_alone(
    cluster: Cluster,
    make_ids: MakeIds,
    alone: Any,
    wait: Any,
    role: str,
    number: signal.Signals,
) -> None:
    asks = questions(make_ids, (role, number))
    found, pid = asyncio.run(_hurt(cluster, asks, role, sending(number)))
    for asked, wanted in zip(found, alone(asks), strict=True):
        assert asked.heard == list(wanted[: len(asked.tokens)])
        if isinstance(asked.end, PDError) and role in ("router", "gateway"):
            assert asked.end.code in ENDS
        else:
            assert asked.said == wanted
    if role == "gateway":
        assert any(isinstance(asked.end, PDError) for asked in found)
    with Client(cluster.zmq) as client:
        wait(lambda: is_whole(client), WHOLE_S, lambda: f"not whole: {client.status()} {client.leaks()}")
        assert client.generate(**asks[0]).token_ids == tuple(event.token_id for event in alone(asks[:1])[0][:-3])
    assert not psutil.pid_exists(pid), "it was given up and not killed"


@pytest.mark.parametrize(
    ("cluster", "role"),
    [("lease", "decode"), ("lease", "prefill"), ("lease", "router"), ("ucx", "migrator")],
    indirect=["cluster"],
)
def test_broken_connections_cost_a_moment(
    cluster: Cluster, make_ids: MakeIds, alone: Any, wait: Any, role: str
) -> None:
    asks = questions(make_ids, (role, "cut"))
    found, pid = asyncio.run(_hurt(cluster, asks, role, cut_often))
    assert [asked.said for asked in found] == alone(asks)
    with Client(cluster.zmq) as client:
        wait(lambda: is_whole(client), WHOLE_S, lambda: f"not whole: {client.status()} {client.leaks()}")
    assert psutil.pid_exists(pid)
