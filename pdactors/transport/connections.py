"""`Connections`: how many TCP connections a ZeroMQ listener has, and what they hold that is no complete message.

ZeroMQ bounds a frame, but not the frames of a message, and keeps them until the last has come.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import termios
from dataclasses import dataclass

MAX_CONNECTIONS = 1024  # of a listener; beyond it the one that was silent for longest is cut
SILENT_START_S = 20.0  # for the first message
_RECEIVED = struct.Struct("=128xQ")  # tcpi_bytes_received of Linux' struct tcp_info


@dataclass
class _Connection:
    socket: socket.socket  # a duplicate, so that its number is nobody else's while we look at it
    heard_s: float
    peer: bytes | None = None
    settled_bytes: int = 0  # of what it sent, when nothing of it was left to be taken
    taken_bytes: int = 0  # since then

    def cut(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def received_bytes(self) -> int:
        """Return how much ZeroMQ has read of it."""
        (total,) = _RECEIVED.unpack(self.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED.size))
        waiting = struct.unpack("i", fcntl.ioctl(self.socket, termios.FIONREAD, bytes(4)))[0]
        return int(total - waiting)


class Connections:
    """The connections of one listener, by the descriptor that ZeroMQ has for them."""

    def __init__(self, *, max_unread_bytes: int, max_connections: int = 0) -> None:
        self._max_unread_bytes = max_unread_bytes
        self._max_connections = max_connections or MAX_CONNECTIONS
        self._of: dict[int, _Connection] = {}
        self._fd_of: dict[bytes, int] = {}

    def __contains__(self, fd: int) -> bool:
        return fd in self._of

    def begin(self, fd: int, now: float) -> None:
        """A peer has connected."""
        self.end(fd)
        try:
            self._of[fd] = _Connection(socket.socket(fileno=os.dup(fd)), now)
        except OSError:
            return  # it is gone already
        if len(self._of) > self._max_connections:
            min(self._of.values(), key=lambda connection: connection.heard_s).cut()

    def heard(self, peer: bytes, fd: int, size: int, now: float) -> None:
        """A complete message of `size` bytes came."""
        connection = self._of.get(fd)
        if connection is None:
            return  # these were its last bytes
        connection.heard_s = now
        connection.taken_bytes += size + 1
        if connection.peer != peer:  # the former had this number before, and its last message was taken late
            self._forget(connection, fd)
            connection.peer = peer
            self._fd_of[peer] = fd

    def check(self, now: float, *, is_all_taken: bool) -> None:
        """Cut those that send without an end, or faster than they are read, or nothing at all."""
        for connection in self._of.values():
            try:
                received = connection.received_bytes()
            except OSError:
                continue
            if is_all_taken and connection.taken_bytes:
                connection.settled_bytes, connection.taken_bytes = received, 0
            unread = received - connection.settled_bytes - connection.taken_bytes
            is_silent = connection.peer is None and now - connection.heard_s > SILENT_START_S
            if unread > self._max_unread_bytes or is_silent:
                connection.cut()

    def cut(self, peer: bytes) -> None:
        """End a peer's connection."""
        if (connection := self._of.get(self._fd_of.get(peer, -1))) is not None:
            connection.cut()

    def end(self, fd: int) -> None:
        """A connection has ended."""
        connection = self._of.pop(fd, None)
        if connection is not None:
            connection.socket.close()
            self._forget(connection, fd)

    def _forget(self, connection: _Connection, fd: int) -> None:
        if connection.peer is not None and self._fd_of.get(connection.peer) == fd:
            del self._fd_of[connection.peer]

    def close(self) -> None:
        """Forget all."""
        for fd in list(self._of):
            self.end(fd)
