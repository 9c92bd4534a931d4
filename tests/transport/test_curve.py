"""CURVE on the message transport: who has no known key gets nowhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest
from zmtp import Zmtp

from pdactors.config.keys import CurveKeys
from pdactors.errors import ConfigError
from pdactors.transport import Transport, transport_for
from pdactors.transport.zmq import make_pair

ADDRESS = "tcp://127.0.0.1:0"
NOWHERE_S = 0.5
CLUSTER_PUBLIC, CLUSTER_SECRET = make_pair()
CLIENT_PUBLIC, CLIENT_SECRET = make_pair()
OTHER_PUBLIC, OTHER_SECRET = make_pair()
CLUSTER = CurveKeys(CLUSTER_SECRET, CLUSTER_PUBLIC)
CLIENT = CurveKeys(CLIENT_SECRET, CLUSTER_PUBLIC)


class Inbox:
    def __init__(self) -> None:
        self.messages: asyncio.Queue[list[bytes]] = asyncio.Queue()

    def __call__(self, _peer: bytes, frames: list[bytes]) -> None:
        self.messages.put_nowait(frames)

    async def next(self) -> list[bytes]:
        return await asyncio.wait_for(self.messages.get(), 20)


@pytest.fixture
async def make() -> AsyncIterator[Callable[[CurveKeys | None], Transport]]:
    made: list[Transport] = []

    def make(keys: CurveKeys | None) -> Transport:
        made.append(transport_for(ADDRESS, keys))
        return made[-1]

    yield make
    for transport in made:
        transport.close()


async def test_actors_of_one_cluster_and_known_clients_hear_each_other(make) -> None:
    server, actors, clients = make(CLUSTER), Inbox(), Inbox()
    control = server.listen(ADDRESS, actors)
    front = server.listen(ADDRESS, clients, admits=[CLIENT_PUBLIC])
    answers = Inbox()
    make(CLUSTER).connect(control.address, b"actor", Inbox()).send([b"from an actor"])
    make(CLIENT).connect(front.address, b"client", answers).send([b"from a client"])
    assert await actors.next() == [b"from an actor"]
    assert await clients.next() == [b"from a client"]
    front.send(b"client", [b"back"])
    assert await answers.next() == [b"back"]


@pytest.mark.parametrize(
    "keys",
    [
        None,
        CLIENT,  # knows the cluster, but is no actor
        CurveKeys(OTHER_SECRET, CLUSTER_PUBLIC),
        CurveKeys(CLUSTER_SECRET, OTHER_PUBLIC),  # takes the cluster for another
    ],
    ids=["no key", "a client's key", "an unknown key", "another server's key"],
)
async def test_anybody_else_gets_nowhere_at_the_control_socket(make, keys: CurveKeys | None) -> None:
    inbox = Inbox()
    listener = make(CLUSTER).listen(ADDRESS, inbox)
    make(keys).connect(listener.address, b"stranger", Inbox()).send([b"let me in"])
    make(CLUSTER).connect(listener.address, b"actor", Inbox()).send([b"hello"])
    assert await inbox.next() == [b"hello"]
    await asyncio.sleep(NOWHERE_S)
    assert inbox.messages.empty()


async def test_an_actor_is_no_client_unless_its_key_is_listed(make) -> None:
    inbox = Inbox()
    listener = make(CLUSTER).listen(ADDRESS, inbox, admits=[CLIENT_PUBLIC])
    make(CLUSTER).connect(listener.address, b"actor", Inbox()).send([b"let me in"])
    make(CLIENT).connect(listener.address, b"client", Inbox()).send([b"hello"])
    assert await inbox.next() == [b"hello"]
    await asyncio.sleep(NOWHERE_S)
    assert inbox.messages.empty()


async def test_a_listener_without_known_keys_lets_nobody_in(make) -> None:
    inbox = Inbox()
    listener = make(CLUSTER).listen(ADDRESS, inbox, admits=[])
    for keys in (CLUSTER, CLIENT, None):
        make(keys).connect(listener.address, b"any", Inbox()).send([b"let me in"])
    await asyncio.sleep(NOWHERE_S)
    assert inbox.messages.empty()


async def test_a_client_tells_nothing_to_a_server_that_is_not_the_clusters(make) -> None:
    inbox = Inbox()
    listener = make(CurveKeys(OTHER_SECRET, OTHER_PUBLIC)).listen(ADDRESS, inbox, admits=[CLIENT_PUBLIC])
    plain = make(None).listen(ADDRESS, inbox)
    for address in (listener.address, plain.address):
        make(CLIENT).connect(address, b"client", Inbox()).send([b"my token"])
    await asyncio.sleep(NOWHERE_S)
    assert inbox.messages.empty()


async def test_a_handshake_in_the_clear_is_refused_on_the_wire(make) -> None:
    inbox = Inbox()
    listener = make(CLUSTER).listen(ADDRESS, inbox)
    peer = await asyncio.to_thread(lambda: Zmtp(listener.address, handshake=False))
    peer.send(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    assert await asyncio.to_thread(peer.is_cut, 20.0)
    peer.close()


async def test_a_key_that_is_none_is_an_error(make) -> None:
    with pytest.raises(ConfigError, match="pdactors keys"):
        make(CurveKeys("x", CLUSTER_PUBLIC)).listen(ADDRESS, Inbox())
