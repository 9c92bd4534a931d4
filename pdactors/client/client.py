"""`AsyncClient`: the client library for asyncio programs, over the gateway's ZeroMQ socket.

Leaving a stream early, or closing the client, cancels. Every failure is a `PDError`; its kinds are drawn in errors.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import secrets
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import msgspec

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
    DoneEvent,
    ErrorEvent,
    RequestBody,
    RequestId,
    Timing,
    TokenEvent,
    Usage,
    to_client_decoder,
)
from pdactors.config.keys import client_keys
from pdactors.errors import BadRequest, ConnectionLost, PDError, Unauthorized, error_for
from pdactors.messages import PROTOCOL_VERSION, Message, Role, decode, encode, explain
from pdactors.transport import Busy, Channel, Peer, PeerGone, Transport, transport_for

PING_S = 2.0

SILENT_AFTER_S = 10.0  # a gateway that answers no ping for so long is lost

RESTARTED = "the gateway was restarted; what was in flight is lost"

Messages = Sequence[Mapping[str, str]]
T = TypeVar("T")


@dataclass(frozen=True)
class Generation:
    """A complete answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    timing: Timing
    path: str
    request: str  # the cluster's id for it, which `trace` takes


class AsyncClient:
    """A client for asyncio programs; use it with `async with`, or call `connect` and `close`.

    `address` is what the ready line and file call `zmq`; `token` is needed where the cluster file sets one, and `key`
    where it has security.curve: the file of this client's key, beside which cluster.pub lies.
    """

    def __init__(self, address: str, *, token: str = "", key: str | Path = "", connect_timeout_s: float = 10.0) -> None:
        self._address = address
        self._token = token
        self._key = key
        self._connect_timeout_s = connect_timeout_s
        self._transport: Transport | None = None
        self._channel: Channel | None = None
        self._welcomed: asyncio.Future[str] | None = None
        self._is_known = False  # the gateway that we talk to has welcomed us
        self._pinging: asyncio.Task[None] | None = None
        self._num_pings = 0  # that were not answered yet
        self._inboxes: dict[RequestId, asyncio.Queue[AnyEvent | PDError]] = {}
        self._ids = itertools.count(1)
        self._heard_s = 0.0

    async def connect(self) -> Self:
        """Connect and be welcomed.

        Raises:
            ConnectionLost: nobody answers there within `connect_timeout_s`: with CURVE, to a wrong or missing key.
            Unauthorized: the token is missing or wrong.
            ConfigError: the key cannot be read.
        """
        loop = asyncio.get_running_loop()
        self._transport = transport_for(self._address, client_keys(Path(self._key)) if self._key else None)
        self._welcomed = loop.create_future()
        try:
            self._channel = self._transport.connect(self._address, secrets.token_bytes(12), self._receive)
            self._send(ClientHello(PROTOCOL_VERSION, self._token))
            async with asyncio.timeout(self._connect_timeout_s):
                await self._welcomed
        except TimeoutError:
            await self.close()
            guess = "is the key the right one?" if self._key else "does it want a key (security.curve)?"
            raise ConnectionLost(f"nobody answers at {self._address}; does a cluster run there, and {guess}") from None
        except PDError:
            await self.close()
            raise
        self._heard_s = loop.time()
        self._pinging = loop.create_task(self._ping())
        return self

    async def close(self) -> None:
        """Cancel what is under way and disconnect; idempotent."""
        if self._transport is None:
            return
        if self._pinging is not None:
            self._pinging.cancel()
        if self._channel is not None:
            try:
                self._channel.send(encode(ClientBye()))
            except (PeerGone, Busy):
                pass  # nothing to say goodbye to
        self._break(ConnectionLost("the client was closed"))
        transport, self._transport = self._transport, None
        transport.close()

    async def __aenter__(self) -> Self:
        return await self.connect()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def stream(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Any
    ) -> AsyncGenerator[TokenEvent, None]:
        """Yield each token as it is generated.

        Give `prompt` (taken as it is), `messages` (through the chat template) or `prompt_token_ids`; the other options
        are those of the line protocol: max_tokens, temperature, top_p, top_k, seed, stop, min_tokens, ...

        Raises:
            PDError: one of its children, by the code that the cluster gave.
        """
        async with contextlib.aclosing(self.events(prompt, messages=messages, **options)) as events:
            async for event in events:
                if isinstance(event, TokenEvent):
                    yield event

    async def events(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Any
    ) -> AsyncGenerator[TokenEvent | DoneEvent, None]:
        """Yield the tokens and, last, the end with usage and timing; takes and raises what `stream` does."""
        body = _body(next(self._ids), prompt, messages, options)
        assert body.id is not None
        inbox: asyncio.Queue[AnyEvent | PDError] = asyncio.Queue()
        self._inboxes[body.id] = inbox
        is_over = False
        try:
            self._send(ClientRequest(body))
            while not is_over:
                event = _checked(await inbox.get())
                is_over = isinstance(event, DoneEvent)
                yield cast(TokenEvent | DoneEvent, event)
        except PDError:
            is_over = True
            raise
        finally:
            self._inboxes.pop(body.id, None)
            if not is_over:
                with contextlib.suppress(PDError):  # closing cancels too, and so does the gateway's loss
                    self._send(ClientCancel(body.id))

    async def generate(
        self, prompt: str | None = None, *, messages: Messages | None = None, **options: Any
    ) -> Generation:
        """Return the complete answer; takes what `stream` takes and raises what it raises."""
        tokens: list[TokenEvent] = []
        async for event in self.events(prompt, messages=messages, **options):
            if isinstance(event, TokenEvent):
                tokens.append(event)
            else:
                text = "".join(token.text for token in tokens)
                ids = tuple(token.token_id for token in tokens)
                return Generation(text, ids, event.finish_reason, event.usage, event.timing, event.path, event.request)
        raise ConnectionLost("the answer has no end")

    async def status(self) -> dict[str, Any]:
        """Return what `pdactors status --json` prints."""
        return await self._question(lambda id: ClientAsk(id, "status"))

    async def leaks(self) -> dict[str, Any]:
        """Return what is held in the cluster for nobody."""
        return await self._question(lambda id: ClientAsk(id, "leaks"))

    async def requests(self) -> list[dict[str, Any]]:
        """Describe the last requests, the latest first: ids, tokens, how they ended."""
        answer = await self._question(lambda id: ClientAsk(id, "requests"))
        found: list[dict[str, Any]] = answer["requests"]
        return found

    async def trace(self, request: str = "") -> dict[str, Any]:
        """Return the timeline of a request over all actors, named by `Generation.request` or its client's id.

        Without a name it is the last one's. `observe/timeline.py` says what is in it.

        Raises:
            BadRequest: it is not among the last ones (trace.requests).
        """
        return await self._question(lambda id: ClientTrace(id, request))

    async def drain(self, actor: str) -> dict[str, Any]:
        """Give an engine no new work and have it stopped when it is done; returns at once with what is draining.

        Raises:
            BadRequest: there is no such engine, or it is the last of its role.
        """
        return await self._question(lambda id: ClientDrain(id, actor))

    async def scale(self, node: str, role: Role, count: int) -> dict[str, Any]:
        """Start or drain engines until `node` has `count` of `role`; returns what was started and what is draining.

        Raises:
            BadRequest: the node or role is unknown, or there is no room.
        """
        return await self._question(lambda id: ClientScale(id, node, role, count))

    # ---- Private --------

    async def _question(self, make: Callable[[RequestId], Message]) -> dict[str, Any]:
        id = next(self._ids)
        inbox: asyncio.Queue[AnyEvent | PDError] = asyncio.Queue()
        self._inboxes[id] = inbox
        try:
            self._send(make(id))
            event = _checked(await inbox.get())
        finally:
            self._inboxes.pop(id, None)
        assert isinstance(event, AnswerEvent)
        return event.answer

    def _send(self, message: Message) -> None:
        if self._channel is None or self._transport is None:
            raise ConnectionLost("the client is not connected")
        try:
            frames = encode(message)
        except (TypeError, ValueError, OverflowError) as error:  # only a request holds what its user made
            raise BadRequest(f"the request cannot be encoded: {error}") from error
        self._channel.send(frames)

    def _receive(self, _peer: Peer, frames: list[bytes]) -> None:
        self._heard_s = asyncio.get_running_loop().time()
        try:
            message = decode(to_client_decoder, frames)
        except BadRequest as error:
            self._break(ConnectionLost(f"the gateway sends what this client does not know: {error.message}"))
            return
        if isinstance(message, ClientPong):
            self._num_pings = max(0, self._num_pings - 1)
        elif isinstance(message, ClientWelcome):
            self._is_known, self._num_pings = True, 0
            if self._welcomed is not None and not self._welcomed.done():
                self._welcomed.set_result(message.run_id)
        elif isinstance(message, ClientEvents):
            for event in message.events:
                self._deliver(event)

    def _deliver(self, event: AnyEvent) -> None:
        is_unknown = isinstance(event, ErrorEvent) and event.code == Unauthorized.code
        is_of_ping = is_unknown and event.id is None and self._num_pings > 0  # answers come in order
        self._num_pings -= is_of_ping
        if is_unknown and self._is_known:
            self._introduce_again()  # it did know us, so it is another one, whatever it was asked
        elif event.id is None and isinstance(event, ErrorEvent):
            if not is_of_ping:  # it was sent before we introduced ourselves again
                self._break(_error(event))
        elif event.id in self._inboxes:
            answer = ConnectionLost(RESTARTED) if is_unknown else event  # it was asked before that was known
            self._inboxes[event.id].put_nowait(answer)

    def _introduce_again(self) -> None:
        self._is_known = False
        with contextlib.suppress(PeerGone, Busy):  # the next ping brings us here again
            self._send(ClientHello(PROTOCOL_VERSION, self._token))
        self._break(ConnectionLost(RESTARTED))

    def _break(self, error: PDError) -> None:
        """Let everybody who waits know that the connection is of no use."""
        if self._welcomed is not None and not self._welcomed.done():
            self._welcomed.set_exception(error)
        for inbox in self._inboxes.values():
            inbox.put_nowait(error)

    async def _ping(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PING_S)
            if loop.time() - self._heard_s > SILENT_AFTER_S:
                self._break(ConnectionLost(f"the gateway at {self._address} is silent"))
            with contextlib.suppress(PeerGone, Busy):  # its silence will tell
                self._send_ping()

    def _send_ping(self) -> None:
        self._send(ClientPing())
        self._num_pings += 1


def _body(id: int, prompt: str | None, messages: Messages | None, options: Mapping[str, Any]) -> RequestBody:
    """Check a request as the gateway does.

    Raises:
        BadRequest: an unknown option, or one with a wrong type or value.
    """
    fields: dict[str, Any] = {"id": id, **options}
    if prompt is not None:
        fields["prompt"] = prompt
    if messages is not None:
        fields["messages"] = [dict(message) for message in messages]
    try:
        return msgspec.convert(fields, RequestBody)
    except msgspec.ValidationError as error:
        raise BadRequest(explain(error)) from error


def _checked(event: AnyEvent | PDError) -> AnyEvent:
    if isinstance(event, ErrorEvent):
        raise _error(event)
    if isinstance(event, PDError):
        raise event
    return event


def _error(event: ErrorEvent) -> PDError:
    retry = None if event.retry_after_s is msgspec.UNSET else event.retry_after_s
    return error_for(event.code, event.message, retry)
