"""Several nodes: on machines of their own, which are network namespaces here, and on one."""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from netns import PDACTORS, Host, Launched, two_hosts

from pdactors import AsyncClient, Client, launch
from pdactors.actors.discovery import running

TOKEN, JOIN_TOKEN = "let-me-in", "sesame-0815"
QUICK = {"router.heartbeat_ms": 200, "router.dead_after_ms": 1500}
LOST_S = 20.0  # a second and a half, and what a busy machine adds
APART = {"prefill": 1, "decode": 1}
LEASES = ["cluster.mode=disaggregated", "kv.transport=lease"]
MakeIds = Callable[[object, int], list[int]]
Settings = Callable[..., list[str]]


def cluster_file(folder: Path, hosts: Sequence[str], **engines: int) -> Path:
    """Write a file with a node n0, n1, ... on each host, in racks of two."""
    counts = "".join(f"{role} = {count}\n" for role, count in engines.items())
    nodes = [f'[[node]]\nname = "n{i}"\nhost = "{host}"\nrack = "r{i // 2}"\n{counts}' for i, host in enumerate(hosts)]
    file = folder / "cluster.toml"
    file.write_text("\n".join(nodes))
    return file


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        return int(listening.getsockname()[1])


def engines(status: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {a["name"]: a for a in status["actors"] if a["role"] in ("prefill", "decode", "worker")}


def nodes(status: dict[str, Any]) -> set[str]:
    """Return the nodes of all actors, and of those that did not answer."""
    return {actor["node"] for actor in status["actors"]} | {name.partition("/")[0] for name in status["silent"]}


def ask_all(address: str, token: str, make_ids: MakeIds, count: int = 24) -> None:
    """Ask different things at once, and hold that every answer is what it is alone."""

    async def ask() -> None:
        async with AsyncClient(address, token=token) as client:
            asked = [
                {"prompt_token_ids": make_ids(("nodes", i), 20 + 7 * i), "max_tokens": 24, "ignore_eos": True}
                for i in range(count)
            ]
            together = await asyncio.gather(*(client.generate(**fields) for fields in asked))
            alone = [await client.generate(**fields) for fields in asked[::6]]
            assert [answer.token_ids for answer in together[::6]] == [answer.token_ids for answer in alone]

    asyncio.run(ask())


class Machines:
    """A cluster on namespaces: one launch each, and a client on the router's."""

    def __init__(self, hosts: Sequence[Host], arguments: Sequence[str], folder: Path) -> None:
        self.hosts = hosts
        self.arguments = [*arguments]
        self.launched: dict[int, Launched] = {}
        self._folder = folder
        self._opened = ExitStack()
        self._numbers = itertools.count()

    def launch(self, index: int, clock_ahead_s: int = 0) -> Launched:
        ready_file = self._folder / f"ready-{index}-{next(self._numbers)}.json"
        running = self.hosts[index].launch(f"n{index}", self.arguments, ready_file, clock_ahead_s)
        self.launched[index] = self._opened.enter_context(running)
        return self.launched[index]

    @contextmanager
    def client(self, index: int = 0) -> Iterator[Client]:
        """Ask from one of the machines, at the address that its own ready file tells."""
        with self.hosts[index].entered(), Client(self.launched[index].ready.zmq, token=TOKEN) as client:
            yield client

    def ask_all(self, make_ids: MakeIds) -> None:
        with self.hosts[0].entered():
            ask_all(self.launched[0].ready.zmq, TOKEN, make_ids)

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *exc: object) -> None:
        for launched in self.launched.values():  # all at once
            launched.process.terminate()
        self._opened.close()


hosts = pytest.fixture(two_hosts, scope="module", name="hosts")


