"""How commands find the clusters that run here: an abstract Unix socket of each launch, so that no file is ever left.

Its name holds a digest of $PDACTORS_HOME, the run id and a node; whoever connects is told what the ready file says.
Abstract sockets belong to a network namespace: from another one, name the cluster by its address or ready file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct

from pdactors.config.home import home
from pdactors.errors import ConnectionLost

_TIMEOUT_S = 2.0


class ReadyActor(Struct, frozen=True):
    name: str
    role: str
    node: str
    rack: str
    pid: int


class Ready(Struct, frozen=True):
    """A cluster that runs: where it listens, and its processes on this machine. The ready file's content.

    An address is "" for what is off, and where this machine has no gateway and cannot know it.
    """

    run_id: str
    pid: int  # of the launch
    tcp: str
    zmq: str
    http: str
    actors: tuple[ReadyActor, ...]
    key: str = ""  # with security.curve: the file of the key that clients on this machine use


async def announce(name: str, ready: Callable[[], Ready]) -> asyncio.Server:
    """Tell everyone who asks, under a name that nobody else has; close the server to stop."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(msgspec.json.encode(ready()))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0{_prefix()}{name}")
    return await asyncio.start_unix_server(answer, sock=listening)


def running() -> list[Ready]:
    """Return the clusters that run under this $PDACTORS_HOME, in this network namespace.

    Of several launches of one run that one is returned which knows most addresses.
    """
    found: dict[str, Ready] = {}
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split()[-1]
        if name.startswith(f"@{_prefix()}"):
            ready = _ask(f"\0{name[1:]}")
            if ready is None:
                continue
            other = found.setdefault(ready.run_id, ready)
            if bool(ready.zmq) + bool(ready.tcp) > bool(other.zmq) + bool(other.tcp):
                found[ready.run_id] = ready
    return list(found.values())


def the_only_one() -> Ready:
    """Return the one cluster that runs here.

    Raises:
        ConnectionLost: there is none, or there are several; the message lists them.
    """
    found = running()
    if not found:
        raise ConnectionLost("no cluster is running here; start one with `pdactors launch`")
    if len(found) > 1:
        known = "; ".join(f"{ready.run_id} at {ready.zmq or ready.tcp}" for ready in found)
        raise ConnectionLost(f"several clusters are running: {known}. Choose with --zmq ADDRESS or --ready-file PATH")
    return found[0]


def read_ready_file(path: Path) -> Ready:
    """Read what `launch --ready-file` wrote.

    Raises:
        ConnectionLost: it is missing or malformed.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=Ready)
    except (OSError, msgspec.DecodeError) as error:
        raise ConnectionLost(f"{path} is not a ready file: {error}") from error


def _prefix() -> str:
    digest = blake2b(str(home().resolve()).encode(), digest_size=6).hexdigest()
    return f"pdactors/{digest}/"


def _ask(name: str) -> Ready | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(name)
            _, uid, _ = struct.unpack("iII", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
            if uid not in (os.getuid(), 0):  # anybody may take such a name, and would be told our token
                return None
            data = b""
            while piece := connection.recv(65536):
                data += piece
            return msgspec.json.decode(data, type=Ready)
        except (OSError, msgspec.DecodeError):  # it is just ending, or somebody else's
            return None
