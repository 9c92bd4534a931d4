"""A cluster whose nodes Ray places: engines and machines die, the rest serves on, and what is lost comes back."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from netns import PDACTORS
from ray_machines import RayMachines

from pdactors import AsyncClient, Client, ConnectionLost, launch

pytestmark = pytest.mark.slow

MakeIds = Callable[[object, int], list[int]]
Settings = Callable[..., list[str]]
SERVED_S = 15.0
BACK_S = 90.0  # a busy machine takes long to import what engines need
QUICK = {"router.heartbeat_ms": 200, "router.dead_after_ms": 1500}


def cluster_file(folder: Path, *racks: str) -> Path:
    """Write a file with a node n0, n1, ... of one worker in each of these racks."""
    file = folder / "cluster.toml"
    nodes = "".join(f'[[node]]\nname = "n{i}"\nrack = "{rack}"\nworkers = 1\n' for i, rack in enumerate(racks))
    file.write_text(f'[cluster]\nlauncher = "ray"\n{nodes}')
    return file


@pytest.fixture
def arguments(tmp_path: Path, home: Path, ray_machines: RayMachines, tiny_settings: Settings) -> list[str]:
    return tiny_settings(**{"cluster.mode": "chunked", **QUICK})


def run(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*PDACTORS, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


def workers(client: Client) -> dict[str, dict[str, Any]]:
    """Return the engines that are ready, by name."""
    found = client.status()["actors"]
    return {actor["name"]: actor for actor in found if actor["role"] == "worker" and actor["state"] == "ready"}


def is_back(client: Client, name: str, former: int) -> bool:
    try:
        return bool(workers(client).get(name, {"incarnation": 0})["incarnation"] > former)
    except ConnectionLost:
        return False


async def ask_while(address: str, until: Any, make_ids: MakeIds, deed: Callable[[], None]) -> None:
    """Do something while long answers come; hold that they, and new ones at once, are what they are alone."""
    asked = [
        {"prompt_token_ids": make_ids(("ray", i), 30 + 9 * i), "max_tokens": 400, "ignore_eos": True} for i in range(9)
    ]
    async with AsyncClient(address) as client:
        alone = [(await client.generate(**fields)).token_ids for fields in asked]
        working = asyncio.gather(*(client.generate(**fields) for fields in asked))
        await until(client, lambda status: status["requests"] == len(asked))
        await asyncio.to_thread(deed)
        async with asyncio.timeout(SERVED_S):
            assert (await client.generate("the cat", max_tokens=3, ignore_eos=True)).finish_reason == "length"
        assert [answer.token_ids for answer in await working] == alone


def test_an_engine_a_host_and_a_whole_machine_die_and_come_back_while_the_rest_serves(
    arguments: list[str], tmp_path: Path, ray_machines: RayMachines, make_ids: MakeIds, wait: Any, until: Any
) -> None:
    with (
        launch(cluster_file(tmp_path, "r0", "r0", "r1"), sets=arguments[1::2], quiet=False) as cluster,
        Client(cluster.zmq) as client,
    ):

        def lose(node: str, deed: Callable[[int], None]) -> None:
            """Do something to a node's engine, or to what has its process, and wait until a successor is ready."""
            engines = workers(client)
            former = engines.pop(f"{node}/worker-0")
            asyncio.run(ask_while(cluster.zmq, until, make_ids, lambda: deed(former["pid"])))
            wait(lambda: is_back(client, former["name"], former["incarnation"]), BACK_S, "not back")
            now = workers(client)
            assert {name: now[name]["incarnation"] for name in engines} == {
                name: engine["incarnation"] for name, engine in engines.items()
            }
            assert not any(client.leaks().values())

        first = workers(client)
        at = {name: ray_machines.of_process(engine["pid"]) for name, engine in first.items()}
        assert [first[name]["rack"] for name in sorted(first)] == ["r0", "r0", "r1"]
        assert len(set(at.values())) == 3, "they are not on a machine each"
        lose("n2", lambda pid: os.kill(pid, signal.SIGKILL))
        lose("n2", lambda pid: psutil.Process(pid).parent().kill())  # type: ignore[union-attr]
        lost = [psutil.Process(actor["pid"]) for actor in client.status()["actors"] if actor["node"] == "n1"]
        lose("n1", lambda _pid: ray_machines.kill(at["n1/worker-0"]))
        assert not psutil.wait_procs(lost, 5.0)[1], "actors outlive their machine"
        moved = ray_machines.of_process(workers(client)["n1/worker-0"]["pid"])
        assert moved == at["n0/worker-0"], "rack r0 has no other machine"
        assert run("leaks").returncode == 0
        assert json.loads(run("status", "--json").stdout)["run_id"] == cluster.ready.run_id
    assert run("leaks").returncode == 0
    ray_machines.add("r0")


