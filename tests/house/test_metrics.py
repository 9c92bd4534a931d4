"""`/metrics` under load: it parses, and counts what the clients counted."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from scrape import Scrape

from pdactors import AsyncClient, Client, Cluster, PDError

HISTOGRAMS = (
    "time_to_first_token inter_token_latency request_time_per_output_token e2e_request_latency "
    "request_queue_time request_prefill_time request_decode_time"
).split()
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
TOKEN_BYTES = 512  # of the tiny model's KV
COUNTERS = "prompt_tokens generation_tokens request_success prefix_cache_queries prefix_cache_hits".split()


@pytest.fixture(scope="module")
def fresh(start: Any) -> Iterator[Cluster]:
    """Nobody else asks this cluster anything."""
    with start() as cluster:
        yield cluster


async def test_counters_agree_exactly_with_the_clients_own_counts(
    fresh: Cluster, make_ids: Callable[[object, int], list[int]], settled: Any
) -> None:
    prompts = [make_ids(i % 5, 40 + i) for i in range(30)]  # some begin alike
    async with AsyncClient(fresh.zmq) as client:
        await client.generate("^", max_tokens=2)  # so that every series is there
        before = await asyncio.to_thread(Scrape, fresh)
        asking = asyncio.gather(
            *(client.generate(prompt_token_ids=p, max_tokens=1 + i, ignore_eos=True) for i, p in enumerate(prompts)),
            client.generate("~", max_tokens=9),
        )
        during = [await asyncio.to_thread(Scrape, fresh) for _ in range(3)]
        answers = await asking
        with pytest.raises(PDError):
            await client.generate(prompt_token_ids=[5] * 5000)
    settled(fresh)
    after = await asyncio.to_thread(Scrape, fresh)

    def grown(name: str, **labels: str) -> float:
        return after.sum(name, **labels) - before.sum(name, **labels)

    prompt_tokens = sum(answer.usage.prompt_tokens for answer in answers)
    generated = sum(answer.usage.completion_tokens for answer in answers)
    assert grown("vllm:prompt_tokens_total") == grown("vllm:prefix_cache_queries_total") == prompt_tokens
    assert grown("vllm:generation_tokens_total") == generated
    assert grown("vllm:prefix_cache_hits_total") == sum(answer.usage.cached_tokens for answer in answers)
    assert grown("vllm:request_success_total", finished_reason="length") == 30
    assert grown("vllm:request_success_total", finished_reason="stop") == 1
    assert grown("vllm:request_success_total", finished_reason="abort") == 0
    assert after.sum("pdactors:requests_failed_total", code="prompt_too_long") == 1
    assert grown("vllm:time_to_first_token_seconds_count") == grown("vllm:e2e_request_latency_seconds_count") == 31
    assert grown("vllm:inter_token_latency_seconds_count") == generated - 31
    total_s = sum(answer.timing.total_ms for answer in answers) / 1000
    assert grown("vllm:e2e_request_latency_seconds_sum") == pytest.approx(total_s)
    decode_s = grown("vllm:inter_token_latency_seconds_sum")
    assert grown("vllm:request_decode_time_seconds_sum") == pytest.approx(decode_s, rel=1e-3, abs=1e-3)
    handed = [answer for answer in answers if answer.path == "lease"]
    assert grown("pdactors:handover_seconds_count", path="lease", codec="none") == len(handed) > 25
    handed_bytes = TOKEN_BYTES * sum(answer.usage.prompt_tokens for answer in handed)
    assert grown("pdactors:handover_kv_bytes_total", path="lease", codec="none") == handed_bytes
    assert grown("pdactors:sampled_tokens_total") == generated
    assert grown("pdactors:sampled_tokens_total", role="prefill") == 31
    computed = sum(answer.usage.prompt_tokens - answer.usage.cached_tokens for answer in answers)
    assert grown("pdactors:prompt_tokens_computed_total", role="prefill") == computed
    for role in ("prefill", "decode"):
        assert grown("pdactors:step_seconds_sum", role=role) == pytest.approx(
            grown("pdactors:busy_seconds_total", role=role), abs=2e-3
        )
    assert after.sum("pdactors:retries_total") == after.sum("pdactors:leases_expired_total") == 0
    assert after.sum("pdactors:leases") == 0
    for earlier, later in zip([before, *during], [*during, after], strict=True):
        now = later.counters()
        assert {key: value for key, value in earlier.counters().items() if now[key] < value} == {}


def test_every_promised_name_is_there_with_its_kind_and_labels(fresh: Cluster) -> None:
    with Client(fresh.zmq) as client:
        client.generate("the cat", max_tokens=3)
    found = Scrape(fresh)
    for name in HISTOGRAMS:
        assert found.families[f"vllm:{name}_seconds"].type == "histogram"
    for name in GAUGES:
        assert found.families[f"vllm:{name}"].type == "gauge"
    for name in COUNTERS:
        assert found.families[f"vllm:{name}"].type == "counter"
    assert all(sample.labels.keys() >= {"model_name", "actor", "node", "role"} for sample in found.samples)
    assert all(math.isfinite(sample.value) for sample in found.samples)
    actors = {sample.labels["actor"] for sample in found.samples if sample.name == "pdactors:up"}
    assert actors == {"router", "gateway", "n0/migrator", "n0/prefill-0", "n0/decode-0"}
    assert found.sum("pdactors:up") == 5
    assert found.sum("pdactors:handover_seconds_count", path="lease", codec="none") >= 1


def test_gauges_are_what_status_says(fresh: Cluster, settled: Any) -> None:
    status, found = settled(fresh), Scrape(fresh)
    for actor in status["actors"]:
        if actor["role"] not in ("prefill", "decode"):
            continue
        blocks = actor["kv_blocks"]
        for state in ("free", "cached", "used", "leased_out", "leased_in"):
            assert found.sum("pdactors:kv_blocks", actor=actor["name"], state=state) == blocks[state]
        assert found.sum("vllm:kv_cache_usage_perc", actor=actor["name"]) == 0
        assert (
            found.sum("pdactors:prompt_tokens_computed_total", actor=actor["name"]) == actor["prompt_tokens_computed"]
        )
    assert found.sum("vllm:num_requests_running") == found.sum("vllm:num_requests_waiting") == 0


async def test_running_and_cancelled_requests_are_seen(fresh: Cluster, wait: Any, settled: Any) -> None:
    before = Scrape(fresh)
    async with AsyncClient(fresh.zmq) as client:
        asking = asyncio.create_task(client.generate("^", max_tokens=2000, ignore_eos=True))
        await asyncio.to_thread(wait, lambda: Scrape(fresh).sum("vllm:num_requests_running") == 1, 5.0, "none runs")
        asking.cancel()
    settled(fresh)
    after = Scrape(fresh)
    name, labels = "vllm:request_success_total", {"finished_reason": "abort"}
    assert after.sum(name, **labels) - before.sum(name, **labels) == 1


def test_many_scrapes_at_once_share_one_survey(fresh: Cluster) -> None:
    async def scrape_many() -> list[int]:
        async with httpx2.AsyncClient(timeout=10.0) as client:
            asked = [client.get(f"http://{fresh.http}/metrics") for _ in range(50)]
            return [response.status_code for response in await asyncio.gather(*asked)]

    assert asyncio.run(scrape_many()) == [200] * 50
