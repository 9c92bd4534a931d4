"""What `Placed` asks of hosts, and what it makes of their losses. The hosts are stand-ins that start nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdactors.actors.discovery import Ready, ReadyActor, read_ready_file, running
from pdactors.config.cluster import ClusterConfig, ListenSection, NodeSection, RouterSection
from pdactors.errors import ConfigError, ConnectionLost, ModelError, PDError
from pdactors.launchers import placed as module
from pdactors.launchers.node_host import Ending, Plan
from pdactors.launchers.placed import Placed

WAIT_S = 10.0
CONFIG = ClusterConfig(
    listen=ListenSection(tcp="0.0.0.0:0", zmq="tcp://127.0.0.1:0", http=""),
    router=RouterSection(node="n1"),
    node=(NodeSection(), NodeSection(name="n1")),
)


class StandIn:
    """Hosts on machines that a test names; each node is ready at once, and runs until it is told otherwise."""

    def __init__(self) -> None:
        self.machines = {"n0": "10.0.0.1", "n1": "10.0.0.2"}
        self.plans: list[Plan] = []
        self.ended: dict[str, asyncio.Future[Ending]] = {}
        self.stopped: list[str] = []
        self.failing: dict[str, PDError] = {}  # by method
        self.taken: set[int] = set()
        self.is_placed = self.is_closed = False

    async def place(self) -> None:
        if error := self.failing.get("place"):
            raise error
        self.is_placed = True

    async def call(self, node: str, method: str, *arguments: Any) -> Any:
        assert self.is_placed
        if error := self.failing.get(f"{node} {method}"):
            raise error
        return await getattr(self, f"_{method}")(node, *arguments)

    def close(self) -> None:
        self.is_closed = True

    def end(self, node: str, ending: Ending | ConnectionLost) -> None:
        if isinstance(ending, Ending):
            self.ended[node].set_result(ending)
        else:
            self.ended[node].set_exception(ending)

    async def _where(self, node: str) -> str:
        return self.machines[node]

    async def _fetch(self, node: str, model: str) -> bytes:
        found = self.failing.get(model)
        return msgspec.json.encode(Ending(found.code, found.message) if found else Ending())

    async def _listen(self, _node: str, _ip: str, port: int) -> tuple[int, str]:
        return (0, f"port {port} is taken") if port in self.taken else (port or 7300, "")

    async def _start(self, node: str, data: bytes) -> bytes:
        plan = msgspec.json.decode(data, type=Plan)
        self.plans.append(plan)
        self.ended[node] = asyncio.get_running_loop().create_future()
        actor = ReadyActor(f"{node}/worker-0", "worker", node, "r0", 1)
        listen = plan.config.listen
        tcp, zmq = listen.tcp.replace(":0", ":7070"), listen.zmq.replace(":0", ":7071")
        return msgspec.json.encode(Ready(plan.run_id, 1, tcp=tcp, zmq=zmq, http="", actors=(actor,)))

    async def _ended(self, node: str) -> bytes:
        return msgspec.json.encode(await self.ended[node])

    async def _stop(self, node: str) -> None:
        self.stopped.append(node)
        self.end(node, Ending())


@pytest.fixture
def hosts(home: Path, monkeypatch: pytest.MonkeyPatch) -> StandIn:
    monkeypatch.setattr(module, "FIRST_PAUSE_S", 0.001)
    return StandIn()


@asynccontextmanager
async def up(hosts: StandIn, ready_file: Path | None = None) -> AsyncIterator[Placed]:
    """Run a cluster from when it is ready, and stop it in order."""
    ready = asyncio.Event()
    placed = Placed(CONFIG, hosts, ready_file, lambda _ready: ready.set())
    async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as tasks:
        tasks.create_task(placed.run())
        await ready.wait()
        yield placed
        placed.stop()
    assert hosts.is_closed


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def test_every_node_is_told_where_all_are_and_where_the_router_listens(hosts: StandIn) -> None:
    async with up(hosts):
        assert sorted(plan.node for plan in hosts.plans) == ["n0", "n1"]
        assert len({plan.run_id for plan in hosts.plans}) == 1
        for plan in hosts.plans:
            assert [node.host for node in plan.config.node] == ["10.0.0.1", "10.0.0.2"]
            assert plan.config.router.control == "tcp://10.0.0.2:7300"


async def test_a_ready_file_has_the_actors_of_all_nodes_and_addresses_that_lead_to_the_gateway(
    hosts: StandIn, tmp_path: Path
) -> None:
    file = tmp_path / "ready.json"
    async with up(hosts, file):
        ready = read_ready_file(file)
        assert {actor.node for actor in ready.actors} == {"n0", "n1"}
        assert (ready.tcp, ready.zmq, ready.http) == ("10.0.0.2:7070", "tcp://127.0.0.1:7071", "")
        assert await asyncio.to_thread(running) == [ready]
    assert not file.exists()


async def test_the_routers_node_ends_first(hosts: StandIn) -> None:
    async with up(hosts):
        pass
    assert hosts.stopped == ["n1", "n0"]


@pytest.mark.parametrize("ending", [ConnectionLost("its host is lost"), Ending("connection", "the router is silent")])
async def test_a_lost_node_runs_again_where_it_is_put_then_and_the_others_go_on(
    hosts: StandIn, ending: Ending | ConnectionLost
) -> None:
    async with up(hosts):
        hosts.machines["n0"] = "10.0.0.3"
        hosts.end("n0", ending)
        await until(lambda: len(hosts.plans) == 3)
        assert hosts.plans[2].node == "n0"
        assert hosts.plans[2].config.node[0].host == "10.0.0.3"
        assert hosts.plans[2].run_id == hosts.plans[0].run_id


async def test_a_router_that_comes_back_where_it_was_keeps_run_and_ports(hosts: StandIn) -> None:
    async with up(hosts):
        hosts.end("n1", ConnectionLost("its host is lost"))
        await until(lambda: len(hosts.plans) == 3)
        again = hosts.plans[2].config
        assert again.router.control == "tcp://10.0.0.2:7300"
        assert (again.listen.tcp, again.listen.zmq) == ("0.0.0.0:7070", "tcp://127.0.0.1:7071")
        assert not hosts.stopped


async def test_a_router_that_moves_has_the_others_join_it_there(hosts: StandIn) -> None:
    async with up(hosts):
        hosts.machines["n1"] = "10.0.0.9"
        hosts.taken = {7300}  # there, and the file leaves it to the machine
        hosts.end("n1", ConnectionLost("its host is lost"))
        await until(lambda: hosts.stopped)
        hosts.taken = set()
        await until(lambda: len(hosts.plans) == 4)
        assert hosts.stopped == ["n0"]
        assert {plan.node: plan.config.router.control for plan in hosts.plans[2:]} == {
            "n0": "tcp://10.0.0.9:7300",
            "n1": "tcp://10.0.0.9:7300",
        }


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ("place", ConfigError("Ray cannot place the cluster")),
        (CONFIG.model.path, ModelError("there is no model")),
        ("n0 start", ConnectionLost("its host is lost")),
        ("n1 listen", ConfigError("router.control: it is in use")),
    ],
)
async def test_what_fails_before_the_cluster_is_ready_is_the_launchs_error(
    hosts: StandIn, where: str, error: PDError
) -> None:
    hosts.failing[where] = error
    placed = Placed(CONFIG, hosts, None, lambda _ready: pytest.fail("it is not ready"))
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(type(error), match=error.message):
            await placed.run()
    assert hosts.is_closed


async def test_a_stop_before_it_is_ready_is_no_error(hosts: StandIn) -> None:
    placed = Placed(CONFIG, hosts, None, lambda _ready: None)
    placed.stop()
    async with asyncio.timeout(WAIT_S):
        await placed.run()
    assert hosts.is_closed
