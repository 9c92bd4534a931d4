"""What a lossless transport adds: whatever a connection loses arrives all the same, once and in order."""

from __future__ import annotations

import asyncio
import itertools
import random
import shutil
import socket
import subprocess
from collections.abc import Iterator

import pytest
from inbox import Inbox

from pdactors.transport import Busy, PeerGone, Transport, actors_transport, lossless
from pdactors.transport.inproc import InprocTransport
from pdactors.transport.lossless import LosslessTransport

numbers = itertools.count()


class Leaky(InprocTransport):
    """Loses messages under way, as a connection that breaks does."""

    def __init__(self, losses: Iterator[bool]) -> None:
        super().__init__()
        self._losses = losses

    def connect(self, address, identity, receive):
        return super().connect(address, identity, self._losing(receive))

    def listen(self, address, receive, **options):
        return super().listen(address, self._losing(receive), **options)

    def _losing(self, receive):
        return lambda peer, frames: None if next(self._losses) else receive(peer, frames)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lossless, "PROBE_S", 0.002)
    monkeypatch.setattr(lossless, "PATIENCE_S", 0.05)


def address() -> str:
    return f"inproc://lossless-{next(numbers)}"


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_is_lost_both_ways_arrives_once_and_in_order(quick, seed):
    rng = random.Random(seed)
    share = rng.random() * 0.4
    transport = LosslessTransport(Leaky(iter(lambda: rng.random() < share, None)))
    inbox, answers = Inbox(), Inbox()
    listener = transport.listen(address(), inbox)
    channel = transport.connect(listener.address, b"me", answers)
    channel.send([b"hello"])
    while inbox.messages.empty():  # a listener that never heard of a channel cannot miss what it said
        channel.send([b"hello"])
        await asyncio.sleep(0.001)
    last = [b"begin"]
    channel.send(last)
    while (await inbox.next())[1] != last:
        pass
    for i in range(80):
        channel.send([b"%d" % i, b"to you"])
        listener.send(b"me", [b"%d" % i])
        if rng.random() < 0.1:
            await asyncio.sleep(0.001)
    assert [(await inbox.next())[1] for _ in range(80)] == [[b"%d" % i, b"to you"] for i in range(80)]
    assert [(await answers.next())[1] for _ in range(80)] == [[b"%d" % i] for i in range(80)]
    await asyncio.sleep(0.05)
    assert inbox.messages.empty()
    assert answers.messages.empty()
    transport.close()


async def test_a_listener_that_starts_anew_is_told_nothing_of_its_predecessor():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        first, client, second = (actors_transport(where) for _ in range(3))
        inbox, answers, successor = Inbox(), Inbox(), Inbox()
        listener = first.listen(where, inbox, fd=server.fileno())
        channel = client.connect(where, b"me", answers)
        for i in range(5):
            channel.send([b"%d" % i])
            await inbox.next()
        listener.send(b"me", [b"from the first"])
        await answers.next()
        first.close()
        listener = second.listen(where, successor, fd=server.fileno())
        channel.send([b"5"])
        assert await successor.next() == (b"me", [b"5"])
        listener.send(b"me", [b"from the second"])
        assert (await answers.next())[1] == [b"from the second"]
        client.close()
        second.close()


async def test_one_that_stays_away_too_long_is_gone_and_begins_afresh(quick):
    is_cut = False
    transport = LosslessTransport(InprocTransport())
    inbox, answers = Inbox(), Inbox()
    listener = transport.listen(address(), inbox)
    channel = transport.connect(listener.address, b"me", answers)
    channel.send([b"hello"])
    await inbox.next()
    inner = listener._inner
    send = inner.send

    def broken(peer, frames):
        if is_cut:
            raise PeerGone("cut")
        send(peer, frames)

    inner.send = broken
    is_cut = True
    listener.send(b"me", [b"waits"])
    is_cut = False
    assert (await answers.next())[1] == [b"waits"]
    is_cut = True
    listener.send(b"me", [b"is lost"])
    await asyncio.sleep(0.1)
    with pytest.raises(PeerGone):
        listener.send(b"me", [b"refused"])
    is_cut = False
    channel.send([b"here again"])
    await inbox.next()
    listener.send(b"me", [b"welcome"])
    assert (await answers.next())[1] == [b"welcome"]
    transport.close()


async def test_what_nobody_confirms_is_bounded(monkeypatch):
    monkeypatch.setattr(lossless, "MAX_KEPT", 10)
    transport = LosslessTransport(Leaky(itertools.repeat(True)))
    channel = transport.connect(transport.listen(address(), Inbox()).address, b"me", Inbox())
    for _ in range(10):
        channel.send([b"x"])
    with pytest.raises(Busy):
        channel.send([b"x"])
    transport.close()


async def test_strangers_do_not_push_out_who_is_heard(monkeypatch):
    monkeypatch.setattr(lossless, "MAX_PEERS", 8)
    transport = LosslessTransport(InprocTransport())
    inbox, answers = Inbox(), Inbox()
    listener = transport.listen(address(), inbox)
    channel = transport.connect(listener.address, b"me", answers)
    for i in range(50):
        transport.connect(listener.address, b"stranger-%d" % i, Inbox()).send([b"x"])
        channel.send([b"still here"])
        await inbox.next()
        await inbox.next()
    listener.send(b"me", [b"known"])
    assert (await answers.next())[1] == [b"known"]
    assert len(listener._ends) == 8
    transport.close()


@pytest.mark.parametrize("frames", [[], [b""], [b"x" * 32], [b"x" * 34, b"y"], [b"message"]])
async def test_what_has_no_head_is_nothing(frames):
    inner = InprocTransport()
    transport, inbox = LosslessTransport(inner), Inbox()
    listener = transport.listen(address(), inbox)
    inner.connect(listener.address, b"foreign", Inbox()).send(frames)
    assert await inbox.next() == (b"foreign", [])
    transport.close()


async def test_a_cut_connection_loses_nothing():
    """The kernel drops real connections in the middle of a flood."""
    if shutil.which("ss") is None:
        pytest.skip("connections are dropped by `ss` (iproute2)")
    transports: list[Transport] = [actors_transport("tcp://") for _ in range(2)]
    inbox, answers = Inbox(), Inbox()
    listener = transports[0].listen("tcp://127.0.0.1:0", inbox)
    channel = transports[1].connect(listener.address, b"me", answers)
    channel.send([b"hello"])
    await inbox.next()
    port, cuts = listener.address.rpartition(":")[2], 0
    for i in range(2000):
        channel.send([b"%d" % i, bytes(10_000)])
        listener.send(b"me", [b"%d" % i, bytes(10_000)])
        if i % 400 == 200:
            command = ["ss", "-K", "-t", "dport", "=", port]
            done = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=False)
            if done.returncode:
                pytest.skip(f"the kernel does not let us drop connections: {done.stderr.strip()}")
            cuts += done.stdout.count(port)
        if i % 20 == 0:
            await asyncio.sleep(0.001)
    assert [(await inbox.next())[1][0] for _ in range(2000)] == [b"%d" % i for i in range(2000)]
    assert [(await answers.next())[1][0] for _ in range(2000)] == [b"%d" % i for i in range(2000)]
    assert cuts
    for transport in transports:
        transport.close()
