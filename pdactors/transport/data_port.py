"""What every data port promises: KV moves between the memories of two migrators, and nothing else does.

A transfer is a row of buffers that one end sends and the other receives, each straight from memory into memory. Both
ends know its tag and the sizes of its buffers beforehand, from the control plane; the port knows no blocks, no headers,
and nothing of who may send what.

    DataPort --connect(peer, address)--> connection --send / receive(tag, buffers)--> ended(error or None)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from pdactors.errors import ConnectionLost, PDError

Buffer: TypeAlias = Any  # contiguous memory: the buffer protocol, or `__cuda_array_interface__`; writable to receive
Ended: TypeAlias = Callable[[PDError | None], None]
Lost: TypeAlias = Callable[[str, PDError], None]

TAG_BITS = 48  # of a transfer's tag
MAX_BUFFERS = 256  # of one transfer


class DataPort(Protocol):
    """One migrator's end. Everything is called from its event loop, and calls back on it."""

    @property
    def address(self) -> bytes:
        """What a peer needs to reach this port; it travels over the authenticated control plane."""

    def connect(self, peer: str, address: bytes, lost: Lost) -> None:
        """Make a peer reachable under a name of the caller's choosing; both ends do it, once each per connection.

        `lost` is called once, with the name, if the connection fails by itself, as it does when the peer's process
        dies; it is gone by then. A peer that is only silent is not noticed.

        Raises:
            ConnectionLost: the address makes no sense, or the peer is connected already.
        """

    def send(self, peer: str, tag: int, buffers: Sequence[Buffer], ended: Ended) -> None:
        """Send a transfer. The buffers must live, and keep their bytes, until `ended` is called.

        `ended` is called exactly once, later, with what went wrong or None. None says that the buffers may be used
        again, not that the peer has got them.

        Raises:
            ConnectionLost: the peer is not connected.
            ValueError: the tag or the number of buffers is out of range.
        """

    def receive(self, peer: str, tag: int, buffers: Sequence[Buffer], ended: Ended) -> None:
        """Receive a transfer of exactly these sizes into these buffers, which the peer may write until `ended`.

        Tags are the receiver's choice and not used twice. A transfer that is sent before it is expected waits. One of
        other sizes ends with `BadRequest`, and its buffer is not written.

        Raises:
            ConnectionLost: the peer is not connected.
            ValueError: the tag or the number of buffers is out of range, or a buffer is read-only.
        """

    def disconnect(self, peer: str) -> None:
        """Drop a connection by force: what is under way ends with `ConnectionLost`; idempotent.

        A receive cannot be taken back by itself. Once its `ended` was called nothing writes to its buffers any more,
        which holds for a disconnected peer too. The peer is not told: its own transfers wait until it disconnects as
        well. When both ends have, they may connect again.
        """

    def close(self) -> None:
        """Drop every connection and the port; idempotent. Peers with nothing under way are told by `lost`."""


def check_transfer(tag: int, buffers: Sequence[Buffer]) -> None:
    """Refuse what no port can move.

    Raises:
        ValueError: the tag or the number of buffers is out of range.
    """
    if not 0 <= tag < 1 << TAG_BITS:
        raise ValueError(f"tag {tag}: not a number of {TAG_BITS} bits")
    if not 1 <= len(buffers) <= MAX_BUFFERS:
        raise ValueError(f"a transfer of {len(buffers)} buffers; it may have 1 to {MAX_BUFFERS}")


def not_connected(peer: str) -> ConnectionLost:
    return ConnectionLost(f"{peer} is not connected")
