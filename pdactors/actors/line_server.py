"""`LineServer`: the TCP line protocol. One line is a prompt or a JSON object; answers stream back as lines.

Plain:  a line that does not begin with `{` is a prompt, answered by its text and a line that holds a single `.`
        (a generated line that begins with `.` gets one more in front); an error is a line `error CODE: MESSAGE`.
JSON:   `{"id": …, "prompt": …}` is answered by events, one a line; `{"cancel": ID}` ends a request.
"""

from __future__ import annotations

import asyncio
import hmac
import socket
from collections import deque
from typing import TYPE_CHECKING, Any

import msgspec

from pdactors.actors.line_reader import PIECE_BYTES, LineReader, LineTooLate, LineTooLong
from pdactors.actors.lobby import Lobby
from pdactors.client_messages import AnyEvent, DoneEvent, ErrorEvent, RequestBody, RequestId, TokenEvent, encode_line
from pdactors.errors import BadRequest, Overloaded, PDError, Unauthorized
from pdactors.messages import explain

if TYPE_CHECKING:
    from pdactors.actors.gateway import Gateway

MAX_LINE_BYTES = 1 << 20
MAX_TOKEN_LINE_BYTES = 8192
TOKEN_S = 20.0  # from the connection to the token's line
LINES_A_TURN = 8  # of the loop, from all connections together
MAX_UNREAD_BYTES = 4 << 20  # what a client may leave unread before it is cut off
MAX_REQUESTS = 1024  # in flight on one connection
LAST_WORDS_S = 2.0  # how long a client that is about to be closed may go on sending


class _Head(msgspec.Struct, frozen=True):
    """What is read of an object before anything else, whatever the rest is."""

    id: Any = None
    cancel: Any = msgspec.UNSET


class _Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    cancel: RequestId


