"""When memory runs out, sequences are put off and computed again: slower, but with the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from pdactors import AsyncClient, BadRequest, Client, Cluster, PromptTooLong

LONGEST = 832  # tokens, 26 blocks
DEADLINE_S = 90.0
MODES = ("disaggregated", "chunked", *(pytest.param(mode, marks=pytest.mark.slow) for mode in ("colocated", "kvstore")))

MakeIds = Callable[[object, int], list[int]]
Requests = list[dict[str, Any]]
Answers = list[tuple[int, ...]]


@pytest.fixture(scope="module", params=MODES)
def tight(request: pytest.FixtureRequest, start: Callable[..., AbstractContextManager[Cluster]]) -> Iterator[Cluster]:
    """64 blocks for two engines, each of which is sure of 26, and so can have 38 at most."""
    keys = {"kv.memory": "1MiB", "model.max_model_len": LONGEST, "engine.chunk_tokens": 64}
    with start(**keys, **{"cluster.mode": request.param}) as cluster:
        yield cluster


async def _answers(cluster: Cluster, requests: Requests) -> Answers:
    async with asyncio.timeout(DEADLINE_S), AsyncClient(cluster.zmq) as client:
        answers = await asyncio.gather(*(client.generate(**fields) for fields in requests))
    return [answer.token_ids for answer in answers]


@pytest.fixture(scope="module")
def with_enough(session_cluster: Cluster) -> Callable[[Requests], Awaitable[Answers]]:
    """What requests are answered where there is memory for all of them; asked once."""
    known: dict[str, Answers] = {}

    async def answers(requests: Requests) -> Answers:
        name = repr(requests)
        if name not in known:
            known[name] = await _answers(session_cluster, requests)
        return known[name]

    return answers


def _requests(make_ids: MakeIds, count: int, prompt: int, answer: int) -> Requests:
    """Every other one is sampled, every third is not urgent, and every fourth has its beginning in common."""
    common = make_ids("common", min(48, prompt))
    requests: Requests = []
    for i in range(count):
        beginning = common if i % 4 == 0 else []
        requests.append(
            {
                "prompt_token_ids": [*beginning, *make_ids((count, i), prompt - len(beginning))],
                "max_tokens": answer,
                "ignore_eos": True,
                "temperature": 0.7 * (i % 2),
                "priority": "batch" if i % 3 == 0 else "interactive",
            }
        )
    return requests


async def test_eight_with_memory_for_three_are_answered_as_if_there_were_enough(
    with_enough: Any, tight: Cluster, settled: Any, counted: Any, make_ids: MakeIds
) -> None:
    requests = _requests(make_ids, 8, 64, 400)  # 15 blocks each
    wanted = await with_enough(requests)
    before = counted(settled(tight), "preempted")
    assert await _answers(tight, requests) == wanted
    assert counted(settled(tight), "preempted") > before


async def test_sixteen_with_memory_for_one_and_a_half_do_not_block_each_other(
    with_enough: Any, tight: Cluster, settled: Any, make_ids: MakeIds
) -> None:
    requests = _requests(make_ids, 16, 700, 120)  # 26 blocks each
    wanted = await with_enough(requests)
    assert await _answers(tight, requests) == wanted
    settled(tight)


async def test_long_prompts_and_long_answers_together(
    with_enough: Any, tight: Cluster, settled: Any, make_ids: MakeIds
) -> None:
    """Prompts that need nearly all of the memory wait for answers that need nearly all of it, and the other way."""
    prompts = _requests(make_ids, 3, 800, 4)
    answers = _requests(make_ids, 3, 10, 600)
    requests = [fields for pair in zip(prompts, answers, strict=True) for fields in pair]
    wanted = await with_enough(requests)
    assert await _answers(tight, requests) == wanted
    settled(tight)


async def test_half_of_them_leave_while_memory_is_short(
    with_enough: Any, tight: Cluster, ask: Any, settled: Any, make_ids: MakeIds
) -> None:
    stay, leave = _requests(make_ids, 5, 64, 300), _requests(make_ids, 9, 100, 500)
    wanted = await with_enough(stay)

    async def left(which: int, fields: dict[str, Any]) -> None:
        async with ask(tight, ("tcp cancel", "zmq disconnect")[which % 2], **fields) as asked:
            await asked.seen(5 * which)
            await asked.leave()
            await asked.over()

    answers, *_ = await asyncio.gather(_answers(tight, stay), *(left(*item) for item in enumerate(leave)))
    assert answers == wanted
    settled(tight)


def test_what_can_never_fit_is_refused_at_once(tight: Cluster, settled: Any) -> None:
    with Client(tight.zmq) as client, pytest.raises(PromptTooLong, match="max_model_len"):
        client.generate(prompt_token_ids=[300] * LONGEST)
    settled(tight)


def test_another_engine_that_would_starve_the_others_is_refused(tight: Cluster, settled: Any) -> None:
    role = "worker" if "worker" in {actor["role"] for actor in settled(tight)["actors"]} else "decode"
    with Client(tight.zmq) as client:
        with pytest.raises(BadRequest, match="has no room for another engine on n0: each is sure of 832 tokens"):
            client.scale("n0", role, 3)
        assert len(client.status()["actors"]) == 5
        assert client.generate("x", max_tokens=3).finish_reason == "length"
    settled(tight)
