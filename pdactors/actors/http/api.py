"""The API's endpoints: completions, chat completions, models, health, metrics; the pages are in `pages.py`."""

from __future__ import annotations

import asyncio
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pdactors.actors.http.exchange import Exchange
from pdactors.actors.http.objects import AnswerWriter, HttpError, error_of
from pdactors.actors.http.pages import Pages
from pdactors.actors.http.scrape import Scraper
from pdactors.actors.lobby import Lobby
from pdactors.client_messages import DoneEvent, ErrorEvent, TokenEvent
from pdactors.errors import Overloaded, PDError, WorkerLost
from pdactors.observe.metrics import CONTENT_TYPE
from pdactors.openai_messages import ChatBody, CompletionBody, OpenAIBody, field_of, read_body

if TYPE_CHECKING:
    from pdactors.actors.gateway import Gateway

MAX_BODY_BYTES = 4 << 20
BODY_S = 30.0  # for a body to come
MAX_REQUESTS = 1024  # answers under way for all clients of this API
KINDS: dict[str, type[OpenAIBody]] = {"/v1/completions": CompletionBody, "/v1/chat/completions": ChatBody}
JSON = "application/json"


class Api:
    """Answers HTTP requests that the server let through."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(time.time())
        self._num_answers = 0  # under way
        self._scraper = Scraper(gateway)
        self._bodies: Lobby[_Incoming] = Lobby()
        self.app = Starlette(
            routes=[
                *(Route(path, self._complete, methods=["POST"]) for path in KINDS),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/v1/models/{model:path}", self._model, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
                Route("/metrics", self._metrics, methods=["GET"]),
                *Pages(gateway, self._scraper).routes,
            ],
            exception_handlers={
                HTTPException: self._no_such,
                PDError: self._failed,
                HttpError: self._refused,
                Exception: self._broke,
            },
        )
        self.app.router.redirect_slashes = False

    # ---- Completions --------

    async def _complete(self, request: Request) -> _Answering:
        kind = KINDS[request.url.path]
        body = read_body(kind, await _Incoming(self._bodies).read(request))
        self._check_model(body.model)
        if not self._gateway.has_router:
            raise WorkerLost("the router is not there; try again in a moment", retry_after_s=1.0)
        bodies = body.requests(secrets.randbits(62))
        if self._num_answers + len(bodies) > MAX_REQUESTS:
            raise Overloaded(f"{self._num_answers} answers are under way for HTTP clients", retry_after_s=1.0)
        tokenizer, model = self._gateway.tokenizer, self._gateway.spec.model
        assert tokenizer is not None
        writer = AnswerWriter(
            body,
            tokenizer,
            id=secrets.token_hex(12),
            created=int(time.time()),
            model=body.model or model.name,
            fingerprint=model.fingerprint,
        )
        exchange = Exchange(self._gateway, bodies, request.headers["x-request-id"])
        return _Answering(self, exchange, writer, len(bodies), is_stream=body.stream)

    def count(self, answers: int) -> None:
        """Account for answers that begin, or end if negative."""
        self._num_answers += answers

    def _check_model(self, model: str | None) -> None:
        name = self._gateway.spec.model.name
        if model not in (None, name, Path(name).name):
            raise HttpError(
                404, f"model: {model!r} does not exist; this server has {name!r}", param="model", code="model_not_found"
            )

    # ---- Models and health --------

    def _describe_model(self) -> dict[str, object]:
        model = self._gateway.spec.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._created,
            "owned_by": "pdactors",
            "max_model_len": model.max_model_len,
        }

    async def _models(self, _request: Request) -> Response:
        return _json({"object": "list", "data": [self._describe_model()]})

    async def _model(self, request: Request) -> Response:
        self._check_model(request.path_params["model"])
        return _json(self._describe_model())

    async def _health(self, _request: Request) -> Response:
        obstacle = self._gateway.obstacle()
        if obstacle:
            raise HttpError(503, obstacle, code="service_unavailable", headers={"retry-after": "1"})
        return _json({"status": "ok"})

    async def _metrics(self, _request: Request) -> Response:
        return Response(await self._scraper.scrape(), headers={"content-type": CONTENT_TYPE})

    # ---- Errors --------

    async def _no_such(self, _request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        codes = {404: "not_found", 405: "method_not_allowed"}
        return answer(
            HttpError(error.status_code, error.detail, code=codes.get(error.status_code), headers=error.headers)
        )

    async def _failed(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, PDError)
        kind = KINDS.get(request.url.path)
        param = field_of(kind, error.message) if kind is not None else None
        return await self._refused(request, HttpError.of(error, param=param, is_ending=self._gateway.is_ending))

    async def _refused(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HttpError)
        id = request.headers["x-request-id"]
        self._gateway.log.info(
            "http request refused", id=id, path=request.url.path, status=error.status, reason=str(error)
        )
        return answer(error)

    async def _broke(self, _request: Request, _error: Exception) -> Response:
        """Answer an error that nobody foresaw; the server logs it."""
        return answer(HttpError(500, "internal error; the server's log says more", code="internal"))


class _Answering:
    """The answer to one request for completions: an ASGI application of its own, so that it sees its client leave.

    Nothing is sent before the first token, so that what is refused until then has its own status.
    """

    def __init__(self, api: Api, exchange: Exchange, writer: AnswerWriter, count: int, *, is_stream: bool) -> None:
        self._api = api
        self._exchange = exchange
        self._writer = writer
        self._count = count
        self._is_stream = is_stream
        api.count(count)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        watching = asyncio.create_task(self._watch(receive))
        try:
            await self._exchange.begin()
            await (self._stream(send) if self._is_stream else self._whole(scope, receive, send))
        finally:
            watching.cancel()
            self._exchange.leave()
            self._api.count(-self._count)

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._exchange.leave()

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        async for batch in self._exchange.batches():
            for index, event in batch:
                if isinstance(event, ErrorEvent):
                    raise error_of(event)
                if isinstance(event, TokenEvent | DoneEvent):
                    self._writer.take(index, event)
        if not self._exchange.is_left:
            await Response(self._writer.whole(), media_type=JSON)(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        is_first = True
        async for batch in self._exchange.batches():
            chunks = []
            for index, event in batch:
                if isinstance(event, ErrorEvent):
                    if is_first:
                        raise error_of(event)
                    self._exchange.leave()
                    chunks.append(self._writer.error_chunk(HttpError.of(error_of(event)).object))
                    break
                if isinstance(event, TokenEvent):
                    chunks.append(self._writer.token_chunk(index, event, self._exchange.prompt_uses[index]))
                elif isinstance(event, DoneEvent):
                    chunks.append(self._writer.end_chunk(index, event))
            if is_first:
                is_first = False
                await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
            await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": True})
        end = b"" if self._exchange.is_left else self._writer.last_chunks()
        if not is_first:
            await send({"type": "http.response.body", "body": end})


_STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


def answer(error: HttpError) -> Response:
    """Return the response that tells of an error."""
    return Response(error.body(), error.status, headers=error.headers, media_type=JSON)


def _json(content: object) -> Response:
    return Response(msgspec.json.encode(content), media_type=JSON)


class _Incoming:
    """A body on its way. What all of them hold together is bounded; too much costs the oldest."""

    def __init__(self, bodies: Lobby[_Incoming]) -> None:
        self._bodies = bodies
        self._content = bytearray()
        self._task = asyncio.current_task()
        self._is_cut = False

    def cut(self, _why: str) -> None:
        """Give up waiting for the rest."""
        assert self._task is not None
        self._is_cut = self._task.cancel()

    async def read(self, request: Request) -> bytes:
        """Read the body; raises HttpError if it is too long, comes too slowly or is not declared as JSON."""
        declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if declared != JSON:
            raise HttpError(
                415, f"content-type: must be {JSON}, not {declared[:100] or 'missing'}", code="unsupported_media_type"
            )
        try:
            async with asyncio.timeout(BODY_S):
                async for piece in request.stream():
                    self._content += piece
                    if len(self._content) > MAX_BODY_BYTES:
                        limit = f"the body is longer than {MAX_BODY_BYTES} bytes"
                        raise HttpError(413, limit, code="request_too_large")
                    self._bodies.hold(self, len(self._content))
        except TimeoutError:
            raise HttpError(408, f"the body did not come within {BODY_S:.0f} s", code="request_timeout") from None
        except ClientDisconnect:
            raise HttpError(400, "the client left", code="bad_request") from None
        except asyncio.CancelledError:
            if not self._is_cut or self._task is None or self._task.uncancel():
                raise
            raise Overloaded("too many requests are unfinished", retry_after_s=1.0) from None
        finally:
            self._bodies.leave(self)
        return bytes(self._content)