@pytest.fixture
def machines(
    hosts: list[Host], tmp_path: Path, home: Path, tiny_settings: Settings
) -> Iterator[Callable[..., Machines]]:
    """Make a cluster of two machines, and launch both: `machines(mode, workers=1)`; nothing may be left of it."""
    with ExitStack() as opened:

        def make(mode: str, transport: str = "auto", **engines: int) -> Machines:
            file = cluster_file(tmp_path, [host.address for host in hosts], **engines)
            keys = {
                "cluster.mode": mode,
                "kv.transport": transport,
                "router.control": f"tcp://{hosts[0].address}:7300",
                "listen.zmq": f"tcp://{hosts[0].address}:7301",
                "security.token": TOKEN,
                "security.join_token": JOIN_TOKEN,
                **QUICK,
            }
            made = opened.enter_context(Machines(hosts, [str(file), *tiny_settings(**keys)], tmp_path))
            with ThreadPoolExecutor() as at_once:
                list(at_once.map(made.launch, range(2)))
            return made

        yield make
    assert not [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in " ".join(p.info["cmdline"] or [])]
    assert not list(tmp_path.glob("*ready*"))


# ---- Machines of their own --------


def test_two_machines_serve_chunked(machines: Any, make_ids: MakeIds, wait: Any) -> None:
    both = machines("chunked", workers=1)
    first, second = both.launched[0].ready, both.launched[1].ready
    assert first.run_id == second.run_id
    assert first.zmq == second.zmq
    assert {actor.node for actor in first.actors} == {"n0"}
    assert {actor.name for actor in second.actors} == {"n1/migrator", "n1/worker-0"}
    both.ask_all(make_ids)
    with both.client(index=1) as client:
        status = client.status()
        assert {(a["name"], a["node"], a["rack"]) for a in status["actors"]} >= {("n1/worker-0", "n1", "r0")}
        computed = {name: actor["prompt_tokens_computed"] for name, actor in engines(status).items()}
        assert computed.keys() == {"n0/worker-0", "n1/worker-0"}
        assert min(computed.values()) > 0.25 * max(computed.values())
        assert client.scale("n1", "worker", 2)["started"] == ["n1/worker-1"]
        wait(lambda: engines(client.status())["n1/worker-1"]["state"] == "ready", 60.0, "it is not ready")
        client.drain("n1/worker-0")
        wait(lambda: "n1/worker-0" not in engines(client.status()), 30.0, "it does not end")
    both.ask_all(make_ids)
    for host in both.hosts:
        shown = json.loads(host.pdactors("status", "--json", "--token", TOKEN).stdout)
        assert shown["run_id"] == first.run_id
        assert host.pdactors("leaks", "--token", TOKEN).returncode == 0


def test_two_machines_serve_disaggregated_and_decode_stays_where_the_prefill_was(
    machines: Any, make_ids: MakeIds
) -> None:
    both = machines("disaggregated", "lease", **APART)
    before = [host.counters() for host in both.hosts]
    both.ask_all(make_ids)
    with both.client() as client:
        status, leaks = client.status(), client.leaks()
        for engine in engines(status).values():
            assert engine["step_ms"]["p50"] > 0, f"{engine['name']} had nothing to do"
        assert not any(leaks.values())
        answer = client.generate("the cat sat on the mat", max_tokens=4, ignore_eos=True)
        assert len(answer.token_ids) == 4
        refused = _error(lambda: client.scale("n1", "decode", 0))
        assert "prefill engines of n1 need a decode engine there" in refused
    after = [host.counters() for host in both.hosts]
    assert all(b.sent_bytes > a.sent_bytes for a, b in zip(before, after, strict=True))


def _error(call: Callable[[], object]) -> str:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call()
    return str(caught.value)


