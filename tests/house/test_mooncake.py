"""Mode kvstore over Mooncake Store: a real master, and what happens when it is lost or was never there."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from test_migration import LOST_S, MakeIds, Settings, Wait, cluster_file, is_clean

from pdactors import Client, Cluster, PDError, launch

pytestmark = pytest.mark.slow


def _why_not() -> str:
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed: pip install 'pdactors[mooncake]'"
    done = subprocess.run([sys.executable, "-c", "import mooncake.store"], capture_output=True, text=True)
    return "" if done.returncode == 0 else done.stderr.splitlines()[-1]


def _free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def master(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """A Mooncake master of its own: its address, and its process."""
    if why := _why_not():
        pytest.skip(why)
    port = _free_port()
    command = [Path(sys.executable).parent / "mooncake_master", f"--rpc_port={port}", f"--metrics_port={_free_port()}"]
    with (tmp_path / "master.log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        deadline = time.monotonic() + 20
        while not _answers(port):
            assert time.monotonic() < deadline, (tmp_path / "master.log").read_text()
            time.sleep(0.05)
        yield f"127.0.0.1:{port}", process
        process.kill()


@pytest.fixture
def apart(tmp_path: Path, home: Path, tiny_settings: Settings) -> Callable[..., Any]:
    def run(address: str, **keys: object) -> Any:
        file = cluster_file(tmp_path, ["127.0.0.1", "localhost"])
        store = {"cluster.mode": "kvstore", "kv.store": f"mooncake://{address}", "kv.store_memory": "64MiB"}
        return launch(file, sets=[*tiny_settings(**store, **keys)[1::2]], quiet=False)

    return run


def test_kv_comes_back_from_the_store_and_its_loss_costs_only_time(
    master: tuple[str, subprocess.Popen[bytes]], apart: Any, cluster: Cluster, make_ids: MakeIds, wait: Wait
) -> None:
    address, process = master
    with apart(address) as both, Client(both.zmq) as client, Client(cluster.zmq) as one:
        ids, num_before = make_ids("turn 0", 210), 0
        for turn in range(1, 7):
            if turn == 5:
                os.kill(process.pid, signal.SIGKILL)
                process.wait()
                num_before = 0
            fields = {"prompt_token_ids": ids, "max_tokens": 60, "ignore_eos": True}
            began = time.monotonic()
            answer = client.generate(**fields)
            assert time.monotonic() - began < 30
            assert answer.token_ids == one.generate(**fields).token_ids
            assert answer.usage.cached_tokens >= 0.85 * num_before
            wait(lambda: is_clean(client), LOST_S, lambda: f"{client.status()} {client.leaks()}")
            time.sleep(0.3)  # it is stored in the background
            num_before = len(ids) + 60
            ids = [*ids, *answer.token_ids, *make_ids(f"turn {turn}", 210)]


def test_a_master_that_is_not_there_is_an_error_at_start(apart: Any) -> None:
    if why := _why_not():
        pytest.skip(why)
    port = _free_port()
    began = time.monotonic()
    with (
        pytest.raises(PDError, match=f"mooncake://127.0.0.1:{port}: no master answers there"),
        apart(f"127.0.0.1:{port}"),
    ):
        pass
    assert time.monotonic() - began < 60
