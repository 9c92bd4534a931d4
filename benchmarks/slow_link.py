"""KV over a slow link: what overlap hides, what codecs save, and what an interactive request waits behind a batch.

Two network namespaces with a link of --rate each way, prefill on one machine and decode on the other, the default model
in bfloat16. Needs root, and the tests' namespaces (tests/house/netns.py). Prints one JSON object:

* `overlap`: ms between the first and the second token of a prompt, with and without overlap.
* `codecs`, overlap off: bytes that the receiving interface counted, and ms from the first transfer's start to the last
  one's end by the sender's clock. `shortening` is how much of what the bytes promise is had:
  (1 - ms / ms of none) / (1 - bytes / bytes of none).
* `priority`: ms that an interactive request's KV takes on an idle link and behind --batch others, the bound (the idle
  time plus three transfers, plus half), and how many of the batch ended in the same time.

    .venv/bin/python benchmarks/slow_link.py [--rounds 5] [--parts overlap,codecs,priority]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests/house"))

from netns import Host, missing, namespaces  # noqa: E402 - the tests' own

from pdactors import AsyncClient, Client  # noqa: E402

TOKEN = "slow-link"
BATCH_TOKENS = 320  # ten blocks: one transfer
CODECS = ("none", "int8", "int4")
_random = random.Random(1)


def prompt(num_tokens: int) -> list[int]:
    """Return tokens that no prompt before has begun with."""
    return [_random.randrange(1000, 40_000) for _ in range(num_tokens)]


@contextmanager
def cluster(hosts: list[Host], **keys: object) -> Iterator[str]:
    """Run a prefill on the first machine and a decode on the second; gives the address for clients on the first."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        roles = ("prefill = 1\ndecode = 0", "prefill = 0\ndecode = 1")
        nodes = [f'[[node]]\nname = "n{i}"\nhost = "{hosts[i].address}"\n{roles[i]}\n' for i in range(2)]
        file = folder / "cluster.toml"
        file.write_text("\n".join(nodes))
        settings = {
            "router.control": f"tcp://{hosts[0].address}:7300",
            "listen.zmq": f"tcp://{hosts[0].address}:7301",
            "listen.tcp": "",
            "listen.http": "",
            "security.token": TOKEN,
            "security.join_token": TOKEN,
            "kv.transport": "ucx",
            **keys,
        }
        arguments = [str(file)]
        for key, value in settings.items():
            arguments += ["--set", f"{key}={str(value).lower() if isinstance(value, bool) else value}"]
        with (
            hosts[0].launch("n0", arguments, folder / "n0.json") as first,
            hosts[1].launch("n1", arguments, folder / "n1.json"),
        ):
            yield first.ready.zmq


def lane(timeline: dict[str, Any], actor: str) -> dict[str, Any]:
    return next(found for found in timeline["lanes"] if found["actor"] == actor)


def gap_ms(timeline: dict[str, Any]) -> float:
    """Return the time between the first two tokens."""
    written = lane(timeline, "gateway")["written_ms"]
    return float(written[1] - written[0])


def wire_ms(timeline: dict[str, Any]) -> float:
    """Return the time from the first transfer's start to the last one's arrival."""
    sends = [span for span in lane(timeline, "n0/migrator")["spans"] if span["what"] == "send"]
    return float(max(span["until_ms"] for span in sends) - min(span["at_ms"] for span in sends))


def ask(client: Client, num_tokens: int, **fields: object) -> dict[str, Any]:
    """Have a prompt answered by four tokens, and return its timeline."""
    answer = client.generate(prompt_token_ids=prompt(num_tokens), max_tokens=4, ignore_eos=True, **fields)
    assert answer.path == "ucx", answer.path
    return client.trace(answer.request)


def measure_overlap(hosts: list[Host], tokens: int, rounds: int) -> dict[str, Any]:
    """Measure the gap with and without overlap."""
    gaps: dict[str, list[float]] = {}
    for overlap in (True, False):
        with (
            cluster(hosts, **{"kv.overlap": overlap}) as address,
            hosts[0].entered(),
            Client(address, token=TOKEN) as client,
        ):
            ask(client, tokens)
            gaps["with" if overlap else "without"] = [gap_ms(ask(client, tokens)) for _ in range(rounds)]
    medians = {name: statistics.median(values) for name, values in gaps.items()}
    return {"gap_ms": gaps, "median_ms": medians, "ratio": medians["with"] / medians["without"]}


