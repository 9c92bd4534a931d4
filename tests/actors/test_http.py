"""The HTTP server by raw sockets: what clients do wrong, slowly, or not at all."""

from __future__ import annotations

import asyncio
import json
import socket
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn

from pdactors import Cluster
from pdactors.actors.http import connection as connections
from pdactors.actors.http.api import MAX_BODY_BYTES, Api
from pdactors.actors.http.exchange import MAX_UNREAD_EVENTS, Exchange
from pdactors.actors.http.server import MAX_HEADER_BYTES
from pdactors.client_messages import DoneEvent, RequestBody, Timing, TokenEvent, Usage

JSON_TYPE = "Content-Type: application/json\r\n"
ASK = {"prompt": "the cat sat", "max_tokens": 3, "temperature": 0}


class Raw:
    """One connection, on which a test says what it likes."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=10.0)
        self._file = self.socket.makefile("rb")

    def send(self, data: bytes | str) -> None:
        self.socket.sendall(data.encode() if isinstance(data, str) else data)

    def post(self, body: object, path: str = "/v1/completions", headers: str = JSON_TYPE) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send(
            f"POST {path} HTTP/1.1\r\nHost: x\r\n{headers}Content-Length: {len(content)}\r\n\r\n".encode() + content
        )

    def answer(self) -> tuple[int, dict[str, str], Any]:
        """Read one response: status, headers, object."""
        status = int(self._file.readline().split()[1])
        headers = {}
        while line := self._file.readline().strip().decode():
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        body = self._file.read(int(headers["content-length"])) if "content-length" in headers else self._file.read()
        return status, headers, json.loads(body)

    def rest(self) -> bytes:
        """Return everything up to the server's close."""
        return self._file.read()

    def close(self) -> None:
        self._file.close()
        self.socket.close()


@pytest.fixture
def connect(cluster: Cluster) -> Iterator[Callable[[], Raw]]:
    opened: list[Raw] = []

    def opener() -> Raw:
        opened.append(Raw(cluster.http))
        return opened[-1]

    yield opener
    for raw in opened:
        raw.close()


@pytest.fixture
def raw(connect: Callable[[], Raw]) -> Raw:
    return connect()


def test_a_connection_is_kept_for_the_next_request(raw: Raw) -> None:
    raw.post(ASK)
    status, headers, first = raw.answer()
    assert (status, headers["content-type"]) == (200, "application/json")
    assert headers.keys() >= {"x-request-id", "date"}
    assert "server" not in headers
    raw.post(ASK)
    assert raw.answer()[2]["choices"] == first["choices"]


def test_a_pipelined_request_is_answered_in_its_turn(raw: Raw) -> None:
    for max_tokens in (1, 2, 3):
        raw.post(ASK | {"max_tokens": max_tokens})
    assert [raw.answer()[2]["usage"]["completion_tokens"] for _ in range(3)] == [1, 2, 3]


def test_a_request_may_come_in_pieces_and_chunks(raw: Raw) -> None:
    content = json.dumps(ASK).encode()
    chunks = b"".join(b"1\r\n" + bytes([byte]) + b"\r\n" for byte in content) + b"0\r\n\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{JSON_TYPE}Transfer-Encoding: chunked\r\n\r\n".encode()
    for byte in head:
        raw.send(bytes([byte]))
    raw.send(chunks)
    assert raw.answer()[0] == 200


def test_a_stream_is_server_sent_events(raw: Raw) -> None:
    raw.post(ASK | {"stream": True}, headers=JSON_TYPE + "Connection: close\r\n")
    head, _, rest = raw.rest().partition(b"\r\n\r\n")
    assert b"content-type: text/event-stream" in head.lower()
    events = [line for line in rest.split(b"\n") if line.startswith(b"data: ")]
    assert len(events) == 3 + 1 + 1
    assert events[-1] == b"data: [DONE]"
    assert json.loads(events[0][6:])["choices"][0].keys() == {"index", "text", "logprobs", "finish_reason"}


