"""The ready file: written once a launch is ready, removed at its end, or by its gateway, or by the next start.

So that a start finds what a dead launch left, each ready file has a record under $PDACTORS_HOME, whose lock the launch
holds while it lives: a record that can be locked is a dead one's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from pdactors.actors.discovery import Ready, read_ready_file
from pdactors.config.home import home
from pdactors.errors import ConnectionLost


class Record(Struct, frozen=True):
    """Which launch has a ready file, and where."""

    run_id: str
    path: str


@contextlib.contextmanager
def kept_ready_file(path: Path, ready: Ready) -> Iterator[None]:
    """Have the file there while the block runs; it is written whole or not at all."""
    path = path.absolute()
    with _record(path, ready.run_id):
        try:
            scratch = path.with_name(f".{path.name}.{ready.run_id}")
            scratch.write_bytes(msgspec.json.format(msgspec.json.encode(ready)) + b"\n")
            scratch.rename(path)
            yield
        finally:
            remove_ready_file(path, ready.run_id)


def remove_ready_file(path: Path, run_id: str) -> None:
    """Remove it, if it is still that run's, and its record."""
    with contextlib.suppress(OSError, ConnectionLost):
        if read_ready_file(path).run_id == run_id:
            path.unlink()
    with contextlib.suppress(OSError):
        _record_path(path, run_id).unlink()


def stale_ready_files() -> list[Record]:
    """Return the records of launches that are dead."""
    found = []
    for path in home().glob("ready-*.lock"):
        with contextlib.suppress(OSError, msgspec.DecodeError), path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            found.append(msgspec.json.decode(file.read(), type=Record))
    return found


@contextlib.contextmanager
def _record(path: Path, run_id: str) -> Iterator[IO[bytes]]:
    """Hold the record's lock; it has its name only once it is locked and written."""
    final = _record_path(path, run_id)
    scratch = final.with_suffix(f".{os.getpid()}")
    with scratch.open("wb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(msgspec.json.encode(Record(run_id, str(path))))
        file.flush()
        scratch.rename(final)
        yield file


def _record_path(path: Path, run_id: str) -> Path:
    digest = blake2b(str(path).encode(), digest_size=4).hexdigest()
    return home() / f"ready-{run_id}-{digest}.lock"
