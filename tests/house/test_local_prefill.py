"""Conditional disaggregation: what is left of a prompt may be so little that its decode engine computes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from pdactors import AsyncClient, Client, Cluster

LOCAL = 64
MakeIds = Callable[[object, int], list[int]]
Counted = dict[str, int]


@pytest.fixture(scope="module", params=["disaggregated", pytest.param("kvstore", marks=pytest.mark.slow)])
def local(request: pytest.FixtureRequest, start: Callable[..., AbstractContextManager[Cluster]]) -> Iterator[Cluster]:
    with start(**{"cluster.mode": request.param, "router.local_prefill_tokens": LOCAL}) as cluster:
        yield cluster


def computed(status: dict[str, Any]) -> Counted:
    """Return how many prompt tokens each engine has computed."""
    return {actor["name"]: actor["prompt_tokens_computed"] for actor in status["actors"] if "step_ms" in actor}


async def test_short_and_long_prompts_together_get_the_tokens_that_they_get_alone_elsewhere(
    local: Cluster, cluster: Cluster, settled: Any, make_ids: MakeIds
) -> None:
    lengths = [1, 20, LOCAL, LOCAL + 1, 150, 400] * 4
    asks = [
        {"prompt_token_ids": make_ids(("local", i), length), "max_tokens": 24, "ignore_eos": True}
        for i, length in enumerate(lengths)
    ]
    async with AsyncClient(local.zmq) as ours, AsyncClient(cluster.zmq) as theirs:
        got = await asyncio.gather(*(ours.generate(**fields) for fields in asks))
        right = await asyncio.gather(*(theirs.generate(**fields) for fields in asks))
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in right]
    assert [answer.path == "none" for answer in got] == [length <= LOCAL for length in lengths]
    assert all(answer.timing.migration_ms == 0 for answer in got if answer.path == "none")
    settled(local)


def test_the_next_turn_of_a_conversation_stays_where_its_kv_is(local: Cluster, settled: Any, make_ids: MakeIds) -> None:
    ids = make_ids("talk", 300)
    with Client(local.zmq) as client:
        for turn in range(4):
            before = computed(settled(local))
            answer = client.generate(prompt_token_ids=ids, max_tokens=40, ignore_eos=True)
            after = computed(settled(local))
            did = {name for name, count in after.items() if count > before[name]}
            assert did == {"n0/prefill-0" if turn == 0 else "n0/decode-0"}
            assert (answer.path == "none") == (turn > 0)
            assert answer.usage.cached_tokens >= (len(ids) - 60 if turn else 0)
            ids = [*ids, *answer.token_ids, *make_ids(("talk", turn), 20)]
    settled(local)


async def test_a_client_that_leaves_costs_nothing(local: Cluster, settled: Any, make_ids: MakeIds) -> None:
    async with AsyncClient(local.zmq) as client:
        events = client.stream(prompt_token_ids=make_ids("leaves", 30), max_tokens=1500, ignore_eos=True)
        async for _ in events:
            break
        await events.aclose()
    settled(local)
