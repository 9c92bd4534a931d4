"""The contract of launchers: the same file runs, fails and ends the same way, whoever places its node."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from netns import PDACTORS

from pdactors import Client
from pdactors.actors.discovery import Ready, read_ready_file, running

pytestmark = pytest.mark.slow

READY_S = 120.0
GONE_S = 10.0
Settings = Callable[..., list[str]]
Launch = Callable[..., list[str]]


@pytest.fixture(params=["local", "ray"])
def command(request: pytest.FixtureRequest, home: Path, tiny_settings: Settings) -> Launch:
    """The command line of a launch: `command("--ready-file", file, **{"kv.memory": "1MiB"})`."""
    if request.param == "ray":
        request.getfixturevalue("ray_machines")

    def make(*arguments: object, **keys: object) -> list[str]:
        settings = tiny_settings(**{"cluster.launcher": request.param, **keys})
        return [*PDACTORS, "launch", *settings, *map(str, arguments)]

    return make


@contextmanager
def launched(command: Launch, file: Path, wait: Any) -> Iterator[tuple[subprocess.Popen[str], Ready]]:
    with subprocess.Popen(command("--ready-file", file), stdout=subprocess.PIPE, text=True) as process:
        try:
            wait(lambda: file.exists() or process.poll() is not None, READY_S, "it is not ready")
            yield process, read_ready_file(file)
        finally:
            process.kill()


def are_gone(actors: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(actors, GONE_S)[1]


def test_it_is_ready_once_restarts_what_dies_and_leaves_nothing(command: Launch, tmp_path: Path, wait: Any) -> None:
    file = tmp_path / "ready.json"
    with launched(command, file, wait) as (process, ready):
        (found,) = running()
        assert (found.run_id, found.zmq, found.actors) == (
            ready.run_id,
            ready.zmq,
            ready.actors,
        )  # Ray's host says so too
        assert {actor.role for actor in ready.actors} == {"router", "gateway", "migrator", "prefill", "decode"}
        actors = {actor.role: psutil.Process(actor.pid) for actor in ready.actors}
        with Client(ready.zmq) as client:
            assert client.generate("the cat", max_tokens=4, ignore_eos=True).finish_reason == "length"
            actors["decode"].kill()
            assert client.generate("the mat", max_tokens=4, ignore_eos=True).finish_reason == "length"
        process.send_signal(signal.SIGTERM)
        assert process.wait(GONE_S) == 0
        assert process.stdout is not None
        (line,) = process.stdout.read().splitlines()
        said = json.loads(line.removeprefix("ready "))
        assert said == {"run_id": ready.run_id, "tcp": ready.tcp, "zmq": ready.zmq, "http": ready.http}
    assert are_gone(list(actors.values()))
    assert not file.exists()
    assert not running()


def test_its_end_takes_all_actors_along_however_it_ends(command: Launch, tmp_path: Path, wait: Any) -> None:
    with launched(command, tmp_path / "ready.json", wait) as (process, ready):
        actors = [psutil.Process(actor.pid) for actor in ready.actors]
        os.kill(process.pid, signal.SIGKILL)
    assert are_gone(actors)


def test_what_a_node_cannot_do_is_the_launchs_error_in_the_same_words(command: Launch, tmp_path: Path) -> None:
    def error(**keys: object) -> str:
        done = subprocess.run(command(**keys), capture_output=True, text=True, timeout=READY_S, check=False)
        assert done.returncode == 1, done.stderr
        assert "Traceback" not in done.stderr
        (said,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        return said

    assert "this model has 8192 positions" in error(**{"model.max_model_len": 9000})
    assert f'there is no model "{tmp_path}/nothing"' in error(**{"model.path": f"{tmp_path}/nothing"})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert f'listen.tcp = "{address}": cannot listen there: it is in use' in error(**{"listen.tcp": address})
