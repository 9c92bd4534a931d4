"""What dead launches left is found, and removed by the next start; what others have is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from pdactors.actors.discovery import Ready, read_ready_file
from pdactors.actors.ready_file import kept_ready_file, remove_ready_file, stale_ready_files
from pdactors.actors.remains import orphans, sweep

READY = Ready("run1", 1, "127.0.0.1:1", "", "", ())
DIES = """
import os, sys
from pathlib import Path
from pdactors.actors.discovery import Ready
from pdactors.actors.ready_file import kept_ready_file
with kept_ready_file(Path(sys.argv[1]), Ready("dead", 1, "", "", "", ())):
    os.kill(os.getpid(), 9)
"""
SLEEPER = [sys.executable, "-c", "import time; time.sleep(60)", "pdactors.actors", "n0/decode-0", "deadbeef"]
LEAVES = """
import os, sys
from subprocess import DEVNULL, Popen
print(Popen([*sys.argv[1:], str(os.getpid())], stdout=DEVNULL, stderr=DEVNULL).pid)
"""


@pytest.fixture
def children() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def records(home: Path) -> list[Path]:
    return list(home.glob("ready*"))


def test_a_ready_file_and_its_record_are_there_as_long_as_the_launch(home: Path, tmp_path: Path) -> None:
    with kept_ready_file(tmp_path / "ready.json", READY):
        assert read_ready_file(tmp_path / "ready.json") == READY
        assert len(records(home)) == 1
        assert stale_ready_files() == []
        sweep()
        assert (tmp_path / "ready.json").exists()
    assert not (tmp_path / "ready.json").exists()
    assert not records(home)


def test_what_a_killed_launch_left_is_removed_and_what_another_wrote_there_is_not(home: Path, tmp_path: Path) -> None:
    left, taken = tmp_path / "left.json", tmp_path / "taken.json"
    for path in (left, taken):
        subprocess.run([sys.executable, "-c", DIES, str(path)], check=False)
        assert path.exists()
    with kept_ready_file(taken, READY):
        assert sorted(record.path for record in stale_ready_files()) == [str(left), str(taken)]
        sweep()
        assert not left.exists()
        assert read_ready_file(taken) == READY
        assert len(records(home)) == 1
    assert not records(home)


def test_the_gateway_of_a_killed_launch_removes_both(home: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", DIES, str(tmp_path / "ready.json")], check=False)
    remove_ready_file(tmp_path / "ready.json", "dead")
    assert not (tmp_path / "ready.json").exists()
    assert not records(home)


def test_an_actor_whose_supervisor_is_gone_is_ended_and_one_that_has_its_own_is_not(
    home: Path, children: ExitStack, wait: Any
) -> None:
    ours = children.enter_context(subprocess.Popen([*SLEEPER, str(os.getpid())]))
    children.callback(ours.kill)
    left = int(subprocess.run([sys.executable, "-c", LEAVES, *SLEEPER], check=True, capture_output=True).stdout)
    assert left in {process.pid for process in orphans()}
    assert ours.pid not in {process.pid for process in orphans()}
    sweep()
    wait(lambda: left not in {process.pid for process in orphans()}, 5.0, "it lives")
    assert ours.poll() is None
