"""When memory runs out, sequences are put off and computed again: slower, but with the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from pdactors import AsyncClient, Client, Cluster

BLOCK_BYTES = 16384  # of the tiny model: 32 tokens, 2 layers, K and V, 2 heads of 16 floats
LONGEST = 512  # tokens, 16 blocks
DEADLINE_S = 60.0
MODES = {
    # prefill keeps a guaranteed 16 blocks, which leaves 24 for decode: three of 8 blocks, one and a half of 16
    "disaggregated": {"kv.memory": 40 * BLOCK_BYTES},
    "chunked": {"cluster.mode": "chunked", "node.0.workers": 1, "kv.memory": 24 * BLOCK_BYTES},
    "colocated": {"cluster.mode": "colocated", "node.0.workers": 1, "kv.memory": 24 * BLOCK_BYTES},
}

MakeIds = Callable[[object, int], list[int]]
Requests = list[dict[str, Any]]


@pytest.fixture(scope="module", params=MODES)
def tight(request: pytest.FixtureRequest, start: Callable[..., AbstractContextManager[Cluster]]) -> Iterator[Cluster]:
    with start(**MODES[request.param], **{"model.max_model_len": LONGEST, "engine.chunk_tokens": 64}) as cluster:
        yield cluster


async def _answers(cluster: Cluster, requests: Requests) -> list[tuple[int, ...]]:
    async with asyncio.timeout(DEADLINE_S), AsyncClient(cluster.zmq) as client:
        answers = await asyncio.gather(*(client.generate(**fields) for fields in requests))
    return [answer.token_ids for answer in answers]


def _requests(make_ids: MakeIds, count: int, prompt: int, answer: int, *, common: int = 0) -> Requests:
    beginning = make_ids("common", common)
    return [
        {
            "prompt_token_ids": [*beginning, *make_ids((count, i), prompt - common)],
            "max_tokens": answer,
            "ignore_eos": True,
            "temperature": 0.7 * (i % 2),
            "priority": "batch" if i % 3 == 0 else "interactive",
        }
        for i in range(count)
    ]


@pytest.mark.parametrize("common", [0, 48])
async def test_eight_with_memory_for_three_are_answered_as_if_there_were_enough(
    cluster: Cluster, tight: Cluster, settled: Any, counted: Any, make_ids: MakeIds, common: int
) -> None:
    requests = _requests(make_ids, 8, 64, 192, common=common)
    wanted = await _answers(cluster, requests)
    before = counted(settled(tight), "preempted")
    assert await _answers(tight, requests) == wanted
    assert counted(settled(tight), "preempted") > before


async def test_sixteen_with_memory_for_one_and_a_half_do_not_block_each_other(
    cluster: Cluster, tight: Cluster, settled: Any, make_ids: MakeIds
) -> None:
    requests = _requests(make_ids, 16, 300, 212)
    wanted = await _answers(cluster, requests)
    assert await _answers(tight, requests) == wanted
    settled(tight)


async def test_long_prompts_and_long_answers_together(
    cluster: Cluster, tight: Cluster, settled: Any, make_ids: MakeIds
) -> None:
    """Prompts that need nearly all of the memory wait for answers that need nearly all of it, and the other way."""
    prompts = _requests(make_ids, 6, 500, 4)
    answers = _requests(make_ids, 7, 10, 490)
    requests = [fields for pair in zip(prompts, answers, strict=False) for fields in pair]
    wanted = await _answers(cluster, requests)
    assert await _answers(tight, requests) == wanted
    settled(tight)


async def test_half_of_them_leave_while_memory_is_short(
    cluster: Cluster, tight: Cluster, ask: Any, settled: Any, make_ids: MakeIds
) -> None:
    stay, leave = _requests(make_ids, 5, 64, 192), _requests(make_ids, 9, 100, 300)
    wanted = await _answers(cluster, stay)

    async def left(which: int, fields: dict[str, Any]) -> None:
        async with ask(tight, ("tcp cancel", "zmq disconnect")[which % 2], **fields) as asked:
            await asked.seen(5 * which)
            await asked.leave()
            await asked.over()

    answers, *_ = await asyncio.gather(_answers(tight, stay), *(left(*item) for item in enumerate(leave)))
    assert answers == wanted
    settled(tight)


def test_what_can_never_fit_is_refused_at_once(tight: Cluster, settled: Any) -> None:
    with Client(tight.zmq) as client, pytest.raises(Exception, match="max_model_len"):
        client.generate(prompt_token_ids=[300] * LONGEST)
    settled(tight)
