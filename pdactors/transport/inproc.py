"""Messages inside one process: the reference that the other transports are held against, and the test double."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection

from pdactors.errors import ConnectionLost
from pdactors.transport.contracts import Busy, Frames, Peer, PeerGone, Receive

MAX_QUEUE = 10_000
_listeners: dict[str, InprocListener] = {}
_waiting: dict[str, list[InprocChannel]] = {}


class InprocTransport:
    """All transports of a process share one name space of addresses."""

    def __init__(self) -> None:
        self._opened: list[InprocListener | InprocChannel] = []

    def listen(
        self,
        address: str,
        receive: Receive,
        *,
        fd: int | None = None,
        max_bytes: int = 1 << 26,
        admits: Collection[str] | None = None,
    ) -> InprocListener:
        if fd is not None:
            raise ConnectionLost("an inproc address has no file descriptor")
        if address in _listeners:
            raise ConnectionLost(f"{address} is in use")
        listener = InprocListener(address, receive, max_bytes)
        _listeners[address] = listener
        self._opened.append(listener)
        for channel in _waiting.pop(address, []):
            channel.attach(listener)
        return listener

    def connect(self, address: str, identity: Peer, receive: Receive) -> InprocChannel:
        channel = InprocChannel(address, identity, receive)
        self._opened.append(channel)
        if address in _listeners:
            channel.attach(_listeners[address])
        else:
            _waiting.setdefault(address, []).append(channel)
        return channel

    def close(self) -> None:
        for end in self._opened:
            end.close()
        self._opened.clear()


class _Inbox:
    """Delivers messages to `receive` in order, one per turn of the loop."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._queue: deque[tuple[Peer, list[bytes]]] = deque()
        self._closed = False

    def put(self, peer: Peer, frames: Frames) -> None:
        if len(self._queue) >= MAX_QUEUE:
            raise Busy(f"{MAX_QUEUE} messages are waiting")
        self._queue.append((peer, [bytes(frame) for frame in frames]))
        asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        if self._queue and not self._closed:
            self._receive(*self._queue.popleft())

    def close(self) -> None:
        self._closed = True
        self._queue.clear()


class InprocListener:
    def __init__(self, address: str, receive: Receive, max_bytes: int) -> None:
        self.address = address
        self.max_bytes = max_bytes
        self.inbox = _Inbox(receive)
        self.channels: dict[Peer, InprocChannel] = {}

    def send(self, peer: Peer, frames: Frames) -> None:
        channel = self.channels.get(peer)
        if channel is None:
            raise PeerGone(f"{peer!r} is not connected to {self.address}")
        channel.inbox.put(b"", frames)

    def cut(self, peer: Peer) -> None:
        channel = self.channels.pop(peer, None)
        if channel is not None:
            channel.listener = None
            channel.attach(self)  # it connects again, as it would on a network

    def close(self) -> None:
        """Close; the channels wait for the address to come back, as they do on a network."""
        if _listeners.get(self.address) is not self:
            return
        del _listeners[self.address]
        self.inbox.close()
        for channel in self.channels.values():
            channel.listener = None
            _waiting.setdefault(self.address, []).append(channel)
        self.channels.clear()

    abort = close


class InprocChannel:
    def __init__(self, address: str, identity: Peer, receive: Receive) -> None:
        self.address = address
        self.identity = identity
        self.inbox = _Inbox(receive)
        self.listener: InprocListener | None = None
        self._unsent: deque[Frames] = deque()
        self._closed = False

    def attach(self, listener: InprocListener) -> None:
        if self.identity in listener.channels:  # the first holder of an identity keeps it
            return
        self.listener = listener
        listener.channels[self.identity] = self
        while self._unsent:
            self.send(self._unsent.popleft())

    def send(self, frames: Frames) -> None:
        if self._closed:
            raise PeerGone(f"the channel to {self.address} is closed")
        if self.listener is None:
            if len(self._unsent) >= MAX_QUEUE:
                raise Busy(f"{MAX_QUEUE} messages are waiting for {self.address}")
            self._unsent.append(frames)
            return
        if any(len(frame) > self.listener.max_bytes for frame in frames):
            self._leave()
            return
        self.listener.inbox.put(self.identity, frames)

    def _leave(self) -> None:
        if self.listener is not None and self.listener.channels.get(self.identity) is self:
            del self.listener.channels[self.identity]
        self.listener = None

    def close(self) -> None:
        self._closed = True
        self._leave()
        self._unsent.clear()
        if self in _waiting.get(self.address, []):
            _waiting[self.address].remove(self)
        self.inbox.close()

    abort = close