HEAD = " HTTP/1.1\r\nHost: x\r\n"
POST = f"POST /v1/completions{HEAD}"
WRONG: list[tuple[str, str, str | None, int, str]] = [
    ("no such path", f"GET /v1/nothing{HEAD}\r\n", None, 404, "not_found"),
    ("no such method", f"GET /v1/completions{HEAD}\r\n", None, 405, "method_not_allowed"),
    ("no host", "GET /health HTTP/1.1\r\n\r\n", None, 400, "bad_request"),
    ("not HTTP", "the cat sat\r\n\r\n", None, 400, "bad_request"),
    ("binary", "\x00\xff\x16\x03\x01\r\n\r\n", None, 400, "bad_request"),
    ("endless header", f"GET /health{HEAD}X: {'x' * 2 * MAX_HEADER_BYTES}", None, 400, "bad_request"),
    ("two lengths", f"{POST}Content-Length: 1\r\nContent-Length: 2\r\n\r\n", None, 400, "bad_request"),
    ("no type", f"{POST}Content-Length: 2\r\n\r\n{{}}", None, 415, "unsupported_media_type"),
    ("a text", f"{POST}Content-Type: text/plain\r\nContent-Length: 2\r\n\r\n{{}}", None, 415, "unsupported_media_type"),
    ("no such model", f"GET /v1/models/gpt-9{HEAD}\r\n", "model", 404, "model_not_found"),
    ("no body", f"{POST}{JSON_TYPE}Content-Length: 0\r\n\r\n", None, 400, "bad_request"),
]


@pytest.mark.parametrize(("text", "param", "status", "code"), [c[1:] for c in WRONG], ids=[c[0] for c in WRONG])
def test_what_is_wrong_gets_an_error_in_openais_form(
    raw: Raw, connect: Callable[[], Raw], text: str, param: str | None, status: int, code: str
) -> None:
    raw.send(text.encode("latin-1"))
    found, _, content = raw.answer()
    assert found == status
    error = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["code"], error["type"], error["param"]) == (code, "invalid_request_error", param)
    other = connect()
    other.post(ASK)
    assert other.answer()[0] == 200


def test_a_bad_body_costs_only_its_own_request(raw: Raw) -> None:
    for body, param in ((b"{", None), (ASK | {"max_tokens": 0}, "max_tokens"), (b"[" * 100_000, None)):
        raw.post(body)
        status, _, content = raw.answer()
        assert (status, content["error"]["param"]) == (400, param)
    raw.post({"prompt": [5, 100_000]})
    assert raw.answer()[2]["error"]["param"] == "prompt"
    raw.post(ASK)
    assert raw.answer()[0] == 200


def test_a_body_over_the_limit_is_refused_and_one_at_it_is_read(raw: Raw, connect: Callable[[], Raw]) -> None:
    content = json.dumps(ASK).encode()
    raw.post(content + b" " * (MAX_BODY_BYTES - len(content)))
    assert raw.answer()[0] == 200
    raw.post(content + b" " * (MAX_BODY_BYTES + 1 - len(content)))
    status, _, error = raw.answer()
    assert (status, error["error"]["code"]) == (413, "request_too_large")
    raw.post(ASK)  # the rest of the body was dropped
    assert raw.answer()[0] == 200


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "ü", "a\tb"])
def test_a_request_id_that_is_none_is_replaced(raw: Raw, given: str) -> None:
    raw.send(f"GET /health HTTP/1.1\r\nHost: x\r\nX-Request-Id: {given}\r\n\r\n".encode())
    assert raw.answer()[1]["x-request-id"].startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_cancels_its_requests(
    cluster: Cluster, connect: Callable[[], Raw], wait: Any, stream: bool
) -> None:
    """The fixture `cluster` holds that everything is idle within two seconds; alone the answers take longer."""
    clients = [connect() for _ in range(4)]
    for raw in clients:
        raw.post({"prompt": ["^"] * 8, "max_tokens": 2000, "ignore_eos": True, "stream": stream})
    if stream:
        assert clients[0].socket.recv(15) == b"HTTP/1.1 200 OK"
    for raw in clients:
        raw.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # by a reset
        raw.close()


def test_a_client_that_leaves_before_its_body_has_come_does_no_harm(connect: Callable[[], Raw], raw: Raw) -> None:
    early = connect()
    early.send(f"POST /v1/completions HTTP/1.1\r\nHost: x\r\n{JSON_TYPE}Content-Length: 100\r\n\r\n{{")
    early.close()
    raw.post(ASK)
    assert raw.answer()[0] == 200


# ---- Slow clients --------


