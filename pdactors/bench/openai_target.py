"""`OpenAITarget`: asks any OpenAI-compatible server, `/v1/completions` with token ids, streamed. aiohttp's home."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from pdactors.bench.load import Answer
from pdactors.bench.workload import Request
from pdactors.errors import ConfigError, ConnectionLost, PDError, error_for

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

CONNECT_TIMEOUT_S = 10.0
MAX_LINE_BYTES = 1 << 20
CODES = {401: "unauthorized", 403: "unauthorized", 408: "timeout", 429: "overloaded", 503: "overloaded"}
URL = re.compile(r"https?://[^/?#\s]+(/[^?#\s]*)?")
WORDS = 300  # characters of a server's own message that are passed on


class _Choice(Struct, frozen=True):
    text: str = ""
    finish_reason: str | None = None


class _Usage(Struct, frozen=True):
    completion_tokens: int


class _Chunk(Struct, frozen=True):
    """What is read of a server-sent event."""

    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: msgspec.Raw = msgspec.Raw(b"null")


class _Models(Struct, frozen=True):
    class Model(Struct, frozen=True):
        id: str

    data: tuple[Model, ...]


_chunk_decoder = msgspec.json.Decoder(_Chunk)
_models_decoder = msgspec.json.Decoder(_Models)


def check_url(url: str) -> str:
    """Return the server's base, without `/v1`. Raises ConfigError if it is no URL."""
    if not URL.fullmatch(url):
        raise ConfigError(f"{url!r} is no URL of a server, such as http://127.0.0.1:8000")
    return url.rstrip("/").removesuffix("/v1")


class OpenAITarget:
    """A server with an OpenAI API, as `Target`. It must take token ids for a prompt and `ignore_eos`, as vLLM does."""

    def __init__(self, session: ClientSession, base: str, model: str) -> None:
        self._session = session
        self._base = base
        self._model = model
        self._now = asyncio.get_running_loop().time

    @classmethod
    @asynccontextmanager
    async def connect(cls, url: str, *, model: str = "", api_key: str = "") -> AsyncIterator[OpenAITarget]:
        """Open a pool of connections to the server at `url`; without `model` it is asked for the one it serves.

        Raises:
            ConfigError: aiohttp is not installed, or `url` is none.
            PDError: the server cannot be reached, or names no model.
        """
        try:
            import aiohttp
        except ImportError:
            raise ConfigError("driving a server by its URL needs aiohttp: pip install 'pdactors[bench]'") from None
        base = check_url(url)
        async with aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            read_bufsize=MAX_LINE_BYTES,
        ) as session:
            target = cls(session, base, model)
            if not model:
                target._model = await target._served_model()
            yield target

    async def ask(self, request: Request, stamps: list[float]) -> Answer:
        """See `Target`."""
        import aiohttp

        body = {
            "model": self._model,
            "prompt": request.prompt,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        headers = {"Content-Type": "application/json"}
        try:
            async with self._session.post(
                f"{self._base}/v1/completions", data=msgspec.json.encode(body), headers=headers
            ) as response:
                await _check(response)
                return await self._read(response, stamps)
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(f"{self._base}: {error or type(error).__name__}") from error

    async def _read(self, response: ClientResponse, stamps: list[float]) -> Answer:
        """Read the stream to its end. Each piece counts as one token, until the usage says how many there were."""
        usage: _Usage | None = None
        is_last_empty = False
        while line := await _next_line(response):
            if not line.startswith(b"data:"):
                continue  # a comment, or the blank line between events
            data = line[5:].strip()
            if data == b"[DONE]":
                break
            chunk = _parse(data)
            if (error := bytes(chunk.error)) != b"null":
                raise error_for("internal", _words(error))
            usage = chunk.usage or usage
            for choice in chunk.choices:
                stamps.append(self._now())
                is_last_empty = not choice.text and choice.finish_reason is not None
        else:
            raise ConnectionLost(f"{self._base} ended a stream before it was done")
        if is_last_empty and (usage is None or usage.completion_tokens < len(stamps)):
            stamps.pop()  # it only told why the answer ended
        return Answer(len(stamps) if usage is None else usage.completion_tokens)

    async def _served_model(self) -> str:
        import aiohttp

        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S), self._session.get(f"{self._base}/v1/models") as response:
                await _check(response)
                models = _models_decoder.decode(await response.content.read(MAX_LINE_BYTES)).data
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLost(f"nobody answers at {self._base}: {error or type(error).__name__}") from error
        except msgspec.DecodeError as error:
            raise PDError(f"{self._base}/v1/models: {error}") from None
        if not models:
            raise PDError(f"{self._base} serves no model")
        return models[0].id


async def _check(response: ClientResponse) -> None:
    """Raise the error that a status other than 200 stands for."""
    if response.status != 200:
        code = CODES.get(response.status, "bad_request" if response.status < 500 else "internal")
        raise error_for(code, f"HTTP {response.status}: {_words(await response.content.read(MAX_LINE_BYTES))}")


async def _next_line(response: ClientResponse) -> bytes:
    from aiohttp.http import HttpProcessingError

    try:
        return await response.content.readline()
    except (HttpProcessingError, ValueError):  # the library's, for a line that does not fit; it was the latter once
        raise PDError(f"a line of more than {MAX_LINE_BYTES} bytes came") from None


def _parse(data: bytes) -> _Chunk:
    try:
        return _chunk_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PDError(f"an event came that is no completion: {error}") from None


def _words(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:WORDS]
