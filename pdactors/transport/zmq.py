"""ZeroMQ: ROUTER listeners and DEALER channels on the asyncio loop. The only module that imports zmq.

A socket's descriptor is edge-triggered: it says "look at the state", once. So every wake-up, and every send
(which may swallow the edge), is followed by a drain until ZeroMQ says that nothing is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections.abc import Collection, Iterator, Mapping

import zmq
from zmq import constants
from zmq.utils import z85

from pdactors.config.keys import CurveKeys
from pdactors.errors import ConfigError, ConnectionLost
from pdactors.transport.connections import Connections
from pdactors.transport.contracts import Busy, Frames, Peer, PeerGone, Receive

MAX_QUEUE = 10_000
MAX_BYTES = 1 << 26
MAX_FRAMES = 16  # of a message; what follows is dropped, and the connection with it
SKIP_FRAMES = 500  # dropped at once
SKIP_EVERY_S = 0.005
UNREAD_MESSAGES = 4  # of the largest size, that a connection may have sent without our having read them
HANDSHAKE_MS = 5000
LINGER_MS = 300
DRAIN_S = 0.005  # of messages handled before the loop's other work gets a turn
WATCH_S = 0.1
_ZAP = "inproc://zeromq.zap.01"  # where ZeroMQ asks whom to let in: https://rfc.zeromq.org/spec/27
_numbers = itertools.count()


def make_pair() -> tuple[str, str]:
    """Make a CURVE key pair: public and secret key, 40 characters of Z85 each."""
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class ZmqTransport:
    """One ZeroMQ context and what was opened in it; with `keys` everything speaks CURVE; its threads run on `cores`."""

    def __init__(self, keys: CurveKeys | None = None, cores: Collection[int] = ()) -> None:
        self._context = zmq.Context(io_threads=1)
        for core in cores:
            self._context.set(zmq.THREAD_AFFINITY_CPU_ADD, core)
        self._sockets: list[_Socket] = []
        self._keys = keys
        self._admitted: dict[bytes, frozenset[bytes]] = {}  # public keys, by the listener's ZAP domain

    def listen(
        self,
        address: str,
        receive: Receive,
        *,
        fd: int | None = None,
        max_bytes: int = MAX_BYTES,
        admits: Collection[str] | None = None,
    ) -> ZmqListener:
        with self._opening(zmq.ROUTER, max_bytes) as socket:
            socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
            socket.setsockopt(zmq.IPV6, "[" in address)
            socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
            if self._keys is not None:
                self._be_curve_server(socket, self._keys, [self._keys.server] if admits is None else admits)
            if fd is not None:
                socket.setsockopt(constants.SocketOption.USE_FD, os.dup(fd))
            connections = Connections(max_unread_bytes=UNREAD_MESSAGES * max_bytes)
            watching = _Watching(self._context, socket, connections)
            self._sockets.append(watching)
            try:
                socket.bind(address)
            except zmq.ZMQError as error:
                raise ConnectionLost(f"cannot listen on {address}: {error}") from error
            listener = ZmqListener(socket, receive, connections, watching)
        self._sockets.append(listener)
        return listener

    def connect(self, address: str, identity: Peer, receive: Receive) -> ZmqChannel:
        with self._opening(zmq.DEALER, MAX_BYTES) as socket:
            socket.setsockopt(zmq.IDENTITY, identity)
            socket.setsockopt(zmq.IPV6, "[" in address)
            socket.setsockopt(zmq.RECONNECT_IVL, 50)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
            if self._keys is not None:
                _set_key(socket, self._keys)
                socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server.encode())
            try:
                socket.connect(address)
            except zmq.ZMQError as error:
                raise ConnectionLost(f"cannot connect to {address}: {error}") from error
            channel = ZmqChannel(socket, receive)
        self._sockets.append(channel)
        return channel

    @contextlib.contextmanager
    def _opening(self, kind: int, max_bytes: int) -> Iterator[zmq.Socket[bytes]]:
        """Make a socket, which is closed again if it cannot be used: the context waits for every one."""
        socket = self._context.socket(kind)
        try:
            socket.setsockopt(zmq.SNDHWM, MAX_QUEUE)
            socket.setsockopt(zmq.RCVHWM, MAX_QUEUE)
            socket.setsockopt(zmq.MAXMSGSIZE, max_bytes)
            yield socket
        except BaseException:
            socket.close(linger=0)
            raise

    def _be_curve_server(self, socket: zmq.Socket[bytes], keys: CurveKeys, admits: Collection[str]) -> None:
        if not self._admitted:
            self._sockets.append(_Doorkeeper(self._context, self._admitted))
        domain = b"listener-%d" % len(self._admitted)
        self._admitted[domain] = frozenset(z85.decode(key) for key in admits)
        _set_key(socket, keys)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, domain)
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)

    def close(self) -> None:
        for socket in reversed(self._sockets):  # a listener before what watches it
            socket.close()
        self._sockets.clear()
        self._context.term()


def _set_key(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    secret = keys.secret.encode()
    try:
        public = zmq.curve_public(secret)
        socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
    except (zmq.ZMQError, ValueError):
        raise ConfigError("a CURVE key file does not hold a valid key; `pdactors keys` makes them") from None


class _Pause(Exception):
    """The loop's other work comes first, for so many seconds, or a turn."""