@pytest.fixture
async def served(until: Any) -> Any:
    """A `Connection` on a real socket over an application that writes without end, and its client's streams."""

    async def endless(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(10_000):
            await send({"type": "http.response.body", "body": b"x" * 10_000, "more_body": True})

    config = uvicorn.Config(endless, log_config=None, log_level="critical", interface="asgi3")
    config.load()
    server = uvicorn.Server(config)
    made: list[connections.Connection] = []

    def make() -> connections.Connection:
        made.append(connections.Connection(config, server.server_state, {}))
        return made[-1]

    loop = asyncio.get_running_loop()
    listening = await loop.create_server(make, "127.0.0.1", 0)
    reader, writer = await asyncio.open_connection(*listening.sockets[0].getsockname())
    await until(lambda: made)
    yield made[0], reader, writer
    writer.close()
    listening.close()
    await asyncio.gather(*server.server_state.tasks, return_exceptions=True)


async def test_a_request_that_does_not_come_ends_the_connection(served: Any, until: Any) -> None:
    connection, _, writer = served
    writer.write(b"GET / HTTP/1.1\r\n")
    now = asyncio.get_running_loop().time()
    assert connection.mind(now) == ""
    assert connection.mind(now + connections.HEADERS_S + 1) == "its request does not come"
    await until(lambda: connection not in connection.connections)


async def test_a_client_that_does_not_read_is_cut_off(served: Any, until: Any) -> None:
    connection, _, writer = served
    writer.transport.pause_reading()
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: connection.flow.write_paused)
    now = asyncio.get_running_loop().time()
    assert connection.mind(now) == ""
    assert connection.mind(now + connections.UNREAD_S - 1) == ""
    assert connection.mind(now + connections.UNREAD_S + 1) == "it does not read"
    await until(lambda: connection.cycle.disconnected)


async def test_a_client_that_reads_again_is_kept(served: Any, until: Any) -> None:
    connection, reader, writer = served
    writer.transport.pause_reading()
    writer.write(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
    await until(lambda: connection.flow.write_paused)
    now = asyncio.get_running_loop().time()
    assert connection.mind(now) == ""
    writer.transport.resume_reading()
    while connection.flow.write_paused:
        await reader.read(1 << 20)
    assert connection.mind(now + connections.UNREAD_S + 1) == ""


async def test_an_error_that_nobody_foresaw_is_answered_in_openais_form() -> None:
    """The application by itself: a gateway that has nothing it should have."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError

    scope = {"type": "http", "method": "GET", "path": "/v1/models", "headers": [(b"x-request-id", b"a")]}
    with pytest.raises(AttributeError):  # it goes on to whoever logs it
        await Api(object()).app(scope, receive, send)  # type: ignore[arg-type]
    assert sent[0]["status"] == 500
    assert json.loads(sent[1]["body"])["error"]["code"] == "internal"


# ---- Exchanges --------


class FakeGateway:
    """Takes requests, answers none, and remembers what is cancelled."""

    def __init__(self) -> None:
        self.sinks: list[Callable[[Any], None]] = []
        self.cancelled: list[str] = []
        self.answers: Any = defaultdict(lambda: SimpleNamespace(prompt_use=(1, 0)))
        self.log = self

    def submit(self, _body: RequestBody, _id: Any, sink: Callable[[Any], None]) -> str:
        self.sinks.append(sink)
        return f"request-{len(self.sinks)}"

    def cancel(self, key: str) -> None:
        self.cancelled.append(key)

    def warning(self, *_: Any, **__: Any) -> None:
        pass


TOKEN = TokenEvent("id", 0, 5, "x")
DONE = DoneEvent("id", "stop", Usage(1, 1, 0), Timing(0, 0, 0, 0, 0, 0), "none")


async def begun(gateway: FakeGateway, count: int) -> Exchange:
    exchange = Exchange(gateway, [RequestBody(prompt="x")] * count, "id")  # type: ignore[arg-type]
    await exchange.begin()
    return exchange


async def test_an_exchange_ends_when_all_its_requests_have() -> None:
    gateway = FakeGateway()
    both = await begun(gateway, 2)
    gateway.sinks[0](TOKEN)
    gateway.sinks[1](DONE)
    gateway.sinks[0](DONE)
    assert [event async for batch in both.batches() for event in batch] == [(0, TOKEN), (1, DONE), (0, DONE)]
    both.leave()
    assert gateway.cancelled == []


async def test_leaving_cancels_what_has_not_ended() -> None:
    gateway = FakeGateway()
    three = await begun(gateway, 3)
    gateway.sinks[1](DONE)
    three.leave()
    three.leave()
    gateway.sinks[0](TOKEN)
    assert [batch async for batch in three.batches()] == []
    assert gateway.cancelled == ["request-1", "request-3"]


async def test_what_is_left_early_is_not_submitted() -> None:
    gateway = FakeGateway()
    exchange = Exchange(gateway, [RequestBody(prompt="x")] * 3, "id")  # type: ignore[arg-type]
    beginning = asyncio.create_task(exchange.begin())
    await asyncio.sleep(0)
    exchange.leave()
    await beginning
    assert (len(gateway.sinks), gateway.cancelled[:1]) == (1, ["request-1"])


async def test_a_client_that_takes_no_events_is_left() -> None:
    gateway = FakeGateway()
    one = await begun(gateway, 1)
    for _ in range(MAX_UNREAD_EVENTS):
        gateway.sinks[0](TOKEN)
    assert not one.is_left
    gateway.sinks[0](TOKEN)
    assert (one.is_left, gateway.cancelled) == (True, ["request-1"])
