"""`LineTarget`: asks a cluster over its TCP line protocol, many requests on a few connections."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from pdactors.bench.load import Answer
from pdactors.bench.workload import Request
from pdactors.client_messages import AnyEvent, DoneEvent, ErrorEvent, RequestBody, TokenEvent
from pdactors.errors import ConnectionLost, PDError, error_for

NUM_CONNECTIONS = 4  # a gateway takes 1,024 requests on each
CONNECT_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 20

_event_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class LineTarget:
    """A cluster's gateway, as `Target`; requests take turns on the connections."""

    def __init__(self, connections: list[_Connection]) -> None:
        self._connections = itertools.cycle(connections)
        self._ids = itertools.count()

    @classmethod
    @asynccontextmanager
    async def connect(cls, address: str, *, token: str = "") -> AsyncIterator[LineTarget]:
        """Connect to `HOST:PORT`; at the end what is under way is cancelled.

        Raises:
            ConnectionLost: nobody listens there.
        """
        connections: list[_Connection] = []
        try:
            try:
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    for _ in range(NUM_CONNECTIONS):
                        connection = await _connect(address)
                        connections.append(connection)
            except (OSError, TimeoutError) as error:
                raise ConnectionLost(f"nobody answers at {address}: {error}") from error
            for connection in connections:
                connection.authorize(token)
            yield cls(connections)
        finally:
            for connection in connections:
                connection.close()

    async def ask(self, request: Request, stamps: list[float]) -> Answer:
        """See `Target`."""
        return await next(self._connections).ask(next(self._ids), request, stamps)


async def _connect(address: str) -> _Connection:
    host, _, port = address.rpartition(":")
    _, connection = await asyncio.get_running_loop().create_connection(_Connection, host.strip("[]"), int(port))
    return connection


class _Connection(asyncio.Protocol):
    """One connection, with the requests that are in flight on it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._unread = b""
        self._asked: dict[int, tuple[list[float], asyncio.Future[Answer]]] = {}
        self._lost: PDError | None = None

    def authorize(self, token: str) -> None:
        """Show the token, where there is one."""
        if token:
            self._write({"token": token})

    def close(self) -> None:
        """Disconnect; the cluster cancels what is in flight. Idempotent."""
        if self._transport is not None:
            self._transport.abort()

    async def ask(self, id: int, request: Request, stamps: list[float]) -> Answer:
        """Ask on this connection; see `Target`."""
        if self._lost is not None:
            raise self._lost
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._asked[id] = (stamps, answer)
        self._write(RequestBody(id=id, prompt_token_ids=request.prompt, max_tokens=request.max_tokens, ignore_eos=True))
        try:
            return await answer
        finally:
            if self._asked.pop(id, None) is not None:  # left before its end
                self._write({"cancel": id})

    # ---- What asyncio calls --------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        now = self._loop.time()
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > MAX_LINE_BYTES:
            return self._fail(PDError(f"the gateway sent a line of more than {MAX_LINE_BYTES} bytes"))
        for line in lines:
            try:
                event = _event_decoder.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                return self._fail(PDError(f"the gateway sent what is no event: {error}"))
            self._take(event, now)
        return None

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(ConnectionLost(f"the gateway is gone: {error or 'it closed the connection'}"))

    def _take(self, event: AnyEvent, now: float) -> None:
        if event.id is None and isinstance(event, ErrorEvent):
            return self._fail(error_for(event.code, event.message))
        if not isinstance(event.id, int) or event.id not in self._asked:
            return None  # of a request that was left
        stamps, answer = self._asked[event.id]
        if isinstance(event, TokenEvent):
            stamps.append(now)
            return None
        del self._asked[event.id]
        if answer.done():
            return None
        if isinstance(event, DoneEvent):
            answer.set_result(Answer(event.usage.completion_tokens, event.usage.cached_tokens, event.path))
        elif isinstance(event, ErrorEvent):
            answer.set_exception(error_for(event.code, event.message))
        return None

    def _fail(self, error: PDError) -> None:
        """End every request with `error`, and the connection."""
        self._lost = self._lost or error
        asked, self._asked = self._asked, {}
        for _, answer in asked.values():
            if not answer.done():
                answer.set_exception(self._lost)
        self.close()

    def _write(self, value: object) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(msgspec.json.encode(value) + b"\n")