def measure_codecs(hosts: list[Host], tokens: int, rounds: int) -> dict[str, Any]:
    """Measure bytes and time on the wire by codec, and what `auto` takes."""
    found: dict[str, Any] = {}
    for codec in (*CODECS, "auto"):
        keys = {"kv.overlap": False, "kv.compression": codec}
        with cluster(hosts, **keys) as address, hosts[0].entered(), Client(address, token=TOKEN) as client:
            ask(client, tokens)
            times, sizes = [], []
            for _ in range(rounds):
                before = hosts[1].counters().received_bytes
                timeline = ask(client, tokens)
                sizes.append(hosts[1].counters().received_bytes - before)
                times.append(wire_ms(timeline))
            (used,) = {s["detail"]["codec"] for s in lane(timeline, "n0/migrator")["spans"] if s["what"] == "send"}
        found[codec] = {"used": used, "bytes": statistics.median(sizes), "ms": statistics.median(times), "all": times}
    plain = found["none"]
    for codec in CODECS[1:]:
        saved_time, saved = 1 - found[codec]["ms"] / plain["ms"], 1 - found[codec]["bytes"] / plain["bytes"]
        found[codec]["shortening"] = saved_time / saved
    return found


def measure_priority(hosts: list[Host], batch: int, rounds: int) -> dict[str, Any]:
    """Measure how long interactive KV takes to arrive, alone and behind a batch."""
    keys = {"kv.overlap": False, "kv.compression": "none", "kv.memory": "3GiB", "engine.max_batch": 2 * batch}
    with cluster(hosts, **keys) as address, hosts[0].entered():
        return asyncio.run(_measure_priority(address, batch, rounds))


async def _measure_priority(address: str, batch: int, rounds: int) -> dict[str, Any]:
    async with AsyncClient(address, token=TOKEN) as client:

        async def timed(priority: str) -> tuple[float, float]:
            asked = prompt(BATCH_TOKENS)
            answer = await client.generate(prompt_token_ids=asked, max_tokens=4, ignore_eos=True, priority=priority)
            timeline = await client.trace(answer.request)
            sends = [span for span in lane(timeline, "n0/migrator")["spans"] if span["what"] == "send"]
            return answer.timing.migration_ms, max(span["until_ms"] - span["at_ms"] for span in sends)

        await timed("interactive")
        alone = [await timed("interactive") for _ in range(rounds)]
        waiting = [asyncio.create_task(timed("batch")) for _ in range(batch)]
        under_way: list[int] = []
        while len(under_way) <= 10 or under_way[-1] > under_way[-10]:  # until as much is under way as will be
            await asyncio.sleep(1.0)
            under_way.append(await _num_moving(client))
        began, done = time.monotonic(), sum(task.done() for task in waiting)
        among, moving = [], []
        for _ in range(rounds):
            moving.append(await _num_moving(client))
            among.append(await timed("interactive"))
        seconds, ended = time.monotonic() - began, sum(task.done() for task in waiting) - done
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    transfer_ms = statistics.median(send for _, send in alone)
    idle_ms = statistics.median(ms for ms, _ in alone)
    return {
        "alone_ms": [ms for ms, _ in alone],
        "among_ms": [ms for ms, _ in among],
        "transfer_ms": transfer_ms,
        "bound_ms": 1.5 * (idle_ms + 3 * transfer_ms),
        "under_way": moving,
        "batch_ended": ended,
        "seconds": seconds,
    }


async def _num_moving(client: AsyncClient) -> int:
    status = await client.status()
    return next(len(actor["moves"]) for actor in status["actors"] if actor["name"] == "n0/migrator")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="1gbit", help="of the link, for overlap and codecs")
    parser.add_argument("--slow-rate", default="50mbit", help="of the link, for priorities: prompts are to come faster")
    parser.add_argument("--tokens", type=int, default=2000, help="of a prompt, for overlap and codecs")
    parser.add_argument("--batch", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--parts", default="overlap,codecs,priority")
    chosen = parser.parse_args()
    if why := missing():
        sys.exit(why)
    found: dict[str, Any] = {}
    parts = chosen.parts.split(",")
    if {"overlap", "codecs"} & {*parts}:
        with namespaces(2, rate=chosen.rate) as hosts:
            if "overlap" in parts:
                found["overlap"] = measure_overlap(hosts, chosen.tokens, chosen.rounds)
            if "codecs" in parts:
                found["codecs"] = measure_codecs(hosts, chosen.tokens, chosen.rounds)
    if "priority" in parts:
        with namespaces(2, rate=chosen.slow_rate) as hosts:
            found["priority"] = measure_priority(hosts, chosen.batch, chosen.rounds)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