@pytest.mark.slow
def test_a_machine_that_dies_leaves_the_others_serving_and_may_join_again(
    machines: Any, make_ids: MakeIds, wait: Any
) -> None:
    both = machines("chunked", workers=1)
    with both.client() as client:
        both.launched[1].kill()
        assert client.generate("the cat sat", max_tokens=4, ignore_eos=True).finish_reason in ("length", "stop")
        wait(lambda: nodes(client.status()) == {"n0"}, LOST_S, "n1 is not given up")
        both.ask_all(make_ids)
        assert not any(client.leaks().values())
        incarnation = {name: actor["incarnation"] for name, actor in engines(client.status()).items()}
        again = both.launch(1)
        assert again.ready.run_id == both.launched[0].ready.run_id
        both.ask_all(make_ids)
        status = client.status()
        assert engines(status)["n1/worker-0"]["prompt_tokens_computed"] > 0
        assert engines(status)["n0/worker-0"]["incarnation"] == incarnation["n0/worker-0"]
        assert not any(client.leaks().values())
        both.launched[1].kill()
        both.launch(1)  # before anybody could notice
        both.ask_all(make_ids)
        wait(lambda: not any(client.leaks().values()), LOST_S, lambda: f"{client.leaks()}")
        assert engines(client.status())["n1/worker-0"]["prompt_tokens_computed"] > 0


@pytest.mark.slow
def test_a_machine_that_was_cut_off_is_given_up_and_starts_afresh_when_it_is_back(
    machines: Any, make_ids: MakeIds, wait: Any
) -> None:
    both = machines("chunked", workers=1)
    with both.client() as client:
        former = engines(client.status())["n1/worker-0"]["incarnation"]
        both.hosts[1].plug(False)
        wait(lambda: nodes(client.status()) == {"n0"}, LOST_S, "n1 is not given up")
        both.ask_all(make_ids)
        both.hosts[1].plug(True)

        def is_back() -> bool:
            found = engines(client.status()).get("n1/worker-0", {"state": "", "incarnation": 0})
            return bool(found["state"] == "ready" and found["incarnation"] > former)

        wait(is_back, 60.0, lambda: f"{client.status()}")
        both.ask_all(make_ids)
        wait(lambda: not any(client.leaks().values()), LOST_S, lambda: f"{client.leaks()}")
    assert both.launched[1].process.poll() is None


@pytest.mark.slow
def test_a_machine_that_leaves_is_gone_at_once_and_the_end_of_the_run_is_the_end_of_all(
    machines: Any, make_ids: MakeIds, wait: Any
) -> None:
    both = machines("chunked", workers=1)
    with both.client() as client:
        assert both.launched[1].terminate() == 0
        wait(lambda: nodes(client.status()) == {"n0"}, 1.0, "n1 is still there")
        both.launch(1)
        both.ask_all(make_ids)
    assert both.launched[0].terminate() == 0
    assert both.launched[1].process.wait(5.0) == 0


@pytest.mark.slow
def test_a_share_whose_router_died_ends_by_itself(machines: Any) -> None:
    both = machines("chunked", workers=1)
    children = [psutil.Process(actor.pid) for actor in both.launched[1].ready.actors]
    both.launched[0].kill()
    assert both.launched[1].process.wait(60.0) == 1
    assert not psutil.wait_procs(children, 5.0)[1]


# ---- One machine --------


@pytest.fixture
def arguments(tmp_path: Path, home: Path, tiny_settings: Settings) -> list[str]:
    """Two nodes of one worker on loopback, whose router is at a fixed port."""
    file = cluster_file(tmp_path, ["127.0.0.1", "localhost"], workers=1)
    keys = {
        "cluster.mode": "chunked",
        "router.control": f"tcp://127.0.0.1:{free_port()}",
        "security.join_token": JOIN_TOKEN,
        **QUICK,
    }
    return [str(file), *tiny_settings(**keys)]


@pytest.mark.parametrize(
    ("mode", "counts"), [pytest.param("chunked", {"workers": 1}, marks=pytest.mark.slow), ("disaggregated", APART)]
)
def test_two_nodes_on_one_machine_are_one_launch(
    tmp_path: Path, home: Path, tiny_settings: Settings, make_ids: MakeIds, settled: Any, mode: str, counts: Any
) -> None:
    file = cluster_file(tmp_path, ["127.0.0.1", "localhost"], **counts)
    with launch(file, sets=[*tiny_settings(**{"cluster.mode": mode})[1::2]], quiet=False) as cluster:
        assert {actor.node for actor in cluster.ready.actors} == {"n0", "n1"}
        ask_all(cluster.zmq, "", make_ids)
        status = settled(cluster)
        assert all(engine["step_ms"]["p50"] > 0 for engine in engines(status).values())
        assert sum(actor["role"] == "migrator" for actor in status["actors"]) == 2
        children = psutil.Process(cluster.ready.pid).children(recursive=True)
        nurseries = [child for child in children if "pdactors.actors.nursery" in child.cmdline()[:3]]
        assert len({child.cmdline()[-1] for child in nurseries}) == 1
    assert not psutil.wait_procs(children, 1.0)[1]


