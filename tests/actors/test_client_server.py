"""`ClientServer` with a stand-in for the gateway and a clock that the test moves."""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
import structlog

from pdactors.actors.client_server import MAX_REQUESTS, SILENT_AFTER_S, ClientServer
from pdactors.client import AsyncClient
from pdactors.client_messages import (
    ClientBye,
    ClientEvents,
    ClientHello,
    ClientPing,
    ClientPong,
    ClientRequest,
    ClientWelcome,
    ErrorEvent,
    RequestBody,
    TokenEvent,
    to_client_decoder,
)
from pdactors.errors import ConnectionLost
from pdactors.messages import PROTOCOL_VERSION, Message, decode, encode
from pdactors.transport import Busy, Channel, Transport, transport_for


class FakeGateway:
    """Takes requests, answers none, and remembers what is cancelled."""

    token = ""
    log = structlog.get_logger()

    def __init__(self) -> None:
        self.now = 100.0
        self.sinks: dict[str, Callable[[Any], None]] = {}
        self.cancelled: list[str] = []
        self.sweep: Callable[[], None] = lambda: None
        self.spec: Any = type("Spec", (), {"run_id": "run", "keys": None})
        self._keys = (f"request-{number}" for number in itertools.count())

    def clock(self) -> float:
        return self.now

    def every(self, _period_s: float, action: Callable[[], None]) -> None:
        self.sweep = action

    def drop(self, why: str, **context: object) -> None:
        pass

    def submit(self, _body: RequestBody, _id: Any, sink: Callable[[Any], None]) -> str:
        key = next(self._keys)
        self.sinks[key] = sink
        return key

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self._work = asyncio.ensure_future(work)

    async def ask(self, what: str) -> dict[str, str]:
        return {"asked": what}

    def cancel(self, key: str) -> None:
        self.cancelled.append(key)


class Peer:
    """A client that the test drives by hand."""

    def __init__(self, transport: Transport, address: str) -> None:
        self._inbox: asyncio.Queue[list[bytes]] = asyncio.Queue()
        self.address = address
        self.channel: Channel = transport.connect(address, b"peer", lambda _peer, f: self._inbox.put_nowait(f))

    async def ask(self, message: Message) -> Any:
        self.channel.send(encode(message))
        return await self.get()

    async def get(self) -> Any:
        async with asyncio.timeout(5.0):
            return decode(to_client_decoder, await self._inbox.get())

    async def request(self, id: int) -> None:
        """Send a request and make sure that it was taken in."""
        self.channel.send(encode(ClientRequest(RequestBody(id=id, prompt="x"))))
        assert isinstance(await self.ask(ClientPing()), ClientPong)


@pytest.fixture
def gateway() -> FakeGateway:
    return FakeGateway()


@pytest.fixture(params=["tcp://", ""], ids=["tcp", "plain"])
async def served(request: pytest.FixtureRequest, gateway: FakeGateway) -> AsyncIterator[tuple[ClientServer, Peer]]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        transport = transport_for("tcp://")
        server = ClientServer(gateway)  # type: ignore[arg-type]
        server.start(f"{request.param}{address}", listening.fileno())
        yield server, Peer(transport, f"tcp://{address}")
        server.close()
        transport.close()


@pytest.fixture
def server(served: tuple[ClientServer, Peer]) -> ClientServer:
    return served[0]


@pytest.fixture
async def peer(served: tuple[ClientServer, Peer]) -> Peer:
    peer = served[1]
    assert isinstance(await peer.ask(ClientHello(PROTOCOL_VERSION)), ClientWelcome)
    return peer


async def test_a_silent_client_has_its_requests_cancelled(gateway: FakeGateway, peer: Peer) -> None:
    await peer.request(1)
    await peer.request(2)
    gateway.now += SILENT_AFTER_S - 1
    assert isinstance(await peer.ask(ClientPing()), ClientPong)
    gateway.now += SILENT_AFTER_S - 1
    gateway.sweep()
    assert gateway.cancelled == []
    gateway.now += 2
    gateway.sweep()
    assert gateway.cancelled == ["request-0", "request-1"]
    events = await peer.ask(ClientPing())
    assert events.events[0].code == "unauthorized"  # it has to introduce itself again


