"""`ClientServer`: the ZeroMQ socket of the client library. It takes client messages and nothing else."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from pdactors.client_messages import (
    AnswerEvent,
    AnyEvent,
    ClientAsk,
    ClientBye,
    ClientCancel,
    ClientDrain,
    ClientEvents,
    ClientHello,
    ClientPing,
    ClientPong,
    ClientRequest,
    ClientScale,
    ClientTrace,
    ClientWelcome,
    ErrorEvent,
    RequestId,
    TokenEvent,
    to_gateway_decoder,
)
from pdactors.config.address import parse_address
from pdactors.errors import BadRequest, Overloaded, PDError, Unauthorized
from pdactors.messages import PROTOCOL_VERSION, Message, decode, encode
from pdactors.transport import Busy, Listener, Peer, PeerGone, Transport, transport_for

if TYPE_CHECKING:
    from pdactors.actors.gateway import Gateway

MAX_MESSAGE_BYTES = 1 << 20
MAX_REQUESTS = 1024  # in flight for one client
MAX_QUESTIONS = 16  # in flight for one client: each may concern every actor
LAST_WORDS_S = 0.5  # between a last error and the end of the connection
SILENT_AFTER_S = 15.0  # clients ping every few seconds
MAX_HELLO_BYTES = 8192  # all that is read of a stranger

M = TypeVar("M", bound=Message)


@dataclass
class _Client:
    heard_s: float
    requests: dict[RequestId, str] = field(default_factory=dict)
    num_questions: int = 0


class ClientServer:
    """Keeps the clients that said hello; one that leaves or falls silent has its requests cancelled."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._transport: Transport | None = None  # of its own: strangers must not keep the cluster's thread busy
        self._listener: Listener | None = None
        self._clients: dict[Peer, _Client] = {}
        self._handlers: dict[type[Message], Callable[[Peer, _Client, Message], None]] = {}
        self._on(ClientRequest, self._request)
        self._on(ClientCancel, self._cancel)
        self._on(ClientAsk, self._ask)
        self._on(ClientTrace, self._trace)
        self._on(ClientDrain, self._drain)
        self._on(ClientScale, self._scale)
        self._on(ClientPing, lambda peer, _client, _message: self._send(peer, ClientPong()))
        self._on(ClientBye, lambda peer, _client, _message: self._forget(peer))

    def start(self, address: str, fd: int) -> None:
        """Serve the listening socket `fd`, bound to `address`, with or without `tcp://`."""
        keys = self._gateway.spec.keys
        admits = keys.clients if keys is not None else None
        self._transport = transport_for("tcp://", keys)
        self._listener = self._transport.listen(
            f"tcp://{parse_address(address)}", self._receive, fd=fd, max_bytes=MAX_MESSAGE_BYTES, admits=admits
        )
        self._gateway.every(1.0, self._sweep)

    def close(self) -> None:
        """Close; what was sent is flushed."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        if self._transport is not None:
            self._transport.close()
            self._transport = None

    def _on(self, kind: type[M], handler: Callable[[Peer, _Client, M], None]) -> None:
        self._handlers[kind] = handler  # type: ignore[assignment]  # each is called with its own kind only

    def _receive(self, peer: Peer, frames: list[bytes]) -> None:
        client = self._clients.get(peer)
        if client is None and sum(map(len, frames)) > MAX_HELLO_BYTES:
            self._turn_away(peer, None, Unauthorized("say ClientHello first"))
            return
        try:
            message = decode(to_gateway_decoder, frames)
        except BadRequest as error:
            self._gateway.drop("malformed client message")
            if client is None:
                self._turn_away(peer, None, error)
            else:
                self._fail(peer, None, error)
            return
        if isinstance(message, ClientHello):
            self._welcome(peer, message)
        elif client is None:  # its session may be over: it is to say hello again, on this connection
            id = message.body.id if isinstance(message, ClientRequest) else getattr(message, "id", None)
            self._fail(peer, id, Unauthorized("say ClientHello first"))
        else:
            client.heard_s = self._gateway.clock()
            self._handlers[type(message)](peer, client, message)

    def _welcome(self, peer: Peer, hello: ClientHello) -> None:
        if hello.protocol != PROTOCOL_VERSION:
            return self._turn_away(
                peer, None, BadRequest(f"protocol: yours is {hello.protocol}, ours is {PROTOCOL_VERSION}")
            )
        if not hmac.compare_digest(hello.token.encode(), self._gateway.token.encode()) and self._gateway.token:
            return self._turn_away(peer, None, Unauthorized("missing or wrong token"))
        self._clients.setdefault(peer, _Client(0.0)).heard_s = self._gateway.clock()
        return self._send(peer, ClientWelcome(self._gateway.spec.run_id))

    def _request(self, peer: Peer, client: _Client, message: ClientRequest) -> None:
        id = message.body.id
        if id is None:
            return self._fail(peer, None, BadRequest("id: is needed"))
        if id in client.requests:
            return self._fail(peer, id, BadRequest(f"id: {id!r} is in flight already"))
        if len(client.requests) >= MAX_REQUESTS:
            return self._fail(peer, id, Overloaded(f"{MAX_REQUESTS} requests are in flight", retry_after_s=1.0))
        client.requests[id] = ""

        def sink(event: AnyEvent) -> None:
            if not isinstance(event, TokenEvent):
                client.requests.pop(id, None)
            self._send(peer, ClientEvents((event,)))

        request = self._gateway.submit(message.body, id, sink)
        if id in client.requests:
            client.requests[id] = request
        return None

    def _cancel(self, _peer: Peer, client: _Client, message: ClientCancel) -> None:
        request = client.requests.get(message.id)
        if request:
            self._gateway.cancel(request)

    def _ask(self, peer: Peer, client: _Client, message: ClientAsk) -> None:
        self._answer(peer, client, message.id, lambda: self._gateway.ask(message.what))

    def _trace(self, peer: Peer, client: _Client, message: ClientTrace) -> None:
        self._answer(peer, client, message.id, lambda: self._gateway.trace(message.request))

    def _drain(self, peer: Peer, client: _Client, message: ClientDrain) -> None:
        self._answer(peer, client, message.id, lambda: self._gateway.drain(message.actor))

    def _scale(self, peer: Peer, client: _Client, message: ClientScale) -> None:
        self._answer(peer, client, message.id, lambda: self._gateway.scale(message.node, message.role, message.count))

    def _answer(
        self, peer: Peer, client: _Client, id: RequestId, ask: Callable[[], Coroutine[Any, Any, dict[str, Any]]]
    ) -> None:
        if client.num_questions >= MAX_QUESTIONS:
            return self._fail(peer, id, Overloaded(f"{MAX_QUESTIONS} questions are in flight", retry_after_s=1.0))
        client.num_questions += 1

        async def answer() -> None:
            try:
                self._send(peer, ClientEvents((AnswerEvent(id, await ask()),)))
            except PDError as error:
                self._fail(peer, id, error)
            finally:
                client.num_questions -= 1

        self._gateway.spawn(answer())
        return None

    def _sweep(self) -> None:
        now = self._gateway.clock()
        for peer in [peer for peer, client in self._clients.items() if now - client.heard_s > SILENT_AFTER_S]:
            self._gateway.log.info("client fell silent", requests=len(self._clients[peer].requests))
            self._forget(peer)
            self._cut(peer)

    def _forget(self, peer: Peer) -> None:
        client = self._clients.pop(peer, None)
        for request in list(client.requests.values()) if client else ():
            self._gateway.cancel(request)

    def _turn_away(self, peer: Peer, id: RequestId | None, error: PDError) -> None:
        """Send a last error to a stranger, and end the connection when it had time to arrive."""
        self._fail(peer, id, error)
        asyncio.get_running_loop().call_later(LAST_WORDS_S, self._cut_stranger, peer)

    def _cut_stranger(self, peer: Peer) -> None:
        if peer not in self._clients:
            self._cut(peer)

    def _cut(self, peer: Peer) -> None:
        if self._listener is not None:
            self._listener.cut(peer)

    def _fail(self, peer: Peer, id: RequestId | None, error: PDError) -> None:
        self._send(peer, ClientEvents((ErrorEvent.of(id, error),)))

    def _send(self, peer: Peer, message: Message) -> None:
        if self._listener is None:
            return
        try:
            self._listener.send(peer, encode(message))
        except PeerGone:
            self._forget(peer)
        except Busy:
            self._gateway.log.warning("client cut off: it does not read")
            self._forget(peer)
            self._cut(peer)  # with what waits for it
