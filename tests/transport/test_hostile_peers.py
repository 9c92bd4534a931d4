"""What peers of a ZeroMQ listener can do wrong on purpose: it costs them their connection, and others nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest
from zmtp import Zmtp, frame_of

from pdactors.transport import Listener, Transport, connections, transport_for, zmq

MAX_BYTES = 100_000
ADDRESS = "tcp://127.0.0.1:0"


class Inbox:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[tuple[bytes, list[bytes]]] = asyncio.Queue()

    def __call__(self, peer: bytes, frames: list[bytes]) -> None:
        self.messages.put_nowait((peer, frames))

    async def next(self) -> tuple[bytes, list[bytes]]:
        return await asyncio.wait_for(self.messages.get(), 20)


@pytest.fixture
async def make() -> AsyncIterator[Callable[[], Transport]]:
    made: list[Transport] = []

    def make() -> Transport:
        made.append(transport_for(ADDRESS))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
async def listener(make: Callable[[], Transport], inbox: Inbox) -> Listener:
    return make().listen(ADDRESS, inbox, max_bytes=MAX_BYTES)


@pytest.fixture
async def peer(listener: Listener) -> AsyncIterator[Zmtp]:
    peer = await asyncio.to_thread(Zmtp, listener.address)
    yield peer
    peer.close()


async def is_cut(peer: Zmtp, timeout_s: float = 20.0) -> bool:
    return await asyncio.to_thread(peer.is_cut, timeout_s)


async def test_what_is_sent_by_hand_arrives(peer: Zmtp, inbox: Inbox) -> None:
    peer.send(b"one", b"x" * 1000)
    assert (await inbox.next())[1] == [b"one", b"x" * 1000]
    assert not await is_cut(peer, 0.3)


async def test_a_message_that_does_not_end_costs_the_connection_and_no_memory(
    peer: Zmtp, make: Callable[[], Transport], listener: Listener, inbox: Inbox
) -> None:
    """ZeroMQ keeps the frames of a message until the last one has come, however many."""
    before = psutil.Process().memory_info().rss
    is_over = threading.Event()

    def flood() -> int:
        sent = 0
        piece = frame_of(b"x" * (MAX_BYTES // 2), more=True) * 4
        with contextlib.suppress(OSError):
            while sent < 8 << 30 and not is_over.is_set():
                peer.socket.sendall(piece)
                sent += len(piece)
        return sent

    flooding = asyncio.create_task(asyncio.to_thread(flood))
    other = make().connect(listener.address, b"other", Inbox())
    for number in range(20):
        other.send([b"%d" % number])
        assert (await inbox.next())[1] == [b"%d" % number]
    try:
        async with asyncio.timeout(20.0):
            sent = await asyncio.shield(flooding)
    finally:
        is_over.set()
    assert sent < 8 << 30
    assert psutil.Process().memory_info().rss - before < 1 << 30


async def test_a_message_of_a_million_frames_holds_nobody_up(
    peer: Zmtp, make: Callable[[], Transport], listener: Listener, inbox: Inbox
) -> None:
    frames = b"\1\0" * 90_000  # under the limit of what may be unread
    peer.socket.sendall(frames + b"\0\0")
    _, found = await inbox.next()
    assert len(found) == zmq.MAX_FRAMES
    assert await is_cut(peer)
    make().connect(listener.address, b"other", Inbox()).send([b"the next"])
    assert (await inbox.next())[1] == [b"the next"]


@pytest.mark.parametrize("claim", [MAX_BYTES + 1, 1 << 30, 2**63 - 1, 2**64 - 1])
async def test_a_claim_of_a_huge_frame_costs_the_connection(peer: Zmtp, claim: int) -> None:
    before = psutil.Process().memory_info().rss
    peer.socket.sendall(b"\2" + claim.to_bytes(8, "big") + b"x" * 1000)
    assert await is_cut(peer)
    assert psutil.Process().memory_info().rss - before < 64 << 20


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        os.urandom(200),
        bytes(200),
        b"\xff" * 200,
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"PLAIN".ljust(20, b"\0") + bytes(32) + b"x" * 50,
        b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32) + b"\4\xff" + b"x" * 255,
    ],
)
async def test_what_is_not_zeromq_does_no_harm(
    make: Callable[[], Transport], listener: Listener, inbox: Inbox, first: bytes
) -> None:
    peer = await asyncio.to_thread(lambda: Zmtp(listener.address, handshake=False))
    peer.socket.sendall(first)
    make().connect(listener.address, b"other", Inbox()).send([b"hello"])
    assert (await inbox.next())[1] == [b"hello"]
    peer.close()


async def test_a_peer_can_be_cut_and_comes_back(
    make: Callable[[], Transport], listener: Listener, inbox: Inbox
) -> None:
    channel = make().connect(listener.address, b"me", Inbox())
    channel.send([b"one"])
    await inbox.next()
    listener.cut(b"me")
    listener.cut(b"nobody")
    async with asyncio.timeout(20.0):
        while inbox.messages.empty():
            channel.send([b"again"])
            await asyncio.sleep(0.05)
    assert (await inbox.next())[0] == b"me"


async def test_the_longest_silent_connection_gives_way(
    make: Callable[[], Transport], inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 8)
    listener = make().listen(ADDRESS, inbox)
    channel = make().connect(listener.address, b"me", Inbox())
    silent: list[Zmtp] = []
    for number in range(30):
        silent.append(await asyncio.to_thread(Zmtp, listener.address))
        channel.send([b"%d" % number])
        assert (await inbox.next())[1] == [b"%d" % number]
    assert await is_cut(silent[0])
    for peer in silent:
        peer.close()


async def test_who_says_nothing_is_cut_and_who_spoke_once_is_not(
    make: Callable[[], Transport], inbox: Inbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SILENT_START_S", 0.5)
    listener = make().listen(ADDRESS, inbox)
    silent = await asyncio.to_thread(Zmtp, listener.address)
    spoken = await asyncio.to_thread(Zmtp, listener.address)
    spoken.send(b"once")
    await inbox.next()
    assert await is_cut(silent)
    assert not await is_cut(spoken, 1.0)
    for peer in (silent, spoken):
        peer.close()


async def test_nothing_of_closed_connections_is_kept(
    make: Callable[[], Transport], listener: Any, inbox: Inbox
) -> None:
    for _ in range(50):
        peer = await asyncio.to_thread(Zmtp, listener.address)
        peer.send(b"hello")
        await inbox.next()
        peer.close()
    for _ in range(50):
        socket.create_connection(_where(listener.address)).close()
    async with asyncio.timeout(20.0):
        while listener._connections._of or listener._connections._fd_of:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _where(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host, int(port)
