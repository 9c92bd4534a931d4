"""`launch`: start a cluster from a program, as a child process that ends with it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Self

from pdactors.actors.discovery import Ready, read_ready_file
from pdactors.config.load import is_secret, variable_of
from pdactors.errors import ConnectionLost

STOP_TIMEOUT_S = 15.0
LAST_WORDS_BYTES = 4000  # of a log, in an error


class Cluster:
    """A cluster that runs as a child of this process. Close it, or use it with `with`.

    `tcp`, `zmq` and `http` are its addresses ("" for what is off), `key` is the file of the key that clients here use
    ("" without security.curve), `ready` is the ready file's content.
    """

    def __init__(self, process: subprocess.Popen[bytes], lifeline: int, ready: Ready) -> None:
        self.ready = ready
        self.tcp = ready.tcp
        self.zmq = ready.zmq
        self.http = ready.http
        self.key = ready.key
        self.process = process
        self._lifeline = lifeline

    def close(self) -> None:
        """Drain, end every process of the cluster and wait for it; idempotent."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
        _end(self.process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def launch(
    file: str | Path | None = None,
    *,
    node: str | None = None,
    sets: Sequence[str] = (),
    timeout_s: float = 300.0,
    quiet: bool = True,
) -> Cluster:
    """Start this machine's share of the cluster that `file` describes, or only `node`, and return once it is ready.

    `sets` override keys, as `--set` does: `["listen.tcp=127.0.0.1:0"]`. The cluster's log goes to this process's stderr
    unless `quiet`. It ends with this process, however this process ends.

    Raises:
        ConnectionLost: it ended before it was ready, or was not ready within `timeout_s`; says what it printed last.
    """
    read_end, write_end = os.pipe()
    with tempfile.TemporaryDirectory(prefix="pdactors-") as scratch, tempfile.TemporaryFile() as log:
        ready_file = Path(scratch) / "ready.json"
        command = [sys.executable, "-m", "pdactors.cli.main", "launch", "--ready-file", str(ready_file)]
        command += ["--lifeline", str(read_end)]
        secret = {variable_of(key): value for key, _, value in map(_parts, sets) if is_secret(key)}
        command += [part for value in sets if not is_secret(_parts(value)[0]) for part in ("--set", value)]
        command += ["--node", node] if node is not None else []
        command += [str(file)] if file is not None else []
        process = subprocess.Popen(  # noqa: S603 - this interpreter and our own arguments
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=log if quiet else None,
            pass_fds=(read_end,),
            env={**os.environ, **secret},  # which, unlike a command line, is not for everyone to see
            start_new_session=True,  # Ctrl-C in the program is the program's; the lifeline ends the cluster
        )
        os.close(read_end)
        try:
            _await_file(ready_file, process, timeout_s)
            return Cluster(process, write_end, read_ready_file(ready_file))
        except BaseException as error:
            os.close(write_end)
            _end(process)
            if isinstance(error, ConnectionLost):
                raise ConnectionLost(f"{error.message}{_last_words(log)}") from None
            raise


def _parts(setting: str) -> tuple[str, str, str]:
    key, equals, value = setting.partition("=")
    return key.strip(), equals, value


def _await_file(path: Path, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        if process.poll() is not None:
            raise ConnectionLost(f"the cluster ended with status {process.returncode} before it was ready")
        if time.monotonic() > deadline:
            raise ConnectionLost(f"the cluster was not ready within {timeout_s:.0f} s")
        time.sleep(0.02)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait for a cluster whose lifeline was cut."""
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _last_words(log: IO[bytes]) -> str:
    log.seek(max(0, log.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
    text = log.read().decode(errors="replace").strip()
    return f"; it said last:\n{text}" if text else ""
