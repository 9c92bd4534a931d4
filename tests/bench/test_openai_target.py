"""`OpenAITarget` against small real servers of aiohttp."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from pdactors.bench.load import Answer, open_loop
from pdactors.bench.openai_target import OpenAITarget, check_url
from pdactors.bench.workload import Request
from pdactors.errors import BadRequest, ConfigError, ConnectionLost, Overloaded, PDError, Unauthorized, error_for

ASK = Request("chat", (3, 4, 5), 4)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def server(completions: Handler, models: Any = ({"id": "tiny"},)) -> AsyncIterator[str]:
    """Serve the two paths that are used, on a free port."""

    async def list_models(_request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": models})

    app = web.Application(client_max_size=1 << 24)
    app.add_routes([web.post("/v1/completions", completions), web.get("/v1/models", list_models)])
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        await runner.cleanup()


def stream(*events: Any, hold: asyncio.Event | None = None) -> Handler:
    """Answer with these events; bytes are sent as they are."""

    async def handler(request: web.Request) -> web.StreamResponse:
        await request.read()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(
                event if isinstance(event, bytes) else b"data: " + json.dumps(event).encode() + b"\n\n"
            )
        if hold is not None:
            await hold.wait()
        return response

    return handler


def piece(text: str, finish_reason: str | None = None) -> dict[str, Any]:
    return {"object": "text_completion", "choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]}


def usage(count: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}}


DONE = b"data: [DONE]\n\n"


async def ask(url: str, **options: Any) -> tuple[Answer, list[float]]:
    stamps: list[float] = []
    async with OpenAITarget.connect(url, **options) as target:
        return await target.ask(ASK, stamps), stamps


async def test_a_request_is_streamed_with_its_token_ids():
    seen: list[Any] = []

    async def completions(request: web.Request) -> web.StreamResponse:
        seen.append((await request.json(), request.headers.get("Authorization")))
        return await stream(piece("a"), piece("b"), piece("c", "length"), usage(3), DONE)(request)

    async with server(completions) as url:
        answer, stamps = await ask(url, api_key="key")
    assert (answer.num_tokens, len(stamps)) == (3, 3)
    assert stamps == sorted(stamps)
    ((body, authorization),) = seen
    assert authorization == "Bearer key"
    assert body == {
        "model": "tiny",
        "prompt": [3, 4, 5],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize(
    ("events", "num_tokens", "num_stamps"),
    [
        ([piece("a"), piece("b"), DONE], 2, 2),
        ([piece("a"), piece("b"), piece("", "length"), DONE], 2, 2),
        ([piece("a"), piece("b"), piece("", "length"), usage(2), DONE], 2, 2),
        ([piece("a"), piece(""), piece("", "length"), usage(3), DONE], 3, 3),  # pieces of one character
        ([piece("abc"), piece("de", "length"), usage(5), DONE], 5, 2),
        ([b": ping\n\n", b"event: x\ndata:" + json.dumps(piece("a")).encode() + b"\r\n\r\n", usage(1), DONE], 1, 1),
    ],
)
async def test_tokens_are_counted_as_the_usage_says_else_by_the_piece(events, num_tokens, num_stamps):
    async with server(stream(*events)) as url:
        answer, stamps = await ask(url)
    assert (answer.num_tokens, len(stamps)) == (num_tokens, num_stamps)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, BadRequest),
        (401, Unauthorized),
        (404, BadRequest),
        (429, Overloaded),
        (503, Overloaded),
        (500, PDError),
    ],
)
async def test_a_status_becomes_the_error_that_it_stands_for(status, error):
    async def refuse(_request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "not now"}}, status=status)

    async with server(refuse) as url:
        with pytest.raises(error, match=f"HTTP {status}.*not now") as caught:
            await ask(url)
    assert caught.value.code == error.code


@pytest.mark.parametrize(
    ("events", "code", "part"),
    [
        ([piece("a"), {"error": {"message": "engine died"}}, DONE], "internal", "engine died"),
        ([piece("a"), b"data: {nonsense\n\n"], "internal", "no completion"),
        ([b'data: {"choices": 5}\n\n'], "internal", "no completion"),
        ([b"data: \xff\n\n"], "internal", "no completion"),
        ([piece("a")], "connection", "before it was done"),
        ([b"data: " + b"x" * (1 << 22)], "internal", "a line of more than"),
    ],
)
async def test_a_stream_that_breaks_is_an_error(events, code, part):
    async with server(stream(*events)) as url:
        with pytest.raises(type(error_for(code, "")), match=part) as caught:
            await ask(url)
    assert caught.value.code == code


async def test_an_overloaded_server_is_counted_and_the_others_are_answered():
    seats = asyncio.Semaphore(3)

    async def completions(request: web.Request) -> web.StreamResponse:
        if seats.locked():
            return web.json_response({"error": "busy"}, status=429)
        async with seats:
            await asyncio.sleep(0.02)
            return await stream(piece("a"), piece("b", "length"), usage(2), DONE)(request)

    async with server(completions) as url, OpenAITarget.connect(url, model="named") as target:
        records = await open_loop(target, [ASK] * 30, patience_s=20)
    assert {record.error for record in records} == {None, "overloaded"}
    assert {record.num_tokens for record in records if record.error is None} == {2}


async def test_a_server_that_falls_silent_is_left():
    hold, gone = asyncio.Event(), asyncio.Event()

    async def completions(request: web.Request) -> web.StreamResponse:
        try:
            return await stream(piece("a"), hold=hold)(request)
        finally:
            gone.set()

    async with server(completions) as url, OpenAITarget.connect(url) as target:
        records = await open_loop(target, [ASK], patience_s=0.1)
        hold.set()
        await asyncio.wait_for(gone.wait(), 10)
    assert [record.error for record in records] == ["timeout"]


async def test_a_server_without_a_model_or_without_sense_is_refused():
    async with server(stream(), models=[]) as url:
        with pytest.raises(PDError, match="serves no model"):
            await ask(url)
    async with server(stream(), models="x") as url:
        with pytest.raises(PDError, match="/v1/models"):
            await ask(url)


async def test_nobody_there_is_said():
    async with server(stream()) as url:
        pass
    with pytest.raises(ConnectionLost, match=f"nobody answers at {url}"):
        await ask(url)


@pytest.mark.parametrize("url", ["", "127.0.0.1:8000", "ftp://x", "http://", "http://a b", "http://x/?y"])
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match="no URL"):
        check_url(url)


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_a_url_may_have_the_version_in_it(url):
    assert check_url(url) == "http://h:1"