async def test_the_client_library_is_lost_once_and_then_known_again(gateway: FakeGateway, served: Any) -> None:
    async with AsyncClient(served[1].address) as client:
        assert await client.status() == {"asked": "status"}
        gateway.now += SILENT_AFTER_S + 1
        gateway.sweep()  # as a gateway that was restarted: it knows nobody
        lost = await asyncio.gather(client.status(), client.generate("x"), return_exceptions=True)
        assert [(type(error), "restarted" in str(error)) for error in lost] == [(ConnectionLost, True)] * 2
        assert await client.status() == {"asked": "status"}


async def test_a_late_answer_to_a_ping_ends_nothing_that_was_asked_since(gateway: FakeGateway, served: Any) -> None:
    async with AsyncClient(served[1].address) as client:
        gateway.now += SILENT_AFTER_S + 1
        gateway.sweep()
        client._send_ping()  # to a gateway that does not know us
        client._introduce_again()  # what was sent before it has been answered, and so
        assert await client.status() == {"asked": "status"}


async def test_a_goodbye_cancels(gateway: FakeGateway, peer: Peer) -> None:
    await peer.request(1)
    peer.channel.send(encode(ClientBye()))
    assert isinstance(await peer.ask(ClientHello(PROTOCOL_VERSION)), ClientWelcome)
    assert gateway.cancelled == ["request-0"]


async def test_a_client_that_does_not_read_is_cut_off(
    gateway: FakeGateway, server: ClientServer, peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await peer.request(1)
    await peer.request(2)

    def refuse(*_arguments: object) -> None:
        raise Busy("full")

    monkeypatch.setattr(server._listener, "send", refuse)
    gateway.sinks["request-0"](TokenEvent(1, 0, 5, "x"))
    assert sorted(gateway.cancelled) == ["request-0", "request-1"]


async def test_a_client_has_a_bounded_number_of_requests(gateway: FakeGateway, peer: Peer) -> None:
    for id in range(MAX_REQUESTS):
        peer.channel.send(encode(ClientRequest(RequestBody(id=id, prompt="x"))))
    answer = await peer.ask(ClientRequest(RequestBody(id=MAX_REQUESTS, prompt="x")))
    assert isinstance(answer, ClientEvents)
    (error,) = answer.events
    assert isinstance(error, ErrorEvent)
    assert (error.id, error.code, error.retry_after_s) == (MAX_REQUESTS, "overloaded", 1.0)
    assert len(gateway.sinks) == MAX_REQUESTS


async def test_one_id_cannot_be_in_flight_twice_and_every_request_has_one(gateway: FakeGateway, peer: Peer) -> None:
    await peer.request(1)
    again = await peer.ask(ClientRequest(RequestBody(id=1, prompt="x")))
    assert (again.events[0].id, again.events[0].code) == (1, "bad_request")
    nameless = await peer.ask(ClientRequest(RequestBody(prompt="x")))
    assert "id: is needed" in nameless.events[0].message
    assert len(gateway.sinks) == 1


@pytest.mark.parametrize("token", ["", "secre", "secret ", "sécret"])
async def test_the_token_is_asked_for(gateway: FakeGateway, served: tuple[ClientServer, Peer], token: str) -> None:
    gateway.token = "secret"
    peer = served[1]
    refused = await peer.ask(ClientHello(PROTOCOL_VERSION, token))
    assert refused.events[0].code == "unauthorized"
    assert "secret" not in refused.events[0].message
    assert (await peer.ask(ClientPing())).events[0].code == "unauthorized"
    assert isinstance(await peer.ask(ClientHello(PROTOCOL_VERSION, "secret")), ClientWelcome)
