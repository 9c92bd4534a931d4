"""`Lobby`: the connections of one listener, and who has to go when they or their unfinished requests become too many.

A connection waits from when it has nothing under way until its next request is complete. Who only waits gives way to
newcomers, the longest first; so nobody keeps others out by opening connections and saying nothing, or little.
"""

from __future__ import annotations

import resource
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

SHARES = 4  # of the process's file descriptors: each kind of client socket gets one, and the rest of it another
MAX_CONNECTIONS = 1024
MAX_UNFINISHED_BYTES = 64 << 20  # of requests that are not complete, on all connections together


class Guest(Hashable, Protocol):
    """A connection."""

    def cut(self, why: str) -> None:
        """End at once."""


G = TypeVar("G", bound=Guest)


class Lobby(Generic[G]):
    """Knows a listener's connections. All methods are idempotent."""

    def __init__(self, max_connections: int | None = None, max_bytes: int = MAX_UNFINISHED_BYTES) -> None:
        self.max_connections = max_connections or connections_allowed()
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._busy: set[G] = set()
        self._waiting: dict[G, None] = {}  # the longest first
        self._unfinished: dict[G, int] = {}  # bytes of a request so far, the oldest first

    def __len__(self) -> int:
        return len(self._busy) + len(self._waiting)

    def enter(self, guest: G) -> bool:
        """Take a new connection in; False if it has to go because all are busy."""
        if len(self) >= self.max_connections:
            if not self._waiting:
                return False
            self._send_away(next(iter(self._waiting)), "others wait for its place")
        self._waiting[guest] = None
        return True

    def wait(self, guest: G) -> None:
        """It has nothing under way, and waits anew."""
        if guest in self:
            self._busy.discard(guest)
            self._waiting.pop(guest, None)
            self._waiting[guest] = None

    def work(self, guest: G) -> None:
        """It has a request under way."""
        if self._waiting.pop(guest, guest) is None:
            self._busy.add(guest)

    def hold(self, guest: G, num_bytes: int) -> None:
        """It has so many bytes of an unfinished request; too many on all connections cost the oldest of them."""
        self._num_bytes += num_bytes - self._unfinished.get(guest, 0)
        if num_bytes:
            self._unfinished[guest] = num_bytes
        else:
            self._unfinished.pop(guest, None)
        while self._num_bytes > self._max_bytes:
            self._send_away(next(iter(self._unfinished)), "too many requests are unfinished")

    def leave(self, guest: G) -> None:
        """Its connection has ended."""
        self._busy.discard(guest)
        self._waiting.pop(guest, None)
        self._num_bytes -= self._unfinished.pop(guest, 0)

    def __contains__(self, guest: G) -> bool:
        return guest in self._busy or guest in self._waiting

    def _send_away(self, guest: G, why: str) -> None:
        self.leave(guest)
        guest.cut(why)


def connections_allowed() -> int:
    """Return how many connections a listener may have, so that file descriptors never run out."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, soft // SHARES)
