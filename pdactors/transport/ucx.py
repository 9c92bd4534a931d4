"""A data port over UCX, driven from the event loop by its worker's own descriptor. The only module that imports ucxx.

An idle worker is armed and sleeps; whatever happens makes its descriptor readable, or a turn is planned at once:

    turn: progress until nothing moves or others wait -> take what arrived -> tell what ended -> arm, or plan a turn

No receive is posted to UCX before its message is here: then its size is known, and a connection that is dropped leaves
nothing behind that could swallow or write a later message. A transfer's tag and the number of a buffer in it make the
tag of that buffer's message. Worker addresses are exchanged by the caller; there is no listener that would take
connections from anybody, but the port that TCP needs is open, and UCX authenticates nobody.

Settings of UCX in the environment (`UCX_TLS=...`) win over what is chosen here. The ucxx of the package index brings a
UCX without verbs: for RDMA install a UCX of the system, set RAPIDS_LIBUCX_PREFER_SYSTEM_LIBRARY=1, and say in UCX_TLS
what to use. UCX takes two network namespaces of one kernel for one host, so shared memory stays off unless asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from pdactors.errors import BadRequest, ConfigError, ConnectionLost, PDError
from pdactors.transport.data_port import MAX_BUFFERS, Buffer, Ended, Lost, check_transfer, not_connected

MAX_PROGRESS = 256  # calls before the loop's other work gets a turn
MAX_CLOSING = 10_000  # calls that a port waits for UCX to end what it aborted
_MAGIC = b"pdu1"


def device_of(host: str) -> str:
    """Return the name of the network device that holds this host's address, as UCX_NET_DEVICES takes it.

    Raises:
        ConfigError: the name does not resolve, or no device of this machine holds the address.
    """
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError as error:
        raise ConfigError(f"host {host!r}: {error.strerror or error}") from error
    held: dict[str, str] = {
        address.address.partition("%")[0]: name for name, row in psutil.net_if_addrs().items() for address in row
    }
    for address in sorted(found):
        if address in held:
            return held[address]
    raise ConfigError(f"host {host!r}: no network device of this machine holds {' or '.join(sorted(found))}")


@dataclass(eq=False)
class _Transfer:
    arrays: Sequence[Any]  # keep the buffers alive
    ended: Ended
    requests: deque[Any] = field(default_factory=deque)  # what UCX works on, in order
    awaited: set[int] = field(default_factory=set)  # UCX tags of messages that are not here yet
    error: PDError | None = None


@dataclass(eq=False)
class _Connection:
    endpoint: Any
    lost: Lost
    transfers: set[_Transfer] = field(default_factory=set)


class UcxPort:
    """One UCX worker, on the running event loop.

    `device` is a network device ("eth0", "mlx5_0:1"), or "" for any; `ports` the TCP ports that it may listen on
    ("30000-30010"), or "" for any.

    Raises:
        ConfigError: ucxx is not installed, or UCX refuses the settings.
    """

    def __init__(self, device: str, ports: str) -> None:
        self._library = _load()
        try:
            context = self._library.UCXContext(
                _settings(device, ports), (self._library.Feature.TAG, self._library.Feature.WAKEUP)
            )
            self._worker: Any = self._library.UCXWorker(context)
            self._worker.init_blocking_progress_mode()
        except (self._library.UCXError, RuntimeError) as error:
            raise ConfigError(f"UCX on device {device or 'any'!r}, ports {ports or 'any'!r}: {error}") from error
        own = bytes(self._worker.address)
        self.address = _MAGIC + zlib.crc32(own).to_bytes(4, "big") + own
        self._any = self._library.UCXXTag(0), self._library.UCXXTagMask(0)
        self._connections: dict[str, _Connection] = {}
        self._dropped: set[_Transfer] = set()  # of connections that are gone; UCX has not let go of them yet
        self._awaited: dict[int, tuple[_Transfer, Any]] = {}  # by UCX tag, with the array to receive into
        self._early: dict[int, Any] = {}  # messages that nobody expects yet, by UCX tag
        self._planned = False
        self._loop = asyncio.get_running_loop()
        self._fd = self._worker.epoll_file_descriptor
        self._loop.add_reader(self._fd, self._turn)
        self._plan()

    def connect(self, peer: str, address: bytes, lost: Lost) -> None:
        if self._worker is None:
            raise ConnectionLost("this port is closed")
        if peer in self._connections:
            raise ConnectionLost(f"{peer} is connected already")
        worker_address = address[8:]
        if not worker_address or address[:8] != _MAGIC + zlib.crc32(worker_address).to_bytes(4, "big"):
            raise ConnectionLost(f"{peer}: what it gave is no address of a UCX port")
        try:
            endpoint = self._worker.create_endpoint_from_worker_address(
                self._library.UCXAddress.create_from_buffer(worker_address), endpoint_error_handling=True
            )
        except (self._library.UCXError, RuntimeError) as error:
            raise ConnectionLost(f"{peer} cannot be reached: {error}") from error
        self._connections[peer] = _Connection(endpoint, lost)
        self._plan()

    def send(self, peer: str, tag: int, buffers: Sequence[Buffer], ended: Ended) -> None:
        check_transfer(tag, buffers)
        connection = self._connection(peer)
        transfer = _Transfer([_array(buffer) for buffer in buffers], ended)
        connection.transfers.add(transfer)
        try:
            for ucx_tag, array in enumerate(transfer.arrays, tag * MAX_BUFFERS):
                transfer.requests.append(connection.endpoint.tag_send(array, self._library.UCXXTag(ucx_tag)))
        except self._library.UCXError as error:
            transfer.error = ConnectionLost(f"{peer} cannot be reached: {error}")
        self._plan()

    def receive(self, peer: str, tag: int, buffers: Sequence[Buffer], ended: Ended) -> None:
        check_transfer(tag, buffers)
        connection = self._connection(peer)
        arrays = [_array(buffer) for buffer in buffers]
        if any(memoryview(array.obj).readonly for array in arrays if not array.cuda):
            raise ValueError("a buffer to receive into is read-only")
        transfer = _Transfer(arrays, ended)
        connection.transfers.add(transfer)
        for ucx_tag, array in enumerate(arrays, tag * MAX_BUFFERS):
            transfer.awaited.add(ucx_tag)
            self._awaited[ucx_tag] = transfer, array
        for ucx_tag in sorted(transfer.awaited & self._early.keys()):
            if ucx_tag in self._awaited:
                self._take(ucx_tag, self._early.pop(ucx_tag))
        self._plan()

    def disconnect(self, peer: str) -> None:
        self._drop(peer, ConnectionLost(f"{peer} was disconnected"))

    def close(self) -> None:
        if self._worker is None:
            return
        for peer in tuple(self._connections):
            self.disconnect(peer)
        self._loop.remove_reader(self._fd)
        for _ in range(MAX_CLOSING):
            self._worker.progress()
            self._settle()
            if not self._dropped:
                break
        waste = self._swallow()
        rest, self._dropped = self._dropped, set()
        for transfer in rest:
            transfer.requests.clear()
        self._worker = None  # and with it the sockets, and whatever was still under way
        waste.clear()
        for transfer in rest:
            self._loop.call_soon(transfer.ended, transfer.error)

    # ---- The turn --------

    def _plan(self) -> None:
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._turn, True)

    def _turn(self, planned: bool = False) -> None:
        if planned:
            self._planned = False
        if self._worker is None:
            return
        busy = True
        for _ in range(MAX_PROGRESS):
            if not self._worker.progress_once():
                busy = False
                break
        busy |= self._collect()
        for peer, connection in tuple(self._connections.items()):
            if not connection.endpoint.alive:
                self._drop(peer, ConnectionLost(f"{peer} is gone"))
                self._loop.call_soon(connection.lost, peer, ConnectionLost(f"{peer} is gone"))
        self._settle()
        if busy or not self._worker.arm():
            self._plan()

    def _collect(self) -> bool:
        """Take the messages that arrived; return whether there were any."""
        found = False
        while True:
            message = self._worker.tag_probe(*self._any, True)
            if not message.matched:
                return found
            found = True
            ucx_tag = message.sender_tag.value
            if ucx_tag in self._awaited:
                self._take(ucx_tag, message)
            else:
                self._early[ucx_tag] = message

    def _take(self, ucx_tag: int, message: Any) -> None:
        """Receive a message that is here into the array that awaits it."""
        transfer, array = self._awaited.pop(ucx_tag)
        transfer.awaited.discard(ucx_tag)
        if message.length == array.nbytes:
            transfer.requests.append(self._worker.tag_recv_with_handle(array, message))
            return
        tag, number = divmod(ucx_tag, MAX_BUFFERS)
        self._fail(
            transfer,
            BadRequest(f"transfer {tag}: buffer {number} has {message.length} bytes, {array.nbytes} are expected"),
        )
        self._early[ucx_tag] = message

    def _settle(self) -> None:
        """Tell of transfers that UCX is through with."""
        for transfers in (self._dropped, *(connection.transfers for connection in self._connections.values())):
            for transfer in [each for each in transfers if self._is_over(each)]:
                transfers.discard(transfer)
                self._loop.call_soon(transfer.ended, transfer.error)

    def _is_over(self, transfer: _Transfer) -> bool:
        while transfer.requests and transfer.requests[0].completed:
            try:
                transfer.requests.popleft().check_error()
            except self._library.UCXError as error:
                self._fail(transfer, ConnectionLost(f"a transfer broke off: {error}"))
        return not transfer.requests and not transfer.awaited

    def _fail(self, transfer: _Transfer, error: PDError) -> None:
        transfer.error = transfer.error or error
        for ucx_tag in transfer.awaited:
            del self._awaited[ucx_tag]
        transfer.awaited.clear()

    def _drop(self, peer: str, error: ConnectionLost) -> None:
        connection = self._connections.pop(peer, None)
        if connection is None:
            return
        for transfer in connection.transfers:
            self._fail(transfer, error)
        self._dropped |= connection.transfers
        connection.endpoint.close_blocking()  # by force, because it was made with error handling; sends nothing
        self._plan()

    def _swallow(self) -> list[Any]:
        """Receive what nobody wanted, for UCX complains about a message that is found and left.

        Returns: where to; it must live as long as the worker.
        """
        self._collect()
        waste = []
        for message in self._early.values():
            with contextlib.suppress(self._library.UCXError, MemoryError):
                array = _array(np.empty(max(message.length, 1), np.uint8))  # not touched: no connection is left
                waste += [array, self._worker.tag_recv_with_handle(array, message)]
        self._early.clear()
        return waste

    def _connection(self, peer: str) -> _Connection:
        if peer not in self._connections:
            raise not_connected(peer)
        return self._connections[peer]


def _load() -> Any:
    """Import ucxx's low-level layer; its asyncio layer costs three times the CPU."""
    os.environ.setdefault("UCX_WARN_UNUSED_ENV_VARS", "n")
    try:
        import ucxx  # noqa: F401 - loads libucx
        from ucxx._lib import libucxx
    except ImportError as error:
        raise ConfigError(f"transfers between nodes need ucxx: pip install 'pdactors[ucx]' ({error})") from error
    return libucxx


def _array(buffer: Buffer) -> Any:
    from ucxx._lib.arr import Array

    return Array(buffer)


def _settings(device: str, ports: str) -> dict[str, str]:
    """Return UCX's settings, less what the environment sets."""
    wanted = {
        "TLS": "tcp",
        "NET_DEVICES": device,
        "TCP_PORT_RANGE": ports,
        "ZCOPY_THRESH": "0",  # saves a copy
        "TCP_RX_SEG_SIZE": "256k",  # four times UCX's own: fewer calls, and what is copied out is still in the cache
    }
    return {key: value for key, value in wanted.items() if value and f"UCX_{key}" not in os.environ}
