"""Attacks on the client sockets of a running cluster. Longer by hand:

ATTACK_S=300 pytest -m slow tests/house/test_attack.py
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
from zmtp import GREETING, Zmtp, frame_of

from pdactors import Client, Cluster
from pdactors.client_messages import ClientHello
from pdactors.messages import PROTOCOL_VERSION, Heartbeat, Release, encode

ATTACK_S = float(os.environ.get("ATTACK_S", "60"))
NEIGHBOUR_S = 30.0  # for a short answer, on a machine that has other work
ASK = {"prompt": "the cat sat", "max_tokens": 40, "ignore_eos": True}
FOREIGN = [encode(message)[0] for message in (Heartbeat("ready"), Release("r", 1), ClientHello(PROTOCOL_VERSION, "x"))]
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=2.0)


def say(address: str, *pieces: bytes, pause_s: float = 0.0) -> None:
    """Send, read a little of what comes, leave."""
    with connect(address) as connection:
        for piece in pieces:
            connection.sendall(piece)
            time.sleep(pause_s)
        connection.settimeout(0.05)
        connection.recv(1 << 16)


def deep(rng: random.Random) -> bytes:
    opening = rng.choice([b"[", b'{"a":', b'{"messages":[{"role":', b'[{"x":['])
    return rng.choice([b"", b'{"prompt":', b'{"id":']) + opening * rng.randrange(1, 100_000)


def request(rng: random.Random) -> bytes:
    """A right request, damaged."""
    text = bytearray(json.dumps({"id": rng.randrange(9), "prompt": "x" * rng.randrange(50), "max_tokens": 3}).encode())
    for _ in range(rng.randrange(4)):
        text[rng.randrange(len(text))] = rng.randrange(256)
    return bytes(text[: rng.randrange(len(text)) + 1])


def tcp(address: str, rng: random.Random) -> None:
    rng.choice(
        [
            lambda: say(address, rng.randbytes(rng.randrange(1, 5000)) + b"\n"),
            lambda: say(address, b"\n" * rng.randrange(1, 1 << 20)),
            lambda: say(address, deep(rng) + b"\n"),
            lambda: say(address, request(rng) + b"\n", request(rng)),
            lambda: say(address, b'{"prompt": "' + b"x" * rng.randrange(1, 3 << 20)),
            lambda: say(address, *[b"{"] * 10, pause_s=0.02),
            lambda: say(address, b'{"prompt": "x", "max_tokens": 500, "ignore_eos": true}\n' * 20),  # and leaves
        ]
    )()


def http(address: str, rng: random.Random) -> None:
    body = rng.choice([deep, request])(rng)
    rng.choice(
        [
            lambda: say(address, rng.randbytes(rng.randrange(1, 5000))),
            lambda: say(address, HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body),
            lambda: say(address, HEAD + b"Content-Length: 1073741824\r\n\r\n" + b"x" * rng.randrange(1 << 20)),
            lambda: say(address, HEAD + b"Transfer-Encoding: chunked\r\n\r\n40000000\r\n" + b"[" * 100_000),
            lambda: say(address, HEAD + b"X: " + b"y" * rng.randrange(1 << 17)),
            lambda: say(address, *[b"G"] * 10, pause_s=0.02),
            lambda: say(address, b"GET /%s HTTP/1.1\r\nHost: x\r\n\r\n" % rng.randbytes(9).hex().encode() * 50),
        ]
    )()


def zmq(address: str, rng: random.Random) -> None:
    peer = Zmtp(address, handshake=rng.random() < 0.8, timeout_s=2.0)
    with contextlib.closing(peer):
        rng.choice(
            [
                lambda: peer.socket.sendall(rng.randbytes(rng.randrange(1, 5000))),
                lambda: peer.socket.sendall(GREETING[: rng.randrange(1, 64)]),
                lambda: peer.send(*FOREIGN),
                lambda: [peer.send(frame) for frame in FOREIGN],
                lambda: peer.send(rng.randbytes(rng.randrange(1 << 16))),
                lambda: peer.send(*[b""] * rng.randrange(1, 2000)),
                lambda: peer.socket.sendall(b"\2" + (1 << 30).to_bytes(8, "big") + b"x" * rng.randrange(1 << 20)),
                lambda: peer.socket.sendall(frame_of(b"x" * 500_000, more=True) * 40),
                lambda: peer.socket.sendall(frame_of(FOREIGN[2])[: rng.randrange(5)]),
            ]
        )()


@pytest.fixture(scope="module")
def attacked(start: Any) -> Iterator[Cluster]:
    with start(**{"kv.memory": "16MiB", "engine.max_batch": 8}) as cluster:
        yield cluster


def attack(cluster: Cluster, seconds: float, seed: int) -> int:
    """Let six attackers do what they can for a while; returns how often they tried."""
    until = time.monotonic() + seconds
    counts = [0] * 6
    ways: list[tuple[Callable[[str, random.Random], None], str]] = [
        (tcp, cluster.tcp),
        (http, cluster.http),
        (zmq, cluster.zmq),
    ] * 2

    def go_on(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        way, address = ways[number]
        while time.monotonic() < until:
            counts[number] += 1
            with contextlib.suppress(OSError):  # cut off, or refused
                way(address, rng)

    threads = [threading.Thread(target=go_on, args=(number,)) for number in range(len(ways))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(counts)
    return sum(counts)


def use(cluster: Cluster, wait: Any) -> dict[str, tuple[int, int, int]]:
    """Return memory, descriptors and threads of every actor once the cluster is idle again."""
    with Client(cluster.zmq) as client:
        wait(lambda: not client.status()["requests"], 60.0, "requests of those who left are not over")
        wait(lambda: not any(client.leaks().values()), 5.0, "something is held for nobody")
    found = {}
    for actor in cluster.ready.actors:
        process = psutil.Process(actor.pid)
        wait(lambda process=process: len(process.net_connections("tcp")) < 20, 30.0, "connections are left")
        found[actor.name] = process.memory_info().rss, process.num_fds(), process.num_threads()
    return found


def hold_flat(cluster: Cluster, before: dict[str, tuple[int, int, int]], wait: Any) -> None:
    """Hold that no actor grew. Texts of those who left may still be tokenised, and their memory comes back later."""
    last: list[Any] = []

    def is_flat() -> bool:
        last[:] = [(name, before[name], now) for name, now in use(cluster, wait).items()]
        return all(
            now[0] < then[0] * 1.1 + (32 << 20) and now[1] <= then[1] + 3 and now[2] <= then[2] + 1
            for _, then, now in last
        )

    wait(is_flat, 30.0, lambda: f"memory, descriptors or threads grew: {last}")


@pytest.mark.slow
@pytest.mark.timeout(ATTACK_S + 240)
@pytest.mark.skipif("ATTACK_S" not in os.environ, reason="by hand: ATTACK_S=60 says for how many seconds")
def test_attackers_harm_neither_the_cluster_nor_a_neighbour(attacked: Cluster, dial: Any, wait: Any) -> None:
    neighbour = dial(attacked.tcp, timeout_s=NEIGHBOUR_S)
    expected = neighbour.ask(**ASK).ids
    wrong: list[Any] = []
    num_answers = 0
    is_over = threading.Event()

    def live_beside() -> None:
        nonlocal num_answers
        while not is_over.is_set():
            answer = neighbour.ask(**ASK)
            num_answers += 1
            if answer.ids != expected:
                wrong.append(answer)

    living = threading.Thread(target=live_beside)
    living.start()
    try:
        attack(attacked, ATTACK_S / 3, 1)
        before = use(attacked, wait)
        attack(attacked, ATTACK_S * 2 / 3, 2)
    finally:
        is_over.set()
        living.join()
    assert not wrong
    assert num_answers > ATTACK_S / 10
    hold_flat(attacked, before, wait)


@pytest.mark.slow
def test_a_storm_of_cancels_leaves_nothing_and_changes_no_answer(attacked: Cluster, dial: Any, wait: Any) -> None:
    """5,000 requests, cancelled or left at random moments by their clients, beside some that are not."""
    calm = dial(attacked.tcp, timeout_s=120.0)
    expected = {n: calm.ask(prompt=f"survivor {n}", max_tokens=30, ignore_eos=True).ids for n in range(4)}
    before = use(attacked, wait)
    survivors: list[tuple[int, list[int]]] = []
    is_over = threading.Event()

    def survive() -> None:
        while not is_over.is_set():
            survivors.extend(
                (n, calm.ask(prompt=f"survivor {n}", max_tokens=30, ignore_eos=True).ids) for n in expected
            )

    def storm(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(50):
            client = dial(attacked.tcp, timeout_s=120.0)
            ids = range(25)
            for id in ids:
                prompt = "x " * rng.choice([1, 5, 200])
                client.send({"id": id, "prompt": prompt, "max_tokens": rng.randrange(1, 60), "ignore_eos": True})
                if rng.random() < 0.5:
                    time.sleep(rng.random() * 0.02)
                if rng.random() < 0.5:
                    client.send({"cancel": rng.choice(ids)})
            if rng.random() < 0.5:
                client.close()
                continue
            for id in ids:
                client.send({"cancel": id})
            ends = 0
            while ends < len(ids):
                ends += client.event()["event"] != "token"
            client.close()

    surviving = threading.Thread(target=survive)
    storms = [threading.Thread(target=storm, args=(seed,)) for seed in range(4)]
    for thread in (surviving, *storms):
        thread.start()
    for thread in storms:
        thread.join()
    is_over.set()
    surviving.join()
    assert survivors
    assert all(ids == expected[n] for n, ids in survivors)
    hold_flat(attacked, before, wait)


def test_a_flood_of_lines_does_not_stop_the_clock(cluster: Cluster, dial: Any) -> None:
    """Lines that are answered at once would keep the gateway's loop from its other work, its signs of life included."""
    flooding, other = dial(cluster.tcp), dial(cluster.tcp)
    other.ask(prompt="x", max_tokens=1)

    def flood() -> None:
        with contextlib.suppress(OSError):
            flooding.raw(b"\n" * 300_000)

    floods = threading.Thread(target=flood)
    floods.start()
    began = time.monotonic()
    for _ in range(5):
        assert other.ask(prompt="x", max_tokens=1).end["event"] == "done"
    assert time.monotonic() - began < 10.0
    flooding.socket.shutdown(socket.SHUT_RDWR)
    floods.join(10.0)
