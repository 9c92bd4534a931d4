"""Every message transport keeps the same promises."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable

import pytest
from inbox import Inbox

from pdactors.errors import ConnectionLost
from pdactors.transport import Busy, Channel, PeerGone, Transport, actors_transport, transport_for

SCHEMES = {"inproc": "inproc://contract-{}", "tcp": "tcp://127.0.0.1:0", "lossless": "tcp://127.0.0.1:0"}
numbers = itertools.count()


def nobody_at(address: str) -> str:
    """Return an address of that transport where nobody listens, and nobody did: ZeroMQ lets a port go only later."""
    if not address.startswith("tcp"):
        return address
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def accepts(channel: Channel, payload: bytes) -> bool:
    try:
        channel.send([payload])
    except Busy:
        return False
    return True


@pytest.fixture(params=SCHEMES)
def address(request: pytest.FixtureRequest) -> str:
    return SCHEMES[request.param].format(next(numbers))


@pytest.fixture
async def make(request: pytest.FixtureRequest, address: str) -> AsyncIterator[Callable[[], Transport]]:
    made: list[Transport] = []
    new = actors_transport if "lossless" in request.node.name else transport_for

    def make() -> Transport:
        made.append(new(address))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


async def test_a_message_arrives_whole_and_is_answered(make, address):
    inbox, answers = Inbox(), Inbox()
    listener = make().listen(address, inbox)
    channel = make().connect(listener.address, b"me", answers)
    channel.send([b"one", b"", memoryview(b"three")])
    assert await inbox.next() == (b"me", [b"one", b"", b"three"])
    listener.send(b"me", [b"back"])
    assert await answers.next() == (b"", [b"back"])


async def test_messages_of_one_peer_arrive_in_order(make, address):
    inbox = Inbox()
    listener = make().listen(address, inbox)
    channel = make().connect(listener.address, b"me", Inbox())
    for i in range(1000):
        channel.send([b"%d" % i])
    assert [(await inbox.next())[1] for _ in range(1000)] == [[b"%d" % i] for i in range(1000)]


async def test_a_peer_that_never_connected_is_gone(make, address):
    listener = make().listen(address, Inbox())
    with pytest.raises(PeerGone):
        listener.send(b"nobody", [b"hello"])


async def test_an_address_in_use_is_refused(make, address):
    listener = make().listen(address, Inbox())
    with pytest.raises(ConnectionLost):
        make().listen(listener.address, Inbox())


async def test_what_is_sent_before_the_listener_exists_arrives_when_it_does(make, address):
    where = nobody_at(address)
    channel = make().connect(where, b"me", Inbox())
    channel.send([b"early"])
    inbox = Inbox()
    make().listen(where, inbox)
    assert await inbox.next() == (b"me", [b"early"])


async def test_a_queue_that_nobody_empties_is_busy_and_loses_nothing_that_it_took(make, address):
    where = nobody_at(address)
    channel = make().connect(where, b"me", Inbox())
    taken = 0
    while taken < 100_000 and accepts(channel, b"%d" % taken):
        taken += 1
    assert 0 < taken < 100_000
    inbox = Inbox()
    make().listen(where, inbox)
    assert [(await inbox.next())[1] for _ in range(taken)] == [[b"%d" % i] for i in range(taken)]


async def test_the_first_holder_of_an_identity_keeps_it(make, address):
    inbox, first, second = Inbox(), Inbox(), Inbox()
    listener = make().listen(address, inbox)
    make().connect(listener.address, b"me", first).send([b"1"])
    await inbox.next()
    thief = make().connect(listener.address, b"me", second)
    thief.send([b"2"])
    await asyncio.sleep(0.1)  # time for a wrong delivery
    listener.send(b"me", [b"for the first"])
    assert (await first.next())[1] == [b"for the first"]
    assert second.messages.empty()
    assert inbox.messages.empty()


async def test_an_oversized_frame_is_not_delivered_and_costs_the_connection(make, address):
    inbox = Inbox()
    listener = make().listen(address, inbox, max_bytes=1000)
    offender = make().connect(listener.address, b"big", Inbox())
    offender.send([b"x" * 5000])
    make().connect(listener.address, b"small", Inbox()).send([b"x" * 900])
    assert (await inbox.next())[0] == b"small"
    assert inbox.messages.empty()


async def test_a_closed_end_can_be_closed_again_and_refuses_to_send(make, address):
    listener = make().listen(address, Inbox())
    channel = make().connect(listener.address, b"me", Inbox())
    channel.close()
    channel.close()
    channel.abort()
    with pytest.raises(PeerGone):
        channel.send([b"late"])
    listener.close()
    listener.close()


async def test_a_successor_on_the_same_descriptor_serves_the_same_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        first, client = transport_for(where), transport_for(where)
        first.listen(where, Inbox(), fd=server.fileno())
        first.close()
        inbox = Inbox()
        second = transport_for(where)
        assert second.listen(where, inbox, fd=server.fileno()).address == where
        client.connect(where, b"me", Inbox()).send([b"hello"])
        assert await inbox.next() == (b"me", [b"hello"])
        client.close()
        second.close()