def test_the_routers_machine_dies_and_the_run_goes_on_at_another(
    arguments: list[str], tmp_path: Path, ray_machines: RayMachines, wait: Any
) -> None:
    ray_machines.add("r2", router=1)
    ray_machines.add("r2", router=1)
    with (
        launch(cluster_file(tmp_path, "r2", "r1"), sets=arguments[1::2], quiet=False) as cluster,
        Client(cluster.zmq) as client,
    ):
        first = workers(client)
        gateway = next(actor.pid for actor in cluster.ready.actors if actor.role == "gateway")
        ray_machines.kill(ray_machines.of_process(gateway))
        for name, engine in first.items():
            wait(
                lambda name=name, engine=engine: is_back(client, name, engine["incarnation"]), BACK_S, f"{name} is gone"
            )
        assert client.status()["run_id"] == cluster.ready.run_id
        assert client.generate("the cat", max_tokens=3, ignore_eos=True).finish_reason == "length"
        assert not any(client.leaks().values())


@pytest.mark.parametrize(
    ("racks", "sets", "reason"),
    [
        (["r9"], [], 'node "n0" asks for CPU 1, rack:r9, router 1, worker 1, and no machine has that much of rack:r9'),
        (["r0"], ["node.0.workers=99"], "no machine has that much of CPU, worker"),
        (["r0"], ["node.0.host=192.0.2.7"], "no machine has that much of node:192.0.2.7"),
        (["r0"] * 5, [], 'Ray did not place the cluster within 20 s: node "n0" asks for CPU 1, rack:r0, router 1'),
    ],
)
def test_a_placement_that_nobody_can_satisfy_is_refused(
    arguments: list[str], tmp_path: Path, racks: list[str], sets: list[str], reason: str
) -> None:
    more = [part for value in sets for part in ("--set", value)]
    refused = run("launch", *arguments, *more, str(cluster_file(tmp_path, *racks)))
    assert refused.returncode == 1
    assert reason in refused.stderr
    assert "Traceback" not in refused.stderr


def test_no_ray_cluster_is_an_error_that_says_what_to_do(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")
    assert (
        'RAY_ADDRESS = "127.0.0.1:9": no Ray cluster answers there'
        in run("launch", "--set", "cluster.launcher=ray").stderr
    )


def test_verify_finds_no_difference_where_kv_moves_between_machines(arguments: list[str], tmp_path: Path) -> None:
    pytest.importorskip("ucxx", reason="transfers need ucxx: pip install 'pdactors[ucx]'")
    settings = [value for value in arguments[1::2] if not value.startswith(("model.dtype", "cluster.mode"))]
    settings += ["node.0.decode=0", "node.1.prefill=0", *(f"node.{i}.ucx_device=lo" for i in range(3))]
    sets = [part for value in settings for part in ("--set", value)]
    asked = ["--json", "--modes", "disaggregated", "--prompts", "12", "--max-tokens", "16"]
    result = run("verify", *asked, *sets, str(cluster_file(tmp_path, "r0", "r0", "r1")), timeout_s=300.0)
    found = json.loads(result.stdout)["modes"]["disaggregated"]
    assert (found["equal"] + found["tied"], found["diverged"], found["error"]) == (12, [], None), result.stderr
