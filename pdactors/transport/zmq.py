"""ZeroMQ: ROUTER listeners and DEALER channels on the asyncio loop. The only module that imports zmq.

A socket's descriptor is edge-triggered: it says "look at the state", once. So every wake-up, and every send
(which may swallow the edge), is followed by a drain until ZeroMQ says that nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import os

import zmq
from zmq import constants

from pdactors.errors import ConnectionLost
from pdactors.transport.contracts import Busy, Frames, Peer, PeerGone, Receive

MAX_QUEUE = 10_000
MAX_BYTES = 1 << 26
LINGER_MS = 300
DRAIN_BATCH = 256  # messages handled before the loop's other work gets a turn


class ZmqTransport:
    """One ZeroMQ context and what was opened in it."""

    def __init__(self) -> None:
        self._context = zmq.Context(io_threads=1)
        self._sockets: list[_Socket] = []

    def listen(
        self, address: str, receive: Receive, *, fd: int | None = None, max_bytes: int = MAX_BYTES
    ) -> ZmqListener:
        socket = self._socket(zmq.ROUTER, max_bytes)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.IPV6, "[" in address)
        if fd is not None:
            socket.setsockopt(constants.SocketOption.USE_FD, os.dup(fd))
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConnectionLost(f"cannot listen on {address}: {error}") from error
        listener = ZmqListener(socket, receive)
        self._sockets.append(listener)
        return listener

    def connect(self, address: str, identity: Peer, receive: Receive) -> ZmqChannel:
        socket = self._socket(zmq.DEALER, MAX_BYTES)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.IPV6, "[" in address)
        socket.setsockopt(zmq.RECONNECT_IVL, 50)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConnectionLost(f"cannot connect to {address}: {error}") from error
        channel = ZmqChannel(socket, receive)
        self._sockets.append(channel)
        return channel

    def _socket(self, kind: int, max_bytes: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.SNDHWM, MAX_QUEUE)
        socket.setsockopt(zmq.RCVHWM, MAX_QUEUE)
        socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
        return socket

    def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        self._sockets.clear()
        self._context.term()


class _Socket:
    """A socket that is read on the running loop."""

    def __init__(self, socket: zmq.Socket[bytes], receive: Receive) -> None:
        self._socket = socket
        self._receive = receive
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._drain_planned = False
        self._loop.add_reader(self._fd, self._drain)
        self._plan_drain()

    def _plan_drain(self) -> None:
        if not self._drain_planned:
            self._drain_planned = True
            self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._drain_planned = False
        for _ in range(DRAIN_BATCH):
            if self._socket.closed:
                return
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deliver(frames)
        self._plan_drain()

    def _deliver(self, frames: list[bytes]) -> None:
        raise NotImplementedError

    def _send(self, frames: Frames) -> None:
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again as error:
            raise Busy(f"{MAX_QUEUE} messages are waiting") from error
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGone(f"{bytes(frames[0])!r} is not connected") from error
            raise PeerGone(f"the socket is closed: {error}") from error
        self._plan_drain()

    def close(self) -> None:
        self._close(LINGER_MS)

    def abort(self) -> None:
        self._close(0)

    def _close(self, linger_ms: int) -> None:
        if not self._socket.closed:
            with contextlib.suppress(RuntimeError):  # the loop may be closed already
                self._loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)


class ZmqListener(_Socket):
    def __init__(self, socket: zmq.Socket[bytes], receive: Receive) -> None:
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        super().__init__(socket, receive)

    def send(self, peer: Peer, frames: Frames) -> None:
        self._send([peer, *frames])

    def _deliver(self, frames: list[bytes]) -> None:
        self._receive(frames[0], frames[1:])


class ZmqChannel(_Socket):
    def send(self, frames: Frames) -> None:
        self._send(frames)

    def _deliver(self, frames: list[bytes]) -> None:
        self._receive(b"", frames)
