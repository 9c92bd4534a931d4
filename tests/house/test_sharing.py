"""KV of what prompts have in common is computed once, whoever asks and whichever engine has it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest

from pdactors import AsyncClient, Client, Cluster
from pdactors.bench.prompts import make_prompts
from pdactors.text.tokenizer import Tokenizer

BLOCK = 32
COMMON = 1000  # tokens of a system prompt
NUM_TURNS = 6
TURN_TOKENS = 210
MakeIds = Callable[[object, int], list[int]]
Counted = Callable[[dict[str, Any], str], int]


@pytest.fixture(scope="module", params=["disaggregated", pytest.param("kvstore", marks=pytest.mark.slow)])
def two_decodes(
    request: pytest.FixtureRequest, start: Callable[..., AbstractContextManager[Cluster]]
) -> Iterator[Cluster]:
    with start(**{"cluster.mode": request.param, "node.0.decode": 2}) as cluster:
        yield cluster


async def _all_at_once(cluster: Cluster, prompts: list[list[int]]) -> list[Any]:
    async with AsyncClient(cluster.zmq) as client:
        asked = [client.generate(prompt_token_ids=ids, max_tokens=20, ignore_eos=True) for ids in prompts]
        return list(await asyncio.gather(*asked))


@pytest.mark.parametrize("common", [COMMON, BLOCK * 30, BLOCK - 1])
async def test_a_prefix_that_was_sent_once_is_cached_for_all_who_come_then(
    two_decodes: Cluster, settled: Any, counted: Counted, make_ids: MakeIds, common: int
) -> None:
    prefix = make_ids(("once", common), common)
    await _all_at_once(two_decodes, [[*prefix, *make_ids("first", 30)]])
    before = counted(settled(two_decodes), "prompt_tokens_computed")
    prompts = [[*prefix, *make_ids((common, i), 20 + i)] for i in range(7)]
    answers = await _all_at_once(two_decodes, prompts)
    assert min(answer.usage.cached_tokens for answer in answers) >= common // BLOCK * BLOCK - BLOCK
    sent = sum(map(len, prompts))
    computed = counted(settled(two_decodes), "prompt_tokens_computed") - before
    assert computed == sent - sum(answer.usage.cached_tokens for answer in answers)
    alone = [answer.token_ids for (answer,) in [await _all_at_once(two_decodes, [ids]) for ids in prompts]]
    assert [answer.token_ids for answer in answers] == alone


async def test_eight_at_once_from_cold_compute_their_prefix_once(
    two_decodes: Cluster, settled: Any, counted: Counted, make_ids: MakeIds
) -> None:
    before = counted(settled(two_decodes), "prompt_tokens_computed")
    prefix = make_ids("cold", COMMON)
    prompts = [[*prefix, *make_ids(("cold", i), 20 + i)] for i in range(8)]
    answers = await _all_at_once(two_decodes, prompts)
    computed = counted(settled(two_decodes), "prompt_tokens_computed") - before
    assert COMMON <= computed <= COMMON + sum(len(ids) - COMMON + BLOCK for ids in prompts)
    assert all(len(answer.token_ids) == 20 for answer in answers)


async def test_what_decode_generated_is_reused_by_prefill_and_the_other_way_round(
    two_decodes: Cluster, settled: Any, make_ids: MakeIds
) -> None:
    """The answer's KV lies with one of the decode engines; the next prompt contains it."""
    prompt = make_ids("both ways", 100)
    for _ in range(4):
        async with AsyncClient(two_decodes.zmq) as client:
            answer = await client.generate(prompt_token_ids=prompt, max_tokens=100, ignore_eos=True)
        prompt = [*prompt, *answer.token_ids]
        settled(two_decodes)
    (answer,) = await _all_at_once(two_decodes, [[*prompt, 300]])
    assert answer.usage.cached_tokens >= len(prompt) - 1 - BLOCK


async def test_generated_kv_is_not_kept_where_that_is_not_wanted(
    two_decodes: Cluster, settled: Any, make_ids: MakeIds
) -> None:
    prompt = make_ids("not kept", 100)
    async with AsyncClient(two_decodes.zmq) as client:
        answer = await client.generate(prompt_token_ids=prompt, max_tokens=100, ignore_eos=True, save_final_kv=False)
        settled(two_decodes)
        again = await client.generate(prompt_token_ids=[*prompt, *answer.token_ids, 300], max_tokens=1)
    assert again.usage.cached_tokens <= len(prompt)


# ---- Conversations --------


@pytest.mark.parametrize("length", [200, 215, 223, 247])
async def test_the_next_turn_finds_the_end_of_a_block_too(
    two_decodes: Cluster, settled: Any, make_ids: MakeIds, length: int
) -> None:
    """Wherever in a block a turn of 200 tokens ends, at least 0.9 of it is found, and the answer is right."""
    prompt = make_ids(f"{length}", length - 8)
    async with AsyncClient(two_decodes.zmq) as client:
        first = await client.generate(prompt_token_ids=prompt, max_tokens=8, ignore_eos=True)
        settled(two_decodes)
        both = [*prompt, *first.token_ids, *make_ids("next", 50)]
        second = await client.generate(prompt_token_ids=both, max_tokens=8, ignore_eos=True)
        settled(two_decodes)
        again = await client.generate(prompt_token_ids=both, max_tokens=8, ignore_eos=True)
    assert second.usage.cached_tokens >= 0.9 * length
    assert again.token_ids == second.token_ids


@pytest.fixture(scope="module")
def turns(real_model: Any) -> list[str]:
    """What the user says: made-up English, TURN_TOKENS tokens and more each."""
    tokenizer = Tokenizer(real_model)
    prompts = make_prompts(tokenizer, 3 * NUM_TURNS, max_tokens=TURN_TOKENS, min_tokens=TURN_TOKENS, seed=5)
    return [tokenizer.decode(list(ids)) for ids in prompts[::3]]


def test_a_conversation_reuses_the_kv_of_its_earlier_turns(
    real: Cluster, turns: list[str], settled: Callable[[Cluster], Any]
) -> None:
    """From the second turn on at least 0.9 of what came before; an unseen beginning reuses next to nothing."""
    messages: list[dict[str, str]] = []
    num_before = 0
    with Client(real.zmq) as client:
        for text in turns:
            messages.append({"role": "user", "content": text})
            answer = client.generate(messages=messages, max_tokens=24)
            usage = answer.usage
            assert usage.prompt_tokens - num_before >= 200
            assert usage.cached_tokens >= 0.9 * num_before
            num_before = usage.prompt_tokens + usage.completion_tokens
            messages.append({"role": "assistant", "content": answer.text})
            settled(real)
        messages[0]["content"] = f"Well. {messages[0]['content']}"  # nobody has seen that beginning
        cold = client.generate(messages=messages[:-1], max_tokens=1)
    assert cold.usage.cached_tokens <= 64
    settled(real)