class _Socket:
    """A socket that is read on the running loop."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket
        self._loop = asyncio.get_running_loop()
        self._fd = int(socket.getsockopt(zmq.FD))
        self._drain_planned = False
        self._loop.add_reader(self._fd, self.drain)
        self._plan_drain()

    def _plan_drain(self, delay_s: float = 0.0) -> None:
        if not self._drain_planned:
            self._drain_planned = True
            if delay_s:
                self._loop.call_later(delay_s, self.drain)
            else:
                self._loop.call_soon(self.drain)

    def drain(self) -> bool:
        """Handle what has arrived, for a few milliseconds at most; says whether nothing is left."""
        self._drain_planned = False
        until = self._loop.time() + DRAIN_S
        while not self._socket.closed:
            try:
                self._take()
                if self._loop.time() > until:
                    raise _Pause
            except zmq.Again:
                return True
            except _Pause as pause:
                self._plan_drain(*pause.args)
                break
        return False

    def _take(self) -> None:
        """Receive and handle one message; raises zmq.Again if there is none."""
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
    """A ROUTER socket, whose connections are watched: ZeroMQ itself bounds neither their number nor what they hold."""

    def __init__(
        self, socket: zmq.Socket[bytes], receive: Receive, connections: Connections, watching: _Watching
    ) -> None:
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._receive = receive
        self._connections = connections
        self._watching = watching
        self._is_skipping = False  # in the midst of a message with too many frames
        super().__init__(socket)
        self._loop.call_soon(self._watch)  # nothing is received before whoever listens has the listener

    def send(self, peer: Peer, frames: Frames) -> None:
        self._send([peer, *frames])

    def cut(self, peer: Peer) -> None:
        self._connections.cut(peer)

    def _take(self) -> None:
        if self._is_skipping:
            self._skip()
            return
        head = self._socket.recv(zmq.NOBLOCK, copy=False)
        peer, fd = head.bytes, _fd_of(head)
        if fd not in self._connections:
            self._watching.drain()  # the news of it came before the message
        frames: list[bytes] = []
        while self._socket.getsockopt(zmq.RCVMORE):
            if len(frames) == MAX_FRAMES:
                self._is_skipping = True  # the rest is for nobody
                break
            frames.append(self._socket.recv(zmq.NOBLOCK))
        self._connections.heard(peer, fd, sum(map(len, frames)), self._loop.time())
        if self._is_skipping:
            self._connections.cut(peer)
        self._receive(peer, frames)

    def _skip(self) -> None:
        """Drop a few more frames of a message that has too many; others get their turn in between."""
        for _ in range(SKIP_FRAMES):
            if not self._socket.recv(zmq.NOBLOCK, copy=False).more:
                self._is_skipping = False
                return
        raise _Pause(SKIP_EVERY_S)

    def _watch(self) -> None:
        """Look after the connections now and then; if everything complete was taken, only the rest counts."""
        if not self._socket.closed:
            self._connections.check(self._loop.time(), is_all_taken=self.drain())
            self._loop.call_later(WATCH_S, self._watch)

    def _close(self, linger_ms: int) -> None:
        self._connections.close()
        super()._close(linger_ms)


def _fd_of(frame: zmq.Frame) -> int:
    try:
        return int(frame.get(zmq.SRCFD))
    except zmq.ZMQError:
        return -1  # its sender had left before ZeroMQ looked at the connection


class ZmqChannel(_Socket):
    def __init__(self, socket: zmq.Socket[bytes], receive: Receive) -> None:
        self._receive = receive
        super().__init__(socket)

    def send(self, frames: Frames) -> None:
        self._send(frames)

    def _take(self) -> None:
        self._receive(b"", self._socket.recv_multipart(zmq.NOBLOCK))


class _Watching(_Socket):
    """ZeroMQ's news of a listener's connections."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], of: zmq.Socket[bytes], connections: Connections
    ) -> None:
        address = f"inproc://connections-{next(_numbers)}"
        of.monitor(address, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        socket = context.socket(zmq.PAIR)
        socket.setsockopt(zmq.RCVHWM, 0)  # ZeroMQ's thread would wait for us
        socket.connect(address)
        self._connections = connections
        super().__init__(socket)

    def _take(self) -> None:
        news = self._socket.recv_multipart(zmq.NOBLOCK)[0]
        event, fd = int.from_bytes(news[:2], sys.byteorder), int.from_bytes(news[2:6], sys.byteorder)
        if event == zmq.EVENT_ACCEPTED:
            self._connections.begin(fd, self._loop.time())
        elif event == zmq.EVENT_DISCONNECTED:
            self._connections.end(fd)


class _Doorkeeper(_Socket):
    """Tells ZeroMQ which CURVE keys may connect to which listener."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admitted: Mapping[bytes, Collection[bytes]]) -> None:
        self._admitted = admitted
        socket = context.socket(zmq.REP)
        socket.bind(_ZAP)
        super().__init__(socket)

    def _take(self) -> None:
        version, request, domain, _address, _identity, mechanism, *credentials = self._socket.recv_multipart(
            zmq.NOBLOCK
        )
        is_known = mechanism == b"CURVE" and credentials[0] in self._admitted.get(domain, ())
        status, text = (b"200", b"") if is_known else (b"400", b"unknown key")
        self._send([version, request, status, text, b"", b""])
