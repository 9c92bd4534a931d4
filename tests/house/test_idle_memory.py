"""Prefix caches have what memory nobody needs, and only as long as nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from pdactors import AsyncClient, Cluster

pytestmark = pytest.mark.slow

BLOCK = 32
NUM_BLOCKS = 256  # in extents of 8; a sixteenth is left free
LONGEST = 832  # tokens: each engine is sure of 32 blocks
PROMPT = 8 * BLOCK + 5
MakeIds = Callable[[object, int], list[int]]


@pytest.fixture(scope="module")
def roomy(start: Callable[..., AbstractContextManager[Cluster]]) -> Iterator[Cluster]:
    with start(**{"kv.memory": "4MiB", "model.max_model_len": LONGEST}) as cluster:
        yield cluster


def _total(status: dict[str, Any], role: str) -> int:
    (blocks,) = [actor["kv_blocks"] for actor in status["actors"] if actor["role"] == role]
    return int(blocks["total"])


async def _in_turn(cluster: Cluster, prompts: list[list[int]]) -> list[Any]:
    async with AsyncClient(cluster.zmq) as client:
        return [await client.generate(prompt_token_ids=ids, max_tokens=4, ignore_eos=True) for ids in prompts]


async def test_prompts_stay_cached_while_memory_lies_idle_and_answers_get_it_back(
    roomy: Cluster, session_cluster: Cluster, settled: Any, make_ids: MakeIds
) -> None:
    """Of prompts that come one by one an engine needs room for one, and keeps all; then others need nearly all."""
    prompts = [make_ids(("idle", i), PROMPT) for i in range(16)]  # 128 full blocks
    first = await _in_turn(roomy, prompts)
    again = await _in_turn(roomy, prompts)
    assert [answer.usage.cached_tokens for answer in again] == [PROMPT // BLOCK * BLOCK] * len(prompts)
    assert [answer.token_ids for answer in again] == [answer.token_ids for answer in first]
    cached = _total(settled(roomy), "prefill")
    assert cached >= 16 * (PROMPT // BLOCK)

    async def at_once(cluster: Cluster) -> list[Any]:
        asked = [{"prompt_token_ids": make_ids(("long", i), 10), "max_tokens": LONGEST - 32} for i in range(8)]
        async with asyncio.timeout(120), AsyncClient(cluster.zmq) as client:
            answers = await asyncio.gather(*(client.generate(**fields, ignore_eos=True) for fields in asked))
        return [answer.token_ids for answer in answers]

    assert await at_once(roomy) == await at_once(session_cluster)  # 8 times 26 blocks
    status = settled(roomy)
    assert _total(status, "decode") >= 8 * 25
    assert _total(status, "prefill") < cached