class _Auth(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    token: str


_head_decoder = msgspec.json.Decoder(_Head)
_body_decoder = msgspec.json.Decoder(RequestBody)
_cancel_decoder = msgspec.json.Decoder(_Cancel)
_auth_decoder = msgspec.json.Decoder(_Auth)


class LineServer:
    """Accepts connections on a listening socket that the supervisor holds."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._server: asyncio.Server | None = None
        self._connections: set[LineConnection] = set()
        self._waiting: deque[asyncio.Future[None]] = deque()  # connections that have a line
        self.lobby: Lobby[LineConnection] = Lobby()

    async def start(self, fd: int) -> None:
        """Serve the listening socket `fd`."""
        self._server = await asyncio.start_server(
            self._serve, sock=socket.socket(fileno=fd), limit=PIECE_BYTES, backlog=1024
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = LineConnection(self, self._gateway, reader, writer)
        self._connections.add(connection)
        try:
            if self.lobby.enter(connection):
                await connection.run()
            else:
                connection.refuse(Overloaded("too many connections", retry_after_s=1.0))
        finally:
            self.lobby.leave(connection)
            self._connections.discard(connection)

    async def turn(self) -> None:
        """Wait for the next line's turn: connections take turns, and the loop has time for its other work."""
        loop = asyncio.get_running_loop()

        def give_turns() -> None:
            for _ in range(min(LINES_A_TURN, len(self._waiting))):
                waiting = self._waiting.popleft()
                if not waiting.done():  # its task was cancelled
                    waiting.set_result(None)
            if self._waiting:
                loop.call_soon(give_turns)

        if not self._waiting:
            loop.call_soon(give_turns)
        self._waiting.append(loop.create_future())
        await self._waiting[-1]

    async def close(self) -> None:
        """Stop listening and close every connection."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.close()


class LineConnection:
    """One client. JSON requests run side by side, plain prompts one after the other."""

    def __init__(
        self, server: LineServer, gateway: Gateway, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._server = server
        self._gateway = gateway
        self._reader = reader
        self._writer = writer
        self._lines = LineReader(reader, gateway.clock, lambda num_bytes: server.lobby.hold(self, num_bytes))
        self._requests: dict[RequestId, str] = {}
        self._num_anonymous = 0

    async def run(self) -> None:
        """Serve the connection to its end."""
        try:
            await self._let_in()
            while not self._has_left and (line := await self._lines.next(MAX_LINE_BYTES)) is not None:
                await self._server.turn()
                await self._take(line)
                self._rest()
        except (Unauthorized, LineTooLong, LineTooLate) as error:
            await self._turn_away(error)
        except (ConnectionError, TimeoutError):
            pass
        finally:
            self._cancel_all()
            self.close()

    @property
    def _has_left(self) -> bool:
        return self._writer.transport.is_closing()

    def refuse(self, error: PDError) -> None:
        """Close before anything was asked."""
        self._send_error(None, error)
        self.close()

    def close(self) -> None:
        """Flush and close; idempotent."""
        if not self._has_left:
            self._writer.close()

    def cut(self, why: str) -> None:
        """Close at once."""
        self._gateway.drop(f"client: {why}")
        self._writer.transport.abort()

    def _rest(self) -> None:
        """Nothing is under way: it waits for the next request, as long as nobody needs its place."""
        if not self._requests:
            self._server.lobby.wait(self)

    async def _turn_away(self, error: PDError) -> None:
        """Send a last error, and drop what still comes: closing with unread input would reset the connection."""
        self._cancel_all()
        self._send_error(None, error)
        try:
            self._writer.write_eof()
            async with asyncio.timeout(LAST_WORDS_S):
                while await self._reader.read(PIECE_BYTES):
                    pass
        except (OSError, TimeoutError):
            pass  # it was told

    async def _let_in(self) -> None:
        """Have the token shown, if there is one; raises Unauthorized."""
        if not self._gateway.token:
            return
        try:
            line = await self._lines.next(MAX_TOKEN_LINE_BYTES, TOKEN_S)
            token = _auth_decoder.decode(line or b"").token
        except LineTooLate:
            raise Unauthorized(f"no token came within {TOKEN_S:.0f} s") from None
        except (msgspec.DecodeError, UnicodeDecodeError, LineTooLong):
            raise Unauthorized('the first line must be {"token": "…"}') from None
        if not hmac.compare_digest(token.encode(), self._gateway.token.encode()):
            raise Unauthorized("wrong token")

    async def _take(self, line: bytes) -> None:
        if line.lstrip().startswith(b"{"):
            self._take_json(line)
        else:
            await self._take_plain(line)

    # ---- JSON --------

    def _take_json(self, line: bytes) -> None:
        id: RequestId | None = None
        try:
            head = _head_decoder.decode(line)
            if head.cancel is not msgspec.UNSET:
                self._cancel(_cancel_decoder.decode(line).cancel)
                return
            if isinstance(head.id, str | int) and not isinstance(head.id, bool):
                id = head.id
            body = _body_decoder.decode(line)
            id = self._new_id(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            self._send_error(id, BadRequest(explain(error)))
        except PDError as error:
            self._send_error(id, error)
        else:
            self._submit(body, id)

    def _new_id(self, body: RequestBody) -> RequestId:
        if len(self._requests) >= MAX_REQUESTS:
            raise Overloaded(f"{MAX_REQUESTS} requests are in flight on this connection", retry_after_s=1.0)
        if body.id is None:
            self._num_anonymous += 1
            return f"request-{self._num_anonymous}"
        if body.id in self._requests:
            raise BadRequest(f"id: {body.id!r} is in flight on this connection already")
        return body.id

    def _submit(self, body: RequestBody, id: RequestId) -> None:
        self._requests[id] = ""
        self._server.lobby.work(self)

        def sink(event: AnyEvent) -> None:
            if not isinstance(event, TokenEvent):
                self._requests.pop(id, None)
                self._rest()
            self._send(encode_line(event))

        request = self._gateway.submit(body, id, sink)
        if id in self._requests:
            self._requests[id] = request

    def _cancel(self, id: RequestId) -> None:
        request = self._requests.get(id)
        if request:
            self._gateway.cancel(request)

    def _cancel_all(self) -> None:
        requests, self._requests = self._requests, {}
        for request in requests.values():
            self._gateway.cancel(request)

    # ---- Plain --------

    async def _take_plain(self, line: bytes) -> None:
        """Answer a prompt, and read on when the answer is complete."""
        try:
            body = self._plain_body(line)
        except BadRequest as error:
            self._send(_plain_error(error))
            return
        self._server.lobby.work(self)
        ended = asyncio.Event()
        dots = DotStuffing()

        def sink(event: AnyEvent) -> None:
            if isinstance(event, TokenEvent):
                self._send(dots.push(event.text).encode())
                return
            self._requests.pop("", None)
            if isinstance(event, ErrorEvent):
                self._send(dots.end() + _plain_error(BadRequest(event.message), event.code))
            elif isinstance(event, DoneEvent):
                self._send(dots.end() + b".\n")
            ended.set()

        request = self._gateway.submit(body, None, sink)
        if not ended.is_set():
            self._requests[""] = request
        await ended.wait()

    def _plain_body(self, line: bytes) -> RequestBody:
        try:
            prompt = line.decode()
        except UnicodeDecodeError as error:
            raise BadRequest(f"prompt: not UTF-8 at byte {error.start}") from None
        if not prompt.strip():
            raise BadRequest("prompt: is empty")
        tokenizer = self._gateway.tokenizer
        if tokenizer is not None and tokenizer.has_chat_template:
            return RequestBody(messages=({"role": "user", "content": prompt},))
        return RequestBody(prompt=prompt)

    # ---- Writing --------

    def _send(self, data: bytes) -> None:
        """Write without waiting; a client that does not read is cut off, so that it slows nobody."""
        transport = self._writer.transport
        if transport.is_closing():
            self._cancel_all()
            return
        if data:
            self._writer.write(data)
        if transport.get_write_buffer_size() > MAX_UNREAD_BYTES:
            self._gateway.log.warning("client cut off", unread_bytes=transport.get_write_buffer_size())
            transport.abort()

    def _send_error(self, id: RequestId | None, error: PDError) -> None:
        self._send(encode_line(ErrorEvent.of(id, error)))


class DotStuffing:
    """Puts one more dot in front of lines that begin with one, however the text is cut into pieces."""

    def __init__(self) -> None:
        self._at_line_start = True

    def push(self, text: str) -> str:
        """Return `text` with its lines stuffed."""
        if not text:
            return ""
        stuffed = text.replace("\n.", "\n..")
        if self._at_line_start and text.startswith("."):
            stuffed = "." + stuffed
        self._at_line_start = text.endswith("\n")
        return stuffed

    def end(self) -> bytes:
        """Return what ends the last line, if it has begun."""
        return b"" if self._at_line_start else b"\n"


def _plain_error(error: PDError, code: str = "") -> bytes:
    message = " ".join(error.message.split())
    return f"error {code or error.code}: {message}\n.\n".encode()
