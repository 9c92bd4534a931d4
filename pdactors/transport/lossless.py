"""`LosslessTransport`: connections may break, and what is under way on them arrives all the same.

ZeroMQ connects anew by itself and keeps what waits, but what the kernel held of a broken connection is gone. Here each
end numbers its messages and keeps them until the other end has them; who misses a number asks for it again. So a
message is lost only with the process at one of the ends.

    frame 0    _HEAD: kind, the sender's life, its number, and how far the sender has what the other end's life sent
    frames 1.. the message; none unless the kind is _MESSAGE
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import struct
from collections import deque
from collections.abc import Callable, Collection

from pdactors.transport.contracts import Busy, Channel, Frames, Listener, Peer, PeerGone, Receive, Transport

_HEAD = struct.Struct("<BQQQQ")
_MESSAGE, _PROBE, _HAVE, _AGAIN = range(4)  # a probe and the answers to it: `have it all`, `send it again`
MAX_KEPT = 10_000  # messages that the other end has not confirmed
MAX_PEERS = 4096  # of a listener, known or not
PROBE_S = 0.25
PATIENCE_S = 2.0  # for a peer to connect anew


class _End:
    """One end of a connection: what it sent, and how far it has what the other end sent.

    A life is one such object's. The other end's may change, with its process; numbers are those of a life.
    """

    def __init__(self, put: Callable[[Frames], None], *, begins_anywhere: bool) -> None:
        """`put` sends frames; `begins_anywhere` has a new life at the other end begin with any number.

        A listener that starts anew finds channels in the middle of their lives; a channel never finds a listener so.
        """
        self._put = put
        self._begins_anywhere = begins_anywhere
        self._life = secrets.randbits(63)
        self._other = 0
        self._num_sent = self._num_received = 0
        self._kept: deque[tuple[int, Frames]] = deque()
        self._has_asked = self._is_closed = False
        self._lost_s: float | None = None  # since when nobody is connected
        self._resent_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._probing: asyncio.TimerHandle | None = None

    @property
    def _is_gone(self) -> bool:
        """Whether nobody has been connected for too long."""
        return self._lost_s is not None and self._loop.time() - self._lost_s > PATIENCE_S

    def send(self, frames: Frames) -> None:
        """Send a message, now or when the peer is connected again; raises what a channel does."""
        if len(self._kept) >= MAX_KEPT:
            raise Busy(f"{MAX_KEPT} messages are not confirmed")
        try:
            self._transmit(_MESSAGE, self._num_sent + 1, frames)
        except PeerGone:
            if self._is_closed or self._is_gone:
                raise
        self._num_sent += 1
        self._kept.append((self._num_sent, frames))
        self._plan_probe()

    def take(self, frames: list[bytes]) -> list[bytes] | None:
        """Return the message that arrived, [] for what is none of ours; None if there is none for the owner."""
        if not frames or len(frames[0]) != _HEAD.size:
            return []
        kind, life, number, of, confirmed = _HEAD.unpack(frames[0])
        self._lost_s = None
        if life != self._other:
            self._other, self._has_asked = life, False
            self._num_received = number - (kind == _MESSAGE) if self._begins_anywhere else 0
        while of == self._life and self._kept and self._kept[0][0] <= confirmed:
            self._kept.popleft()
        if kind == _MESSAGE and number == self._num_received + 1:
            self._num_received, self._has_asked = number, False
            return frames[1:]
        with contextlib.suppress(PeerGone, Busy):  # the other end probes again
            if kind == _PROBE or (kind == _MESSAGE and number > self._num_received and not self._has_asked):
                self._has_asked = number > self._num_received
                self._transmit(_AGAIN if self._has_asked else _HAVE, self._num_sent)
            elif kind == _AGAIN and self._loop.time() - self._resent_s > PROBE_S / 2:
                self._resent_s = self._loop.time()
                for kept, message in list(self._kept):
                    self._transmit(_MESSAGE, kept, message)
        return None

    def close(self) -> None:
        """Keep nothing, send nothing any more."""
        self._is_closed = True
        self._kept.clear()
        if self._probing is not None:
            self._probing.cancel()

    def _transmit(self, kind: int, number: int, frames: Frames = ()) -> None:
        head = _HEAD.pack(kind, self._life, number, self._other, self._num_received)
        try:
            self._put([head, *frames])
        except PeerGone:
            self._lost_s = self._lost_s or self._loop.time()
            raise

    def _plan_probe(self) -> None:
        if self._probing is None:
            self._probing = self._loop.call_later(PROBE_S, self._probe)

    def _probe(self) -> None:
        """Ask how far the other end is, as long as that is not known; begin a new life when it is lost for good."""
        self._probing = None
        if self._is_gone:
            self._kept.clear()
            self._life, self._num_sent = secrets.randbits(63), 0
        elif self._kept:
            with contextlib.suppress(PeerGone, Busy):
                self._transmit(_PROBE, self._num_sent)
            self._plan_probe()


class LosslessTransport:
    """Another transport whose messages survive its connections. Both ends have to be of this kind."""

    def __init__(self, inner: Transport) -> None:
        self._inner = inner
        self._opened: list[LosslessListener | LosslessChannel] = []

    def listen(
        self,
        address: str,
        receive: Receive,
        *,
        fd: int | None = None,
        max_bytes: int = 1 << 26,
        admits: Collection[str] | None = None,
    ) -> LosslessListener:
        listener = LosslessListener(receive)
        listener.open(self._inner.listen(address, listener.receive, fd=fd, max_bytes=max_bytes, admits=admits))
        self._opened.append(listener)
        return listener

    def connect(self, address: str, identity: Peer, receive: Receive) -> LosslessChannel:
        channel = LosslessChannel(receive)
        channel.open(self._inner.connect(address, identity, channel.receive))
        self._opened.append(channel)
        return channel

    def close(self) -> None:
        for end in self._opened:
            end.close()
        self._opened.clear()
        self._inner.close()


class LosslessChannel:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._inner: Channel
        self._end = _End(lambda frames: self._inner.send(frames), begins_anywhere=False)

    def open(self, inner: Channel) -> None:
        self._inner = inner

    def receive(self, peer: Peer, frames: list[bytes]) -> None:
        message = self._end.take(frames)
        if message is not None:
            self._receive(peer, message)

    def send(self, frames: Frames) -> None:
        self._end.send(frames)

    def close(self) -> None:
        self._end.close()
        self._inner.close()

    def abort(self) -> None:
        self._end.close()
        self._inner.abort()


class LosslessListener:
    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._inner: Listener
        self._ends: dict[Peer, _End] = {}  # whoever was heard last is last

    def open(self, inner: Listener) -> None:
        self._inner = inner

    @property
    def address(self) -> str:
        return self._inner.address

    def receive(self, peer: Peer, frames: list[bytes]) -> None:
        end = self._ends.pop(peer, None)
        if end is None:
            end = _End(lambda frames: self._inner.send(peer, frames), begins_anywhere=True)
        self._ends[peer] = end
        if len(self._ends) > MAX_PEERS:
            self._ends.pop(next(iter(self._ends))).close()
        message = end.take(frames)
        if message is not None:
            self._receive(peer, message)

    def send(self, peer: Peer, frames: Frames) -> None:
        end = self._ends.get(peer)
        if end is None:
            raise PeerGone(f"{bytes(peer)!r} is not connected")
        end.send(frames)

    def cut(self, peer: Peer) -> None:
        self._inner.cut(peer)

    def close(self) -> None:
        self._forget_all()
        self._inner.close()

    def abort(self) -> None:
        self._forget_all()
        self._inner.abort()

    def _forget_all(self) -> None:
        for end in self._ends.values():
            end.close()
        self._ends.clear()
