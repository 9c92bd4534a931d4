"""Mode kvstore: KV belongs to the store once it is published, and survives whoever computed it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from pdactors import AsyncClient, Client, Cluster, PDError

pytestmark = pytest.mark.slow
BLOCK = 32
MakeIds = Callable[[object, int], list[int]]


@pytest.fixture(scope="module")
def stored(start: Callable[..., AbstractContextManager[Cluster]]) -> Iterator[Cluster]:
    with start(**{"cluster.mode": "kvstore", "node.0.decode": 2, "engine.chunk_tokens": 128}) as cluster:
        yield cluster


async def _answers(cluster: Cluster, asks: list[dict[str, Any]]) -> list[Any]:
    async with AsyncClient(cluster.zmq) as client, asyncio.timeout(120):
        return list(await asyncio.gather(*(client.generate(**fields) for fields in asks)))


def _asks(make_ids: MakeIds, seed: str, sizes: list[int], max_tokens: int = 40) -> list[dict[str, Any]]:
    return [
        {"prompt_token_ids": make_ids((seed, i), size), "max_tokens": max_tokens, "ignore_eos": True}
        for i, size in enumerate(sizes)
    ]


def _tokens(answers: list[Any]) -> list[Any]:
    return [answer.token_ids for answer in answers]


def _blocks(cluster: Cluster, name: str) -> dict[str, int]:
    with Client(cluster.zmq) as client:
        return next(actor["kv_blocks"] for actor in client.status()["actors"] if actor["name"] == name)


def _pid(cluster: Cluster, name: str) -> int:
    with Client(cluster.zmq) as client:
        return next((actor["pid"] for actor in client.status()["actors"] if actor["name"] == name), 0)


def test_tokens_are_those_of_disaggregated_engines(
    stored: Cluster, cluster: Cluster, make_ids: MakeIds, settled: Any
) -> None:
    asks = _asks(make_ids, "same", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 100, 500, 1100])
    answers = asyncio.run(_answers(stored, asks))
    assert _tokens(answers) == _tokens(asyncio.run(_answers(cluster, asks)))
    assert {answer.path for answer in answers} == {"store"}
    settled(stored)


def test_what_was_computed_and_generated_is_the_stores_and_is_found_there(
    stored: Cluster, make_ids: MakeIds, settled: Any
) -> None:
    (ask,) = _asks(make_ids, "kept", [100], 100)
    before = _blocks(stored, "n0/migrator")["cached"]
    (answer,) = asyncio.run(_answers(stored, [ask]))
    settled(stored)
    assert _blocks(stored, "n0/migrator")["cached"] == before + 199 // BLOCK
    assert {_blocks(stored, name)["cached"] for name in ("n0/prefill-0", "n0/decode-0", "n0/decode-1")} == {0}
    ids = [*ask["prompt_token_ids"], *answer.token_ids]
    (again,) = asyncio.run(_answers(stored, [{"prompt_token_ids": ids, "max_tokens": 1}]))
    assert again.usage.cached_tokens == 199 // BLOCK * BLOCK
    settled(stored)


def test_several_decode_engines_share_one_copy_of_a_prefix(stored: Cluster, make_ids: MakeIds, settled: Any) -> None:
    prefix = make_ids("shared", 20 * BLOCK)
    asyncio.run(_answers(stored, [{"prompt_token_ids": [*prefix, 300], "max_tokens": 1}]))
    settled(stored)
    before = _blocks(stored, "n0/migrator")["cached"]
    asks = [{"prompt_token_ids": [*prefix, *make_ids(i, 9)], "max_tokens": 20, "ignore_eos": True} for i in range(8)]
    answers = asyncio.run(_answers(stored, asks))
    assert {answer.usage.cached_tokens for answer in answers} == {20 * BLOCK}
    settled(stored)
    assert _blocks(stored, "n0/migrator")["cached"] <= before + 2 * 8  # the ends of prompts and of answers


def test_kv_of_a_prefill_that_was_killed_is_used(stored: Cluster, make_ids: MakeIds, settled: Any, until: Any) -> None:
    """By the request in flight, without computing anything again, and by those that come later."""
    (ask,) = _asks(make_ids, "survives", [600], 400)

    async def scenario() -> tuple[Any, Any]:
        async with AsyncClient(stored.zmq) as client:
            (expected,) = await _answers(stored, [{**ask, "save_final_kv": False}])
            stream = client.stream(**ask)
            tokens = [await anext(stream) for _ in range(3)]  # decode goes on
            pid = _pid(stored, "n0/prefill-0")
            os.kill(pid, signal.SIGKILL)
            tokens += [token async for token in stream]
            assert tuple(token.token_id for token in tokens) == expected.token_ids
            await until(client, lambda _: _pid(stored, "n0/prefill-0") != pid)
            return await client.generate(**{**ask, "max_tokens": 1}), await client.status()

    later, status = asyncio.run(scenario())
    assert later.usage.cached_tokens == 599 // BLOCK * BLOCK
    computed = next(a["prompt_tokens_computed"] for a in status["actors"] if a["name"] == "n0/prefill-0")
    assert computed == 600 - later.usage.cached_tokens
    assert not [a for a in status["actors"] if a["role"] == "decode" and a["prompt_tokens_computed"]]
    settled(stored)


def test_a_store_that_was_killed_is_filled_again_and_loses_no_memory(
    stored: Cluster, make_ids: MakeIds, settled: Any, until: Any
) -> None:
    asks = _asks(make_ids, "lost", [300, 700, 1100, 1500, 50, 900], 60)

    async def answer(client: AsyncClient, fields: dict[str, Any]) -> Any:
        try:
            return (await client.generate(**fields)).token_ids
        except PDError as error:
            return error.code

    async def scenario() -> None:
        async with AsyncClient(stored.zmq) as client, asyncio.timeout(120):
            right = _tokens(await _answers(stored, asks))
            for wait_s in (0.0, 0.01, 0.05):
                pid = _pid(stored, "n0/migrator")
                asking = [asyncio.create_task(answer(client, fields)) for fields in asks]
                await asyncio.sleep(wait_s)
                os.kill(pid, signal.SIGKILL)
                got = await asyncio.gather(*asking)
                assert all(tokens in (wanted, "worker_lost") for tokens, wanted in zip(got, right, strict=True)), got
                await until(client, lambda _, pid=pid: _pid(stored, "n0/migrator") not in (pid, 0))
            assert [await answer(client, fields) for fields in asks] == right

    asyncio.run(scenario())
    status = settled(stored)
    assert sum(actor["kv_blocks"]["total"] for actor in status["actors"]) == 512
    assert _blocks(stored, "n0/migrator")["cached"] >= 4500 // BLOCK
