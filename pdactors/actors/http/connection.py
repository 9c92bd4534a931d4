"""`Connection`: uvicorn's, with limits on how long a client may take to ask and to read."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from pdactors.actors.http.objects import HttpError
from pdactors.actors.lobby import connections_allowed

HEADERS_S = 20.0  # from a request's first byte to its last header
UNREAD_S = 20.0  # how long what we wrote may wait for a client that does not read


class Connection(H11Protocol):
    """One client. The server calls `mind` about every second."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._asking_since: float | None = None
        self._unread_since: float | None = None
        self._idle_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._asking_since = self._idle_since = self.loop.time()
        if len(self.connections) > connections_allowed():
            self._make_room()

    def data_received(self, data: bytes) -> None:
        if self._asking_since is None and not self._is_answering:
            self._asking_since = self.loop.time()
        super().data_received(data)

    def resume_writing(self) -> None:
        self._unread_since = None
        super().resume_writing()

    def on_response_complete(self) -> None:
        self._asking_since = None
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def mind(self, now: float) -> str:
        """End the connection if its client takes too long; returns what for, or ""."""
        if self._is_answering:
            self._asking_since = None
        if not self.transport.get_write_buffer_size():
            self._unread_since = None
        elif self._unread_since is None:
            self._unread_since = now
        if self._asking_since is not None and now - self._asking_since > HEADERS_S:
            why = "its request does not come"
        elif self._unread_since is not None and now - self._unread_since > UNREAD_S:
            why = "it does not read"
        else:
            return ""
        self.transport.abort()
        return why

    def _make_room(self) -> None:
        """End the connection that has been without a complete request for longest; ours if all others have one."""
        idle = [other for other in self.connections if isinstance(other, Connection) and not other._is_answering]
        min(idle, key=lambda other: other._idle_since).transport.abort()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, or has too many headers, in the API's own form."""
        if self.conn.our_state is not h11.IDLE:  # an answer is under way
            self.transport.abort()
            return
        refused = HttpError(400, f"malformed request: {msg}", code="bad_request")
        headers = [("content-type", "application/json"), ("connection", "close")]
        for event in (
            h11.Response(status_code=400, headers=headers, reason=b"Bad Request"),
            h11.Data(data=refused.body()),
            h11.EndOfMessage(),
        ):
            self.transport.write(self.conn.send(event))
        self.transport.close()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete
