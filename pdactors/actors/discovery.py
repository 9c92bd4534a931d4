"""How commands find the clusters that run here: an abstract Unix socket for each, so that no file is ever left behind.

Its name holds a digest of $PDACTORS_HOME and the run id; whoever connects is told what the ready file says. Abstract
sockets belong to a network namespace: from another one, name the cluster by its address or ready file.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
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
    """A cluster that runs: where it listens ("" for what is off) and its processes. The ready file's content."""

    run_id: str
    pid: int  # the supervisor's
    tcp: str
    zmq: str
    http: str
    actors: tuple[ReadyActor, ...]


async def announce(run_id: str, ready: Callable[[], Ready]) -> asyncio.Server:
    """Tell everyone who asks; close the server to stop."""

    async def answer(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(msgspec.json.encode(ready()))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        writer.close()

    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(f"\0{_prefix()}{run_id}")
    return await asyncio.start_unix_server(answer, sock=listening)


def running() -> list[Ready]:
    """Return the clusters that run under this $PDACTORS_HOME, in this network namespace."""
    found: list[Ready] = []
    for line in Path("/proc/net/unix").read_text().splitlines()[1:]:
        name = line.split()[-1]
        if name.startswith(f"@{_prefix()}"):
            ready = _ask(f"\0{name[1:]}")
            if ready is not None and ready.run_id not in {other.run_id for other in found}:
                found.append(ready)
    return found


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


def write_ready_file(path: Path, ready: Ready) -> None:
    """Write it whole or not at all."""
    scratch = path.with_name(f".{path.name}.{ready.run_id}")
    scratch.write_bytes(msgspec.json.format(msgspec.json.encode(ready)) + b"\n")
    scratch.rename(path)


def remove_ready_file(path: Path, run_id: str) -> None:
    """Remove it, if it is still that run's."""
    with contextlib.suppress(OSError, ConnectionLost):
        if read_ready_file(path).run_id == run_id:
            path.unlink()


def _prefix() -> str:
    digest = blake2b(str(home().resolve()).encode(), digest_size=6).hexdigest()
    return f"pdactors/{digest}/"


def _ask(name: str) -> Ready | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        try:
            connection.connect(name)
            data = b""
            while piece := connection.recv(65536):
                data += piece
            return msgspec.json.decode(data, type=Ready)
        except (OSError, msgspec.DecodeError):  # it is just ending, or somebody else's
            return None
