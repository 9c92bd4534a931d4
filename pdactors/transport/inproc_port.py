"""A data port inside one process, which copies: the reference for the others, and the test double.

A test that wants a bad wire overrides `deliver` (to hold transfers back) or `copy` (to spoil what arrives).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

from pdactors.errors import BadRequest, ConnectionLost, PDError
from pdactors.transport.data_port import Buffer, Ended, Lost, check_transfer, not_connected

_numbers = itertools.count()
_ports: dict[bytes, InprocPort] = {}


@dataclass(eq=False)
class _Transfer:
    views: list[memoryview]
    ended: Ended

    def end(self, error: PDError | None) -> None:
        asyncio.get_running_loop().call_soon(self.ended, error)


@dataclass(eq=False)
class _Connection:
    address: bytes  # of the peer's port
    lost: Lost
    sends: dict[int, _Transfer] = field(default_factory=dict)  # by tag; until the peer took them
    receives: dict[int, _Transfer] = field(default_factory=dict)


class InprocPort:
    """All ports of a process share one name space of addresses."""

    def __init__(self) -> None:
        self._address = b"inproc-%d" % next(_numbers)
        self._connections: dict[str, _Connection] = {}
        _ports[self._address] = self

    @property
    def address(self) -> bytes:
        return self._address

    def connect(self, peer: str, address: bytes, lost: Lost) -> None:
        if peer in self._connections:
            raise ConnectionLost(f"{peer} is connected already")
        if self._address not in _ports:
            raise ConnectionLost("this port is closed")
        if address not in _ports:
            raise ConnectionLost(f"{peer}: {address!r} is no address of this process")
        self._connections[peer] = _Connection(address, lost)

    def send(self, peer: str, tag: int, buffers: Sequence[Buffer], ended: Ended) -> None:
        check_transfer(tag, buffers)
        connection = self._connection(peer)
        connection.sends[tag] = _Transfer([memoryview(buffer).cast("B") for buffer in buffers], ended)
        target = _ports.get(connection.address)
        if target is not None:
            asyncio.get_running_loop().call_soon(target.deliver, self._address, tag)

    def receive(self, peer: str, tag: int, buffers: Sequence[Buffer], ended: Ended) -> None:
        check_transfer(tag, buffers)
        connection = self._connection(peer)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        if any(view.readonly for view in views):
            raise ValueError("a buffer to receive into is read-only")
        connection.receives[tag] = _Transfer(views, ended)
        asyncio.get_running_loop().call_soon(self.deliver, connection.address, tag)

    def deliver(self, sender: bytes, tag: int) -> None:
        """Move a transfer if both its ends are there by now."""
        source, target = self._facing(sender), _ports[sender]._facing(self._address) if sender in _ports else None
        if source is None or target is None or tag not in target.sends or tag not in source.receives:
            return
        sent, received = target.sends.pop(tag), source.receives.pop(tag)
        sizes, wanted = [len(view) for view in sent.views], [len(view) for view in received.views]
        sent.end(None)
        if sizes != wanted:
            received.end(BadRequest(f"transfer {tag}: buffers of {sizes} bytes were sent, {wanted} are expected"))
            return
        self.copy(tag, sent.views, received.views)
        received.end(None)

    def copy(self, tag: int, sources: Sequence[memoryview], targets: Sequence[memoryview]) -> None:
        for source, target in zip(sources, targets, strict=True):
            target[:] = source

    def disconnect(self, peer: str) -> None:
        connection = self._connections.pop(peer, None)
        if connection is not None:
            for transfer in (*connection.sends.values(), *connection.receives.values()):
                transfer.end(ConnectionLost(f"{peer} was disconnected"))

    def close(self) -> None:
        if _ports.pop(self._address, None) is None:
            return
        for peer in tuple(self._connections):
            self.disconnect(peer)
        for port in tuple(_ports.values()):
            port._lose(self._address)

    def _lose(self, address: bytes) -> None:
        for peer, connection in tuple(self._connections.items()):
            if connection.address == address:
                self.disconnect(peer)
                asyncio.get_running_loop().call_soon(connection.lost, peer, ConnectionLost(f"{peer} is gone"))

    def _connection(self, peer: str) -> _Connection:
        if peer not in self._connections:
            raise not_connected(peer)
        return self._connections[peer]

    def _facing(self, address: bytes) -> _Connection | None:
        """Return the connection to the port at that address."""
        return next((found for found in self._connections.values() if found.address == address), None)
