"""Tokens per second of 1 and of 16 streams through the whole system, beside the bare engine's at that batch.

    .venv/bin/python benchmarks/streams.py [--tokens 128] [--rounds 8]

Starts a cluster (1 prefill, 1 decode) on free ports. Streams over TCP and as many steps of an engine in this process,
on decode's core, take turns within seconds: the machine's speed drifts. The client keeps off that core, as gateway and
router do. The engine's context is the one that the streams have in the middle. Also says how old a token of one stream
is when the client has it.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import time
from typing import Any

from pdactors import launch
from pdactors.bench.engine import decode_step, time_ms
from pdactors.bench.free_ports import free_ports
from pdactors.config.load import load
from pdactors.engine import store
from pdactors.engine.load import load_model

PROMPT_TOKENS = 64


def read_streams(address: str, count: int, tokens: int) -> tuple[float, list[float]]:
    """Return tokens per second while all streams ran, and the tokens' ages in milliseconds."""
    host, port = address.rsplit(":", 1)
    times: dict[int, list[float]] = {i: [] for i in range(count)}
    ages = []
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as lines:
        for i in range(count):
            ids = [1000 + 7 * i + n for n in range(PROMPT_TOKENS)]
            request = {"id": i, "prompt_token_ids": ids, "max_tokens": tokens, "ignore_eos": True}
            connection.sendall(json.dumps(request).encode() + b"\n")
        ended = 0
        while ended < count:
            event: dict[str, Any] = json.loads(lines.readline())
            now = time.monotonic()
            if event["event"] == "token":
                times[event["id"]].append(now)
                ages.append((now - event["sampled_s"]) * 1000)
            else:
                assert event["event"] == "done", event
                ended += 1
    begin, end = max(stamps[1] for stamps in times.values()), min(stamps[-1] for stamps in times.values())
    inside = sum(begin < stamp <= end for stamps in times.values() for stamp in stamps)
    return inside / (end - begin), ages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    sets = ["engine.stamp_tokens=true", *free_ports(load(None))]
    found: dict[int, list[float]] = {1: [], 16: []}
    alone: dict[int, list[float]] = {1: [], 16: []}
    ages: list[float] = []
    with launch(sets=sets) as cluster:
        read_streams(cluster.tcp, 16, 16)
        model = load_model(store.resolve("smollm2-135m", fetch=True), "bfloat16", threads=1)
        cores = sorted(os.sched_getaffinity(0))[:2]  # prefill's and decode's
        for _ in range(options.rounds):
            for count in found:
                os.sched_setaffinity(0, cores[:-1] or cores)
                rate, age = read_streams(cluster.tcp, count, options.tokens)
                found[count].append(rate)
                ages += age if count == 1 else []
                os.sched_setaffinity(0, cores[-1:])
                step = decode_step(model, count, PROMPT_TOKENS + options.tokens // 2)
                step()
                alone[count].append(count * 1000 * options.tokens / sum(time_ms(step) for _ in range(options.tokens)))
    for count, rates in found.items():
        ratio = statistics.median(a / b for a, b in zip(rates, alone[count], strict=True))
        print(
            f"{count} streams: {statistics.median(rates):.1f} tokens/s, engine alone "
            f"{statistics.median(alone[count]):.1f}, ratio {ratio:.2f}"
        )
    print(f"engine to client, one stream: {statistics.median(ages):.3f} ms at the median")


if __name__ == "__main__":
    main()
