"""What CURVE costs: a message there and back, and a request and its tokens, with and without it, in turns.

    .venv/bin/python benchmarks/curve.py [--rounds 30] [--model smollm2-135m]

Messages go through the transport in one process, 300 bytes each, which is what a token's are. Requests go through the
client library to two clusters that run side by side, one with security.curve. Differences are those of neighbours.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pdactors import Client, launch
from pdactors.config.keys import CurveKeys, make_keys
from pdactors.transport import transport_for
from pdactors.transport.zmq import make_pair

MESSAGES = 1000
TOKENS = 64


async def round_trip_us(keys: CurveKeys | None) -> float:
    """Return microseconds for a message of 300 bytes there and back, one after the other."""
    server, client = transport_for("tcp://", keys), transport_for("tcp://", keys)
    arrived = asyncio.Event()
    listener = server.listen("tcp://127.0.0.1:0", lambda peer, frames: listener.send(peer, frames))
    channel = client.connect(listener.address, b"me", lambda _peer, _frames: arrived.set())
    payload = bytes(300)

    async def exchange() -> None:
        arrived.clear()
        channel.send([payload])
        await arrived.wait()

    await exchange()
    began = time.perf_counter()
    for _ in range(MESSAGES):
        await exchange()
    took = time.perf_counter() - began
    client.close()
    server.close()
    return took / MESSAGES * 1e6


def timed_ms(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def report(what: str, unit: str, plain: list[float], curve: list[float]) -> None:
    """Print medians, and the median of the pairs' differences with its interquartile range."""
    differences = [b - a for a, b in zip(plain, curve, strict=True)]
    low, middle, high = statistics.quantiles(differences, n=4)
    print(
        f"{what}: {statistics.median(plain):.3f} {unit} without, {statistics.median(curve):.3f} with CURVE; "
        f"difference {middle:+.3f} ({low:+.3f} to {high:+.3f}), {len(differences)} pairs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--model", default="smollm2-135m")
    options = parser.parse_args()
    public, secret = make_pair()
    trips: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(options.rounds):
        for has_curve in trips:
            keys = CurveKeys(secret, public) if has_curve else None
            trips[has_curve].append(asyncio.run(round_trip_us(keys)))
    report("message there and back", "us", trips[False], trips[True])

    with tempfile.TemporaryDirectory() as folder:
        make_keys(Path(folder), make_pair)
        sets = [f"listen.{name}=" for name in ("tcp", "http")]
        sets += ["listen.zmq=tcp://127.0.0.1:0", "kv.memory=256MiB", f"model.path={options.model}"]
        guarded = [*sets, "security.curve=true", f"security.key_dir={folder}"]
        with (
            launch(sets=sets) as plain,
            launch(sets=guarded) as curve,
            Client(plain.zmq) as one,
            Client(curve.zmq, key=curve.key) as two,
        ):
            for count, what in ((1, "request of 1 token"), (TOKENS, f"request of {TOKENS} tokens")):
                times: list[list[float]] = [[], []]
                for number in range(options.rounds + 1):
                    for found, client in zip(times, (one, two), strict=True):
                        prompt = [1000 + 31 * number + n for n in range(32)]
                        found.append(
                            timed_ms(
                                lambda client=client, prompt=prompt, count=count: client.generate(
                                    prompt_token_ids=prompt, max_tokens=count, ignore_eos=True
                                )
                            )
                        )
                report(what, "ms", times[0][1:], times[1][1:])


if __name__ == "__main__":
    main()
