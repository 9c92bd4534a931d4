"""A cluster that is offered more than it can do: what becomes of each request, and whether retry-after is right.

The rate is measured first, with as many requests in flight as there are places. Then they come at --times that rate.
Each has to end: with an answer, no later than everything before it in the queue takes at that rate, or refused at once
with a time. That time is right if the requests that wait in front have had their turn by then: `retry` is what was said
over what it took, by the answers that followed.

    .venv/bin/python benchmarks/overload.py [cluster.toml] [--mode disaggregated] [--times 4] [--seconds 30]
"""

from __future__ import annotations

import argparse
import asyncio
import bisect
import json
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdactors import AsyncClient, Overloaded, PDError, launch
from pdactors.bench.free_ports import free_ports
from pdactors.config.load import load

PROMPT_TOKENS, ANSWER_TOKENS = 64, 16
_random = random.Random(1)


@dataclass
class Ended:
    """One request: when it was sent and ended, "" or the code of its error, and when to come again."""

    sent_s: float
    ended_s: float
    code: str = ""
    retry_after_s: float | None = None


async def ask(client: AsyncClient) -> Ended:
    sent_s = time.monotonic()
    prompt = [_random.randrange(1000, 40_000) for _ in range(PROMPT_TOKENS)]
    try:
        await client.generate(prompt_token_ids=prompt, max_tokens=ANSWER_TOKENS, ignore_eos=True)
    except Overloaded as error:
        return Ended(sent_s, time.monotonic(), error.code, error.retry_after_s)
    except PDError as error:
        return Ended(sent_s, time.monotonic(), error.code)
    return Ended(sent_s, time.monotonic())


async def rate_of(client: AsyncClient, in_flight: int, seconds: float) -> float:
    """Return how many requests a second end when so many are always in flight."""
    until_s = time.monotonic() + seconds
    ends: list[Ended] = []

    async def work() -> None:
        while time.monotonic() < until_s:
            ends.append(await ask(client))

    await asyncio.gather(*(work() for _ in range(in_flight)))
    inside = [ended for ended in ends if ended.ended_s <= until_s and not ended.code]
    return len(inside) / seconds


async def offer(client: AsyncClient, rate: float, seconds: float) -> list[Ended]:
    """Send requests at a rate, Poisson, and wait for the end of each."""
    asking, at_s, began_s = [], 0.0, time.monotonic()
    while at_s < seconds:
        await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
        asking.append(asyncio.create_task(ask(client)))
        at_s += _random.expovariate(rate)
    return list(await asyncio.gather(*asking))


def retries(ends: list[Ended], waiting: int) -> list[float]:
    """Return how each retry-after compares with how long as many answers took as waited in front."""
    answered = sorted(ended.ended_s for ended in ends if not ended.code)
    found = []
    for ended in ends:
        turn = bisect.bisect(answered, ended.ended_s) + waiting - 1
        if ended.retry_after_s is not None and turn < len(answered):
            found.append(ended.retry_after_s / (answered[turn] - ended.ended_s))
    return sorted(found)


async def measure(address: str, places: int, options: argparse.Namespace) -> dict[str, Any]:
    async with AsyncClient(address) as client:
        await rate_of(client, 4, 2.0)
        rate = await rate_of(client, places, options.seconds)
        ends = await offer(client, options.times * rate, options.seconds)
        leaks, status = await client.leaks(), await client.status()
    took = sorted(ended.ended_s - ended.sent_s for ended in ends if not ended.code)
    refused = sorted(ended.ended_s - ended.sent_s for ended in ends if ended.code == "overloaded")
    ratios = retries(ends, options.max_queue)
    return {
        "capacity_s": round(rate, 2),
        "offered_s": round(options.times * rate, 2),
        "ends": Counter(ended.code or "answered" for ended in ends),
        "answered_s": {"p50": took[len(took) // 2], "max": took[-1]},
        "bound_s": (options.max_queue + places) / rate,
        "refused_after_s": {"p50": refused[len(refused) // 2], "max": refused[-1]} if refused else None,
        "retry": {share: ratios[int(share / 100 * (len(ratios) - 1))] for share in (0, 5, 50, 95, 100)}
        if ratios
        else None,
        "retries_measured": len(ratios),
        "left": {"requests": status["requests"], "leaks": leaks},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--mode", default="disaggregated")
    parser.add_argument("--times", type=float, default=4.0)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--max-queue", type=int, default=64)
    options = parser.parse_args()
    sets = [f"cluster.mode={options.mode}", f"router.max_queue={options.max_queue}"]
    config = load(options.file, sets=sets)
    engines = sum(sum(node.engines(config.cluster.mode).values()) for node in config.node)
    with launch(options.file, sets=[*sets, *free_ports(config)]) as cluster:
        found = asyncio.run(measure(cluster.zmq, engines * config.engine.max_batch, options))
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
