"""`HttpServer`: the OpenAI API on a listening socket that the supervisor holds, in the gateway's own loop."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
import socket
from email.utils import formatdate
from typing import TYPE_CHECKING

import uvicorn
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pdactors.actors.http.api import Api, answer
from pdactors.actors.http.connection import Connection
from pdactors.actors.http.objects import HttpError
from pdactors.actors.http.pages import is_page
from pdactors.errors import Unauthorized

if TYPE_CHECKING:
    from pdactors.actors.gateway import Gateway

MAX_HEADER_BYTES = 32 << 10
IDLE_S = 60  # how long a connection without a request stays open
LAST_WORDS_S = 0.15  # for answers that the end of the run cuts short
OPEN_PATHS = {"/health"}  # that need no token, and neither do pages
_REQUEST_ID = re.compile(r"[!-~]{1,128}")


class HttpServer:
    """Serves until `close`."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._server: uvicorn.Server | None = None

    async def start(self, fd: int) -> None:
        """Serve the listening socket `fd`."""
        config = uvicorn.Config(
            _Front(self._gateway, Api(self._gateway).app),
            http=Connection,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            log_level="error",  # what clients do wrong is theirs to hear
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=1024,
            timeout_keep_alive=IDLE_S,
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        )
        config.load()
        server = uvicorn.Server(config)
        # Not `serve`: it would take the signals, and look for its end every 0.1 s only.
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=[socket.socket(fileno=fd)])
        self._server = server
        self._mind()
        self._gateway.every(1.0, self._mind)

    async def close(self) -> None:
        """Stop listening, and let answers that have been ended reach their clients for a moment."""
        if self._server is None:
            return
        for listening in self._server.servers:
            listening.close()
        state, self._server = self._server.server_state, None
        for connection in list(state.connections):
            connection.shutdown()
        if state.tasks:
            await asyncio.wait(state.tasks, timeout=LAST_WORDS_S)
        for connection in list(state.connections):
            connection.transport.close()

    def _mind(self) -> None:
        if self._server is None:
            return
        state, now = self._server.server_state, asyncio.get_running_loop().time()
        state.default_headers = [(b"date", formatdate(usegmt=True).encode())]
        for connection in list(state.connections):
            if isinstance(connection, Connection) and (why := connection.mind(now)):
                self._gateway.log.warning("client cut off", reason=why)


class _Front:
    """Gives each request its id, sends the id back, and turns away whoever does not show the token."""

    def __init__(self, gateway: Gateway, app: ASGIApp) -> None:
        self._token = gateway.token.encode()
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        id = given if _REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(12)}"
        kept = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        scope = {**scope, "headers": [*kept, (b"x-request-id", id.encode())]}

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message.setdefault("headers", [])
                MutableHeaders(scope=message)["x-request-id"] = id
            await send(message)

        is_open = scope["path"] in OPEN_PATHS or is_page(scope["path"])
        if self._token and not is_open and not self._is_known(headers.get("authorization", "")):
            refused = HttpError.of(Unauthorized("missing or wrong token: send Authorization: Bearer TOKEN"))
            await answer(refused)(scope, receive, send_with_id)
        else:
            await self._app(scope, receive, send_with_id)

    def _is_known(self, authorization: str) -> bool:
        scheme, _, token = authorization.partition(" ")
        return scheme.lower() == "bearer" and hmac.compare_digest(token.strip().encode(), self._token)
