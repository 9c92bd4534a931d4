"""What dead launches left: actors whose supervisor is gone, and ready files. Each start removes it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from pdactors.actors.ready_file import remove_ready_file, stale_ready_files
from pdactors.config.logging import get_logger

MODULES = ("pdactors.actors", "pdactors.actors.nursery")
GRACE_S = 1.0  # what the gateway of a killed launch takes to say goodbye


def orphans() -> list[psutil.Process]:
    """Return this user's actor processes that have no supervisor among their ancestors."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        arguments = process.info["cmdline"] or []
        if not is_actor(arguments):
            continue
        with contextlib.suppress(psutil.Error):
            is_ours = process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE
            if is_ours and int(arguments[-1]) not in {parent.pid for parent in process.parents()}:
                found.append(process)
    return found


def sweep() -> None:
    """Remove what dead launches of this user left, and nothing else."""
    log = get_logger()
    deadline = time.monotonic() + GRACE_S
    while (left := orphans()) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in left:
        log.warning("process of a dead run ended", pid=process.pid)
        with contextlib.suppress(psutil.Error):
            process.kill()
    for record in stale_ready_files():
        log.warning("ready file of a dead run removed", run_id=record.run_id, path=record.path)
        remove_ready_file(Path(record.path), record.run_id)


def is_actor(arguments: Sequence[str]) -> bool:
    """Whether that is an actor's or a nursery's command line: module, name, run and the supervisor's process id."""
    return len(arguments) > 4 and arguments[-4] in MODULES and arguments[-1].isdecimal()
