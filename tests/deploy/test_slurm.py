"""The batch script, with stand-ins for Slurm's commands, on two machines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from netns import Host
from pages import ROOT

from pdactors import Client
from pdactors.config.keys import make_keys
from pdactors.config.load import load

HERE = ROOT / "deploy" / "slurm"
SCRIPT = HERE / "pdactors.sbatch"
SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] && echo "$3" | tr , '\\n'
"""
SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
trap 'kill -TERM $(jobs -p)' TERM
rank=0
for space in $SPACES; do
    SLURM_PROCID=$rank SLURM_NODEID=$rank ip netns exec "$space" "$@" &
    rank=$((rank + 1))
done
while ! wait; do :; done
"""


def option(name: str) -> str:
    """Return what the script asks of sbatch."""
    (value,) = re.findall(rf"^#SBATCH --{name}=(.*)$", SCRIPT.read_text(), re.MULTILINE)
    return str(value)


def test_what_it_asks_for_fits_its_cluster_file() -> None:
    config = load(HERE / "cluster.toml", environ={})
    assert int(option("nodes")) == len(config.node)
    assert option("ntasks-per-node") == "1"
    assert int(option("signal").removeprefix("TERM@")) > config.cluster.drain_s


@pytest.fixture
def environ(tmp_path: Path, home: Path, tiny_model: Path, small: dict[str, str]) -> dict[str, str]:
    """What a job's script finds in its environment, and the stand-ins on its path."""
    for name, text in (("scontrol", SCONTROL), ("srun", SRUN)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    keys = tmp_path / "keys"
    make_keys(keys, lambda: ("a" * 40, "b" * 40))
    return {
        **os.environ,
        **small,
        "PATH": f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PDACTORS_MODEL_PATH": str(tiny_model),
        "PDACTORS_SECURITY_TOKEN_FILE": str(keys / "token"),
        "PDACTORS_SECURITY_JOIN_TOKEN_FILE": str(keys / "join_token"),
    }


@pytest.mark.slow
def test_two_ranks_are_one_cluster_that_drains_and_ends_with_the_job(
    hosts: list[Host], environ: dict[str, str], wait: Any
) -> None:
    job = {
        "SLURM_JOB_NODELIST": ",".join(host.address for host in hosts),
        "SPACES": " ".join(host.namespace for host in hosts),
    }
    token = Path(environ["PDACTORS_SECURITY_TOKEN_FILE"]).read_text().strip()
    command = ["bash", SCRIPT, HERE / "cluster.toml"]
    with subprocess.Popen(command, env={**environ, **job}, stdout=subprocess.PIPE, text=True) as running:
        try:
            assert running.stdout is not None
            assert f"http://{hosts[0].address}:7080" in running.stdout.readline()

            with hosts[0].entered():
                wait(lambda: running.poll() is not None or hosts[0].serves(), 120.0, "it does not serve")
                with Client(f"tcp://{hosts[0].address}:7071", token=token) as client:
                    answer = client.generate("the cat sat on the mat", max_tokens=8, ignore_eos=True)
                    assert len(answer.token_ids) == 8
                    assert {a["node"] for a in client.status()["actors"] if a["role"] == "decode"} == {"n1"}
        finally:
            running.send_signal(signal.SIGTERM)
            running.wait(30.0)
    assert running.returncode == 0


@pytest.mark.slow
def test_an_allocation_of_another_size_is_refused(environ: dict[str, str]) -> None:
    job = {"SLURM_JOB_NODELIST": "10.77.0.1"}
    command = ["bash", SCRIPT, HERE / "cluster.toml"]
    ended = subprocess.run(command, env={**environ, **job}, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "has 2 nodes, the allocation 1 machines" in ended.stderr
