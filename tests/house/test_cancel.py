"""A request can be left in every state, in every way: nothing of it stays, and nobody else notices."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any

import pytest

from pdactors import AsyncClient, Client, Cluster

WAYS = ("tcp cancel", "tcp disconnect", "zmq cancel", "zmq disconnect")
CHUNK = 8
PLACES = 4  # sequences that an engine takes
NUM_TOKENS = 120  # of a neighbour's answer
MAX_IN_FLIGHT = 16
LONG = 1000  # tokens of a prompt that takes 125 chunks
LONGER = 1900  # of one that is still computed when another has come and been seen to wait, on a busy machine too

Answers = list[tuple[int, ...]]
MakeIds = Callable[[object, int], list[int]]


@pytest.fixture(scope="module")
def crowded(start: Callable[..., AbstractContextManager[Cluster]]) -> Iterator[Cluster]:
    """Few places, small chunks, and memory for about four thousand tokens.

    Blocks of 16 tokens are not for our kernels: through transformers each state lasts long enough to be seen.
    """
    keys = {"engine.chunk_tokens": CHUNK, "engine.max_batch": PLACES, "kv.memory": "2MiB", "kv.block_tokens": 16}
    with start(**keys) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def neighbours(make_ids: MakeIds) -> list[dict[str, Any]]:
    """Requests that have nothing to do with the one that is cancelled."""
    return [
        {"prompt_token_ids": make_ids(i, 5 + 9 * i), "max_tokens": NUM_TOKENS, "ignore_eos": True} for i in range(8)
    ]


@pytest.fixture(scope="module")
def alone(crowded: Cluster, neighbours: list[dict[str, Any]]) -> Answers:
    """What the neighbours are answered when nobody else is there."""
    with Client(crowded.zmq) as client:
        return [client.generate(**fields).token_ids for fields in neighbours]


@pytest.fixture
def running(crowded: Cluster, neighbours: list[dict[str, Any]], alone: Answers) -> Any:
    """Have the first `count` neighbours run; at the end of the block their answers must be those they get alone."""

    @asynccontextmanager
    async def run(count: int) -> AsyncIterator[AsyncClient]:
        async with AsyncClient(crowded.zmq) as client, AsyncClient(crowded.zmq) as observer:
            answers = asyncio.gather(*(client.generate(**fields) for fields in neighbours[:count]))
            try:
                yield observer
                assert [answer.token_ids for answer in await answers] == alone[:count]
            finally:
                answers.cancel()

    return run


def actor(status: dict[str, Any], name: str) -> dict[str, Any]:
    (found,) = [actor for actor in status["actors"] if actor["name"] == name]
    return dict(found)


# ---- Every state --------


@pytest.mark.parametrize("way", WAYS)
async def test_in_the_routers_queue(
    crowded: Cluster, ask: Any, running: Any, until: Any, balanced: Any, settled: Any, way: str, make_ids: MakeIds
) -> None:
    """Four neighbours decode and four wait for it, so the router keeps what comes then."""
    async with running(2 * PLACES) as client:
        await until(client, lambda status: actor(status, "router")["waiting"] == PLACES)
        async with ask(crowded, way, prompt_token_ids=make_ids(way, 90)) as asked:
            await until(client, lambda status: actor(status, "router")["waiting"] > PLACES)
            assert not asked.token_ids
            await asked.leave()
            await asked.over()
        await asyncio.to_thread(balanced, crowded)
    settled(crowded)
    assert asked.ends in (["cancelled"], ["left"])


@pytest.mark.parametrize("way", WAYS)
async def test_handed_over_and_waiting_for_a_place_at_decode(
    crowded: Cluster, ask: Any, running: Any, until: Any, balanced: Any, settled: Any, way: str, make_ids: MakeIds
) -> None:
    """The prefill lends the KV to nobody yet."""
    async with running(PLACES) as client:
        await until(client, lambda status: actor(status, "n0/decode-0")["running"] == PLACES)
        async with ask(crowded, way, prompt_token_ids=make_ids(way, 90), max_tokens=500, ignore_eos=True) as asked:
            await asked.seen(0)
            status = await client.status()
            assert len(asked.token_ids) == 1
            assert actor(status, "n0/prefill-0")["kv_blocks"]["leased_out"] > 0
            await asked.leave()
            await asked.over()
        await asyncio.to_thread(balanced, crowded)
    settled(crowded)
    assert asked.ends in (["cancelled"], ["left"])


@pytest.mark.parametrize("leaver", ["who computes", "who waits"])
@pytest.mark.parametrize("way", WAYS)
async def test_queued_at_prefill_behind_a_prompt_with_the_same_beginning(
    crowded: Cluster, ask: Any, until: Any, settled: Any, way: str, leaver: str, make_ids: MakeIds
) -> None:
    """Whichever of the two leaves, the other one is answered as if it had been alone."""
    common = make_ids((way, leaver), LONGER)
    first = {"prompt_token_ids": [*common, 300], "max_tokens": 5, "ignore_eos": True}
    second = {"prompt_token_ids": [*common, 310], "max_tokens": 5, "ignore_eos": True}
    async with AsyncClient(crowded.zmq) as client, ask(crowded, way, **first) as computing:
        await until(client, lambda status: actor(status, "n0/prefill-0")["running"])
        async with ask(crowded, way, **second) as waiting:
            await until(client, lambda status: actor(status, "n0/prefill-0")["waiting"])
            left, other = (computing, waiting) if leaver == "who computes" else (waiting, computing)
            await left.leave()
            await left.over()
            await other.over()
        settled(crowded)
        assert (left.token_ids, len(other.token_ids), other.ends) == ([], 5, ["length"])
        again = await client.generate(**(second if other is waiting else first))
        assert list(again.token_ids) == other.token_ids
    settled(crowded)


@pytest.mark.parametrize("way", WAYS)
async def test_at_each_chunk_of_a_long_prompt(
    crowded: Cluster, ask: Any, running: Any, until: Any, balanced: Any, settled: Any, way: str, make_ids: MakeIds
) -> None:
    """The counter of computed tokens says where the prompt is; the chunks that are still to come are never computed."""

    def computed(status: dict[str, Any]) -> int:
        return int(actor(status, "n0/prefill-0")["prompt_tokens_computed"])

    num_early = 0
    async with running(2) as client:
        await until(client, lambda status: actor(status, "n0/decode-0")["running"] == 2)
        for chunk in (0, 1, 2, 3, 20, 60, 100):
            before = computed(await client.status())
            async with ask(
                crowded, way, prompt_token_ids=make_ids((way, chunk), LONG), max_tokens=400, ignore_eos=True
            ) as asked:
                if chunk:
                    reached = before + chunk * CHUNK
                    await until(client, lambda status, reached=reached: computed(status) >= reached)
                await asked.leave()
                await asked.over()
            await asyncio.to_thread(balanced, crowded)
            num_early += computed(await client.status()) - before < LONG
            assert asked.ends in (["cancelled"], ["left"])
    settled(crowded)
    assert num_early >= 4


@pytest.mark.parametrize("way", WAYS)
async def test_at_the_hand_over_and_at_each_of_the_first_decode_steps_and_at_the_last(
    crowded: Cluster, ask: Any, running: Any, balanced: Any, settled: Any, way: str, make_ids: MakeIds
) -> None:
    max_tokens = 12
    async with running(2):
        for index in (0, 1, 2, 3, max_tokens - 2, max_tokens - 1):
            prompt = make_ids((way, index, "decode"), 70)
            async with ask(crowded, way, prompt_token_ids=prompt, max_tokens=max_tokens, ignore_eos=True) as asked:
                await asked.seen(index)
                await asked.leave()
                await asked.over()
            await asyncio.to_thread(balanced, crowded)
            assert index < len(asked.token_ids) <= max_tokens
            assert len(asked.ends) == 1 or asked.ends == ["length", "left"]
    settled(crowded)


@pytest.mark.parametrize("way", WAYS)
async def test_after_the_end_and_twice(
    crowded: Cluster, ask: Any, running: Any, balanced: Any, settled: Any, way: str, make_ids: MakeIds
) -> None:
    async with running(2):
        async with ask(
            crowded, way, prompt_token_ids=make_ids((way, "end"), 40), max_tokens=4, ignore_eos=True
        ) as asked:
            await asked.over()
            await asked.leave()
        assert asked.ends[0] == "length"
        async with ask(
            crowded, way, prompt_token_ids=make_ids((way, "twice"), 40), max_tokens=900, ignore_eos=True
        ) as asked:
            await asked.seen(3)
            await asked.leave()
            await asked.leave()
            await asked.over()
        await asyncio.to_thread(balanced, crowded)
        assert asked.ends[0] in ("cancelled", "left")
        assert "cancelled" not in asked.ends[1:]
    settled(crowded)


def test_an_unknown_id(crowded: Cluster, dial: Any, settled: Callable[[Cluster], Any]) -> None:
    line = dial(crowded.tcp)
    line.send({"cancel": "nobody"})
    line.send({"cancel": 7})
    assert line.ask(prompt="the cat", max_tokens=3).end["finish_reason"] == "length"
    settled(crowded)


# ---- At random --------


@pytest.mark.timeout(600)
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.slow)])
async def test_at_random_moments_with_many_in_flight(
    crowded: Cluster, ask: Any, neighbours: list[dict[str, Any]], alone: Answers, settled: Any, make_ids: MakeIds,
    count: int,
) -> None:  # fmt: skip
    rng = random.Random(count)
    common = make_ids("common", 400)
    left = iter(range(count))
    is_over = asyncio.Event()

    def fields() -> dict[str, Any]:
        shared = rng.choice((0, 0, 33, 130, 400))
        prompt = common[:shared] + make_ids(rng.random(), rng.randint(1, 200))
        return {"prompt_token_ids": prompt, "max_tokens": rng.randint(1, 80), "ignore_eos": rng.random() < 0.8}

    async def cancel() -> None:
        for _ in left:
            async with ask(crowded, rng.choice(WAYS), **fields()) as asked:
                if rng.random() < 0.3:
                    await asked.seen(rng.randint(0, 20))
                else:
                    await asyncio.sleep(rng.choice((0.0, 0.005, 0.05, 0.3)) * rng.random())
                await asked.leave()
                await asked.over()
                assert set(asked.ends) <= {"cancelled", "left", "length", "stop"}

    async def stay(which: int) -> int:
        num_answers = 0
        async with AsyncClient(crowded.zmq) as client:
            while not is_over.is_set():
                answer = await client.generate(**neighbours[which])
                assert answer.token_ids == alone[which]
                num_answers += 1
        return num_answers

    staying = asyncio.gather(*(stay(which) for which in range(2)))
    try:
        await asyncio.gather(*(cancel() for _ in range(MAX_IN_FLIGHT - 2)))
        is_over.set()
        assert min(await staying) >= 1
    finally:
        staying.cancel()
    status = settled(crowded)
    assert all(found["state"] == "ready" for found in status["actors"])
    assert len(status["actors"]) == 5
