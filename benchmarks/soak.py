"""A long run at a steady load: what each actor's memory, descriptors and threads do, and whether answers stay the same.

    .venv/bin/python benchmarks/soak.py [--minutes 30] [--rate 4] [--set model.path=FOLDER --set KEY=VALUE ...]

Requests of random lengths arrive at random moments; many begin alike, some are seeded, some are cancelled half-way. The
first third is for warming up: then an actor's resident memory may grow by 2%, and nothing else may. Exits 1 otherwise,
or when an answer differs from the first that its prompt got, or when something is left held.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import psutil

from pdactors import AsyncClient, launch
from pdactors.bench.free_ports import free_ports
from pdactors.config.load import load
from pdactors.errors import Overloaded

LOOK_S = 5.0
MAX_GROWTH = 0.02
WINDOW = 0.1  # of the run: what is compared are medians over so long
PROMPTS = 200
MAX_IN_FLIGHT = 32
Sample = tuple[float, int, int, int]  # when, resident bytes, descriptors, threads


@dataclass
class Work:
    """What is asked, and what came of it."""

    random: random.Random
    answers: dict[int, tuple[int, ...]] = field(default_factory=dict)
    done: int = 0
    cancelled: int = 0
    refused: int = 0
    wrong: int = 0

    def request(self, number: int) -> dict[str, Any]:
        """Return a request that is always the same for its number."""
        made = random.Random(number)
        begin = [20 + (number % 7) * 3 + i % 11 for i in range(64)]
        ids = begin + [made.randrange(20, 250) for _ in range(made.randrange(4, 200))]
        sampling = {"temperature": 0.8, "seed": number} if number % 3 == 0 else {}
        return {"prompt_token_ids": ids, "max_tokens": made.randrange(8, 96), "ignore_eos": True, **sampling}

    async def ask(self, client: AsyncClient) -> None:
        """Ask for one answer, and leave one of five half-way."""
        number = self.random.randrange(PROMPTS)
        fields = self.request(number)
        leaves_after = fields["max_tokens"] // 2 if self.random.random() < 0.2 else None
        tokens: list[int] = []
        try:
            async for event in client.stream(**fields):
                tokens.append(event.token_id)
                if len(tokens) == leaves_after:
                    self.cancelled += 1
                    return
        except Overloaded:
            self.refused += 1
            return
        self.done += 1
        self.wrong += self.answers.setdefault(number, tuple(tokens)) != tuple(tokens)


async def run(address: str, minutes: float, rate: float) -> tuple[Work, dict[str, list[Sample]], dict[str, Any]]:
    """Put the load on; return it, the samples of each actor, and what was left held."""
    found: dict[str, list[Sample]] = defaultdict(list)
    chance = random.Random(1)
    work = Work(chance)
    began = time.monotonic()
    async with AsyncClient(address) as client:
        processes = {a["name"]: psutil.Process(a["pid"]) for a in (await client.status())["actors"]}

        async def look() -> None:
            while True:
                for name, process in processes.items():
                    with process.oneshot():
                        now = time.monotonic() - began
                        found[name].append((now, process.memory_info().rss, process.num_fds(), process.num_threads()))
                await asyncio.sleep(LOOK_S)

        looking = asyncio.create_task(look())
        asking: set[asyncio.Task[None]] = set()
        while time.monotonic() < began + 60 * minutes:
            if len(asking) < MAX_IN_FLIGHT:
                asking.add(asyncio.create_task(work.ask(client)))
            await asyncio.sleep(chance.expovariate(rate))
            for task in [task for task in asking if task.done()]:
                asking.discard(task)
                task.result()
        await asyncio.gather(*asking)
        looking.cancel()
        await asyncio.sleep(2.0)
        return work, found, await client.leaks()


def judge(name: str, samples: list[Sample], seconds: float) -> bool:
    """Print how an actor did; False if it grew."""
    window = seconds * WINDOW
    early = [s for s in samples if seconds / 3 <= s[0] < seconds / 3 + window]
    late = [s for s in samples if s[0] >= seconds - window]
    before, after = (statistics.median(s[1] for s in part) for part in (early, late))
    growth = after / before - 1
    fds, threads = (max(s[i] for s in late) - max(s[i] for s in early) for i in (2, 3))
    sizes = f"{before / 2**20:8.1f} -> {after / 2**20:8.1f} MiB {growth:+7.2%}"
    print(f"{name:16} {sizes}  fds {fds:+d}  threads {threads:+d}")
    return growth < MAX_GROWTH and fds <= 0 and threads <= 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="of the cluster, as for launch")
    options = parser.parse_args()
    with launch(sets=[*free_ports(load(None)), *options.set]) as cluster:
        work, samples, held = asyncio.run(run(cluster.zmq, options.minutes, options.rate))
    is_flat = [judge(name, seen, 60 * options.minutes) for name, seen in samples.items()]
    print(f"{work.done} answers, {work.wrong} wrong, {work.cancelled} cancelled, {work.refused} refused; held: {held}")
    if not all(is_flat) or work.wrong or any(held.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
