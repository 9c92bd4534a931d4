"""`LineTarget` against a gateway that misbehaves; a real one is asked in tests/house/test_bench_serve.py."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from pdactors.bench.line_target import NUM_CONNECTIONS, LineTarget
from pdactors.bench.load import Answer, open_loop
from pdactors.bench.workload import Request
from pdactors.errors import ConnectionLost, Overloaded, PDError, Unauthorized

TIMING = dict.fromkeys(("queue_ms", "prefill_ms", "migration_ms", "ttft_ms", "tpot_ms", "total_ms"), 0.0)
ASK = Request("chat", (3, 4, 5), 2)
Reply = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def token(id: int, index: int) -> bytes:
    return line(event="token", id=id, index=index, token_id=7, text="x")


def done(id: int, count: int) -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": count, "cached_tokens": 1}
    return line(event="done", id=id, finish_reason="length", usage=usage, timing=TIMING, path="lease")


@asynccontextmanager
async def gateway(reply: Reply) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Serve `reply` to each line; yields the address and all that was received."""
    heard: list[dict[str, Any]] = []
    serving: set[asyncio.Task[Any] | None] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError):
            while text := await reader.readline():
                heard.append(json.loads(text))
                await reply(heard[-1], writer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        yield f"{host}:{port}", heard
    finally:
        server.close()
        await asyncio.gather(*(task for task in serving if task))  # the client has left them


async def answer(asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    if "id" in asked:
        text = token(asked["id"], 0) + token(asked["id"], 1) + done(asked["id"], 2)
        for i in range(0, len(text), 37):  # in pieces that respect no line
            writer.write(text[i : i + 37])
            await asyncio.sleep(0)


async def test_a_request_is_asked_with_its_token_ids_and_each_token_is_stamped():
    async with gateway(answer) as (address, heard), LineTarget.connect(address) as target:
        stamps: list[float] = []
        assert await target.ask(ASK, stamps) == Answer(2, 1, "lease")
        assert len(stamps) == 2
    (asked,) = heard
    assert asked == {"id": 0, "prompt_token_ids": [3, 4, 5], "max_tokens": 2, "ignore_eos": True}


async def test_requests_share_the_connections():
    async with gateway(answer) as (address, heard), LineTarget.connect(address) as target:
        records = await open_loop(target, [ASK] * 50, patience_s=10)
    assert [record.num_tokens for record in records] == [2] * 50
    assert sorted(asked["id"] for asked in heard) == list(range(50))


async def test_the_token_is_shown_first():
    async with gateway(answer) as (address, heard), LineTarget.connect(address, token="secret") as target:
        for _ in range(NUM_CONNECTIONS):
            await target.ask(ASK, [])
    assert heard.count({"token": "secret"}) == NUM_CONNECTIONS


async def test_a_refusal_is_counted_by_its_code_and_others_go_on():
    async def refuse_odd(asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if asked["id"] % 2:
            text = line(event="error", id=asked["id"], code="overloaded", message="full", retry_after_s=2.0)
            writer.write(text)
        else:
            await answer(asked, writer)

    async with gateway(refuse_odd) as (address, _), LineTarget.connect(address) as target:
        records = await open_loop(target, [ASK] * 20, patience_s=10)
    assert sorted(record.error or "" for record in records) == [""] * 10 + ["overloaded"] * 10
    assert {record.reason for record in records if record.error} == {"full"}


@pytest.mark.parametrize(
    ("text", "error", "part"),
    [
        (b"what?\n", PDError, "no event"),
        (b"\xff\n", PDError, "no event"),
        (b'{"event": "token", "id": 0}\n', PDError, "no event"),
        (b"x" * ((1 << 20) + 1), PDError, "a line of more than"),
        (line(event="error", id=None, code="unauthorized", message="wrong token"), Unauthorized, "wrong token"),
        (b"", ConnectionLost, "it closed the connection"),
    ],
)
async def test_a_gateway_that_breaks_the_protocol_fails_what_is_in_flight(text, error, part):
    async def misbehave(_asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(text)
        if not text:
            writer.close()

    async with gateway(misbehave) as (address, _), LineTarget.connect(address) as target:
        for _ in range(NUM_CONNECTIONS + 1):  # the last one finds the first connection lost
            async with asyncio.timeout(10):
                with pytest.raises(error, match=part):
                    await target.ask(ASK, [])


async def test_events_of_unknown_requests_are_ignored():
    async def chatter(asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(token(99, 0) + done(99, 1) + line(event="token", id="x", index=0, token_id=1, text=""))
        await answer(asked, writer)

    async with gateway(chatter) as (address, _), LineTarget.connect(address) as target:
        assert await target.ask(ASK, []) == Answer(2, 1, "lease")


async def test_a_request_that_is_left_is_cancelled():
    cancelled = asyncio.Event()

    async def stay_silent(asked: dict[str, Any], _writer: asyncio.StreamWriter) -> None:
        if "cancel" in asked:
            cancelled.set()

    async with gateway(stay_silent) as (address, heard), LineTarget.connect(address) as target:
        records = await open_loop(target, [ASK], patience_s=0.05)
        async with asyncio.timeout(10):
            await cancelled.wait()
    assert heard[1:] == [{"cancel": 0}]
    assert [record.error for record in records] == ["timeout"]


async def test_nobody_there_is_said():
    async with gateway(answer) as (address, _):
        pass
    with pytest.raises(ConnectionLost, match=f"nobody answers at {address}"):
        async with LineTarget.connect(address):
            pass


async def test_an_overloaded_error_is_that_class():
    async def refuse(asked: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        writer.write(line(event="error", id=asked["id"], code="overloaded", message="full"))

    async with gateway(refuse) as (address, _), LineTarget.connect(address) as target:
        with pytest.raises(Overloaded, match="full"):
            await target.ask(ASK, [])