def run_launch(*arguments: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([*PDACTORS, "launch", *arguments], capture_output=True, timeout=timeout_s, check=False)


@pytest.fixture(scope="module")
def other_model(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with other rotary angles: nothing but the fingerprint tells."""
    folder = tmp_path_factory.mktemp("other") / "tiny"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 20000.0}))
    return folder


def test_whoever_differs_is_refused_with_both_values_and_ends_at_once(arguments: list[str], other_model: Path) -> None:
    def refused(*differences: str) -> str:
        sets = [part for difference in differences for part in ("--set", difference)]
        result = run_launch(*arguments, *sets, "--node", "n1")
        text = result.stderr.decode()
        assert result.returncode == 1, text
        assert JOIN_TOKEN not in text
        assert "guess-4711" not in text
        assert "Traceback" not in text
        (error,) = [line for line in text.splitlines() if line.startswith("error: ")]
        return error

    with launch(arguments[0], node="n0", sets=arguments[2::2], quiet=False) as cluster:
        assert "join token: wrong or missing" in refused("security.join_token=guess-4711")
        assert _both(refused(f"model.path={other_model}"), "model")
        assert _both(refused("kv.block_tokens=16"), "KV layout")
        assert _both(refused("model.max_model_len=1024"), "model.max_model_len") == {"1024", "2048"}
        with Client(cluster.zmq) as client:
            assert {actor["node"] for actor in client.status()["actors"]} == {"n0"}
            assert client.generate("the cat", max_tokens=2, ignore_eos=True).finish_reason == "length"


def _both(error: str, what: str) -> set[str]:
    """Return the two values that a refusal names."""
    _, found, rest = error.partition(f"{what}: theirs is ")
    assert found, error
    theirs, ours = rest.split(", ours is ")
    assert theirs != ours
    return {theirs, ours}


@pytest.mark.slow
def test_nodes_of_one_machine_may_be_launched_apart(arguments: list[str], make_ids: MakeIds, settled: Any) -> None:
    sets = arguments[2::2]
    with launch(arguments[0], node="n0", sets=sets) as first, launch(arguments[0], node="n1", sets=sets) as second:
        assert first.ready.run_id == second.ready.run_id
        (found,) = running()
        assert found.zmq == first.zmq
        assert subprocess.run([*PDACTORS, "leaks"], check=False, timeout=60).returncode == 0
        ask_all(first.zmq, "", make_ids)
        assert set(engines(settled(first))) == {"n0/worker-0", "n1/worker-0"}


@pytest.mark.parametrize(
    ("sets", "node", "parts"),
    [
        (["router.control=tcp://127.0.0.1:0"], "n1", ["router.control", "n0", "fixed port"]),
        (["node.1.host=192.0.2.1", "router.control=127.0.0.1:0"], "n1", ["192.0.2.1"]),
        ([], "n7", ["n7", "n0, n1"]),
        ([*LEASES, "node.1.decode=0"], "n0", ["node.1.decode", "n1", "kv.transport"]),
        ([*LEASES, "node.0.prefill=0"], "n0", ["node.0.prefill", "n0", "kv.transport"]),
    ],
)
def test_a_launch_that_cannot_be_says_why(arguments: list[str], sets: list[str], node: str, parts: list[str]) -> None:
    result = run_launch(*arguments, *(part for value in sets for part in ("--set", value)), "--node", node)
    assert result.returncode == 1
    assert b"Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr.decode()
