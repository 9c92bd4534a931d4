"""What every message transport promises; the contract tests hold each of them to it.

Messages are lists of frames. Between two ends they arrive whole, in order and at most once. Nothing blocks: a
full queue raises `Busy`, a peer that is known to be gone raises `PeerGone`. A message that was accepted can still
be lost with its peer, or with the connection to it unless the transport is lossless.

    Transport --listen--> Listener   many peers, each known by the identity that it connected with
              --connect-> Channel    one peer, which may appear later; what is sent meanwhile waits in the queue
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol, TypeAlias

from pdactors.errors import ConnectionLost, PDError

Peer: TypeAlias = bytes
Frames: TypeAlias = Sequence[bytes | memoryview]
Receive: TypeAlias = Callable[[Peer, list[bytes]], None]


class PeerGone(ConnectionLost):
    """No such peer is connected."""


class Busy(PDError):
    """The queue to that peer is full."""

    code = "busy"


class Channel(Protocol):
    """One end of a connection that this side opened."""

    def send(self, frames: Frames) -> None:
        """Queue a message.

        Raises:
            Busy: the queue is full; nothing was queued.
            PeerGone: the channel is closed.
        """

    def close(self) -> None:
        """Flush what is queued for at most a moment, then close; idempotent."""

    def abort(self) -> None:
        """Close at once and drop what is queued; idempotent."""


class Listener(Protocol):
    """An address that peers connect to."""

    @property
    def address(self) -> str:
        """The address that a peer can connect to, with its port resolved."""

    def send(self, peer: Peer, frames: Frames) -> None:
        """Queue a message to a connected peer.

        Raises:
            PeerGone: no peer with that identity is connected.
            Busy: the queue to that peer is full; nothing was queued.
        """

    def cut(self, peer: Peer) -> None:
        """End the connection to a peer, whatever it still sends; it may connect again."""

    def close(self) -> None:
        """Flush what is queued for at most a moment, then close; idempotent."""

    def abort(self) -> None:
        """Close at once and drop what is queued; idempotent."""


class Transport(Protocol):
    """Opens listeners and channels on the running event loop; messages arrive by callback on that loop."""

    def listen(
        self,
        address: str,
        receive: Receive,
        *,
        fd: int | None = None,
        max_bytes: int = ...,
        admits: Collection[str] | None = None,
    ) -> Listener:
        """Listen on `address`, or on the listening TCP socket `fd` that somebody bound to it.

        A frame of more than `max_bytes`, or a message that goes on and on, costs its sender the connection. `receive`
        is called with the sender's identity. Where the transport has keys, only peers with one of the public keys in
        `admits` get in; without it those with the cluster's own.

        Raises:
            ConnectionLost: the address is in use or cannot be bound.
        """

    def connect(self, address: str, identity: Peer, receive: Receive) -> Channel:
        """Open a channel; `receive` is called with the identity b"" (there is one peer)."""

    def close(self) -> None:
        """Close everything that was opened here; idempotent."""
