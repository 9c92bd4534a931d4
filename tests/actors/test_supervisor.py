"""Ends, deaths and bad starts of whole clusters."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from pdactors import Client, Cluster, ConnectionLost, PDError, WorkerLost, launch

ALWAYS: dict[str, Any] = {"max_tokens": 1500, "ignore_eos": True}  # an answer that takes seconds
QUICK = {"router.heartbeat_ms": 200, "router.dead_after_ms": 1500}
RESTARTED_S = 60.0  # a busy machine takes long to import torch; idle ones take 10 s


class Launched:
    """`pdactors launch` as a child, ready to be asked."""

    def __init__(self, process: subprocess.Popen[bytes], ready_file: Path) -> None:
        self.process = process
        self.ready_file = ready_file
        ready = json.loads(ready_file.read_text())
        self.tcp: str = ready["tcp"]
        self.zmq: str = ready["zmq"]
        self.run_id: str = ready["run_id"]
        self.pids = [actor["pid"] for actor in ready["actors"]]
        self.ready = ready


Launch = Callable[..., Launched]


def slowly(value: object) -> Any:
    """Return a parameter whose test is one of the slow set."""
    return pytest.param(value, marks=pytest.mark.slow)


@pytest.fixture
def run_launch(home: Path, tiny_settings: Callable[..., list[str]], wait: Any) -> Iterator[Launch]:
    """Run `pdactors launch` on the tiny model; whatever still runs at the end is killed."""
    with ExitStack() as opened:

        def runner(**keys: object) -> Launched:
            ready_file = home.parent / f"ready-{len(opened._exit_callbacks)}.json"  # type: ignore[attr-defined]
            process = opened.enter_context(spawn("launch", "--ready-file", str(ready_file), *tiny_settings(**keys)))
            wait(lambda: ready_file.exists() or process.poll() is not None, 120.0, "the cluster is not ready")
            return Launched(process, ready_file)

        yield runner


@contextmanager
def spawn(*arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "pdactors.cli.main", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True) as process:
        try:
            yield process
        finally:
            process.kill()


def assert_ended(launched: Launched, home: Path, wait: Any) -> None:
    """Hold that a second later nothing of it is there: no process, no socket, no file; another's record may be."""
    wait(lambda: not [pid for pid in launched.pids if is_alive(pid)], 1.0, "actors are left")
    wait(lambda: not any(is_listening(a) for a in (launched.tcp, launched.zmq)), 1.0, "a socket is left")
    wait(lambda: not launched.ready_file.exists(), 1.0, "the ready file is left")
    assert not list(home.glob(f"ready-{launched.run_id}-*"))
    others = {path.name for path in home.glob("ready-*.lock")}
    assert set(os.listdir(home)) - others <= {"models", "logs", "downloads", "kernels"}
    assert not list(launched.ready_file.parent.glob(".ready*"))


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def is_listening(address: str) -> bool:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=2.0).close()
    except ConnectionRefusedError:
        return False
    return True


# ---- Ends --------


@pytest.mark.parametrize("number", [signal.SIGTERM, *map(slowly, [signal.SIGINT, signal.SIGKILL])])
def test_a_signal_to_the_supervisor_ends_everything_within_a_second(
    run_launch: Launch, home: Path, wait: Any, dial: Any, number: signal.Signals
) -> None:
    launched = run_launch(**{"model.max_model_len": 8000})
    line = dial(launched.tcp)
    plain = dial(launched.tcp)
    line.send({"id": "a", "prompt": "^", "max_tokens": 7900, "ignore_eos": True})
    plain.send("the cat sat")
    line.event()
    launched.process.send_signal(number)
    events = [json.loads(text) for text in line.rest().splitlines()]
    assert (events[-1]["id"], events[-1]["event"]) == ("a", "error")
    assert events[-1]["code"] == "overloaded"
    assert events[-1]["retry_after_s"] > 0
    assert plain.rest().endswith(b"\n.\n")
    status = launched.process.wait(3.0)
    assert status == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    assert_ended(launched, home, wait)


@pytest.mark.slow
def test_two_clusters_run_side_by_side_and_the_end_of_one_is_not_the_others(
    run_launch: Launch, home: Path, wait: Any
) -> None:
    one, other = run_launch(), run_launch()
    several = cli("status", "--json")
    assert several.returncode == 1
    assert b"several clusters are running" in several.stderr
    assert one.run_id.encode() in several.stderr
    assert other.run_id.encode() in several.stderr
    with Client(one.zmq) as first, Client(other.zmq) as second:
        assert first.generate("the cat sat").token_ids == second.generate("the cat sat").token_ids
        one.process.terminate()
        assert second.generate("the cat sat").finish_reason == "length"
        assert one.process.wait(3.0) == 0
        assert_ended(one, home, wait)
        assert json.loads(cli("status", "--json").stdout)["run_id"] == other.run_id
        assert cli("leaks").returncode == 0
        assert second.generate("the cat sat").finish_reason == "length"
    other.process.terminate()
    assert other.process.wait(3.0) == 0
    assert_ended(other, home, wait)


EMBEDDING = """
import json, sys
from pdactors import launch
cluster = launch(sets=sys.argv[1:])
print(json.dumps([cluster.ready.pid, *(actor.pid for actor in cluster.ready.actors)]), flush=True)
sys.stdin.read()
"""


def test_a_killed_program_takes_its_cluster_along(
    home: Path, tiny_settings: Callable[..., list[str]], wait: Any
) -> None:
    sets = tiny_settings()[1::2]
    command = [sys.executable, "-c", EMBEDDING, *sets]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        pids = json.loads(process.stdout.readline())
        assert all(is_alive(pid) for pid in pids)
        process.kill()
        wait(lambda: not [pid for pid in pids if is_alive(pid)], 3.0, "the cluster outlives its program")


# ---- Deaths --------


@pytest.fixture(scope="module")
def quick(start: Any) -> Iterator[Cluster]:
    """A cluster whose actors die in these tests; it has to be whole again after each."""
    with start(**QUICK) as cluster:
        yield cluster


@pytest.fixture
def survivor(quick: Cluster, wait: Any) -> Iterator[Client]:
    """A client that is connected all the time."""
    with Client(quick.zmq) as client:
        yield client
        wait(lambda: is_whole(client), RESTARTED_S, lambda: f"not whole: {client.status()} {client.leaks()}")


def is_whole(client: Client) -> bool:
    try:
        status, leaks = client.status(), client.leaks()
    except PDError:
        return False
    states = {actor["name"]: actor["state"] for actor in status["actors"]}
    roles = {actor["role"] for actor in status["actors"]}
    return (
        roles == {"router", "gateway", "migrator", "prefill", "decode"}
        and set(states.values()) == {"ready"}
        and status["requests"] == 0
        and not any(leaks.values())
    )


def actor_of(client: Client, role: str) -> dict[str, Any]:
    (actor,) = [actor for actor in client.status()["actors"] if actor["role"] == role]
    return dict(actor)


def exhaust(stream: Iterator[Any]) -> tuple[int, PDError | None]:
    """Read a stream to its end; return how much came and the error that ended it."""
    count = 0
    try:
        for _ in stream:
            count += 1
    except PDError as error:
        return count, error
    return count, None


def is_back(client: Client, role: str, incarnation: int) -> bool:
    try:
        actor = actor_of(client, role)
    except (PDError, ValueError):
        return False
    return bool(actor["incarnation"] > incarnation and actor["state"] == "ready")


@pytest.mark.parametrize("role", [*map(slowly, ["gateway", "router", "migrator", "prefill"]), "decode"])
def test_an_actor_that_is_killed_comes_back_under_a_new_incarnation(
    quick: Cluster, survivor: Client, wait: Any, role: str
) -> None:
    expected = survivor.generate("the cat sat", max_tokens=12).token_ids
    actor = actor_of(survivor, role)
    os.kill(actor["pid"], signal.SIGKILL)
    wait(lambda: is_back(survivor, role, actor["incarnation"]), RESTARTED_S, "it does not come back")
    with Client(quick.zmq) as other:
        assert other.generate("the cat sat", max_tokens=12).token_ids == expected
    assert survivor.generate("the cat sat", max_tokens=12).token_ids == expected


@pytest.mark.parametrize("role", ["gateway", "router", "migrator", "prefill", "decode"])
def test_a_request_on_an_actor_that_is_killed_gets_its_end_within_5_seconds(
    quick: Cluster, survivor: Client, wait: Any, role: str
) -> None:
    stream = survivor.events("^", **ALWAYS)
    first = next(stream)
    actor = actor_of(survivor, role)
    os.kill(actor["pid"], signal.SIGKILL)
    began = time.monotonic()
    num_events, error = exhaust(stream)
    if error is None:
        assert role != "gateway", "tokens pass it"
        assert first.index == 0  # type: ignore[union-attr]
        assert num_events == ALWAYS["max_tokens"]
    else:
        assert role in ("gateway", "router"), "the request goes on"  # a busy machine's router may come back too late
        assert isinstance(error, ConnectionLost if role == "gateway" else WorkerLost)
        assert time.monotonic() - began < 6.0
    wait(lambda: is_back(survivor, role, actor["incarnation"]), RESTARTED_S, "it does not come back")


def test_a_request_that_comes_while_the_router_is_down_gets_its_end(
    quick: Cluster, survivor: Client, dial: Any, wait: Any
) -> None:
    line = dial(quick.tcp, timeout_s=10.0)
    router = actor_of(survivor, "router")
    os.kill(router["pid"], signal.SIGKILL)
    wait(lambda: not is_alive(router["pid"]), 1.0, "it lives")
    answer = line.ask(prompt="the cat", max_tokens=3)
    assert answer.end["event"] == "done" or answer.end["code"] == "worker_lost"
    wait(lambda: is_back(survivor, "router", router["incarnation"]), RESTARTED_S, "it does not come back")


def test_a_request_that_outlived_its_router_can_be_cancelled(survivor: Client, wait: Any) -> None:
    stream = survivor.stream("^", max_tokens=2000, ignore_eos=True)
    next(stream)
    next(stream)
    router = actor_of(survivor, "router")
    os.kill(router["pid"], signal.SIGKILL)
    wait(lambda: is_back(survivor, "router", router["incarnation"]), RESTARTED_S, "it does not come back")
    if actor_of(survivor, "decode")["running"]:  # a slow machine's router comes back later than the answer ends
        stream.close()  # type: ignore[attr-defined]
        wait(lambda: not actor_of(survivor, "decode")["running"], 1.0, "decode goes on for nobody")


def test_a_prompt_on_a_prefill_that_is_killed_is_not_forgotten(quick: Cluster, survivor: Client, dial: Any) -> None:
    line = dial(quick.tcp, timeout_s=RESTARTED_S)
    prefill = actor_of(survivor, "prefill")
    os.kill(prefill["pid"], signal.SIGSTOP)  # so that the prompts are surely there when it dies
    for id in range(3):
        line.send({"id": id, "prompt": f"prompt {id}", "max_tokens": 3})
    began = time.monotonic()
    os.kill(prefill["pid"], signal.SIGKILL)
    ends = []
    while len(ends) < 3:
        event = line.event()
        if event["event"] != "token":
            ends.append(event)
    assert all(end["event"] == "done" or end["code"] == "worker_lost" for end in ends)
    assert time.monotonic() - began < 5.0


def test_a_stopped_decode_is_fenced_and_nothing_that_it_does_later_has_effect(
    quick: Cluster, survivor: Client, wait: Any
) -> None:
    stream = survivor.events("^", **ALWAYS)
    next(stream)
    decode = actor_of(survivor, "decode")
    os.kill(decode["pid"], signal.SIGSTOP)
    num_events, error = exhaust(stream)
    assert (num_events, error) == (ALWAYS["max_tokens"], None)
    assert not is_alive(decode["pid"]), "it was given up but not killed"
    wait(lambda: is_back(survivor, "decode", decode["incarnation"]), RESTARTED_S, "it does not come back")
    assert survivor.generate("the cat sat", max_tokens=3).finish_reason == "length"


# ---- What is left --------


@pytest.mark.slow
def test_what_a_launch_leaves_that_is_killed_with_all_its_processes_is_gone_after_the_next(
    run_launch: Launch, home: Path, wait: Any
) -> None:
    """The second time its gateway is stopped, so that it does not leave with the others."""
    segments = set(os.listdir("/dev/shm"))
    dead: list[Launched] = []
    for i in range(2):
        launched = run_launch()
        for former in dead:
            assert not former.ready_file.exists()
            assert not [pid for pid in former.pids if is_alive(pid)]
            assert not is_listening(former.tcp)
        assert len(list(home.glob("ready-*"))) == 1
        dead.append(launched)
        if i == 1:
            gateway = next(actor["pid"] for actor in launched.ready["actors"] if actor["role"] == "gateway")
            os.kill(gateway, signal.SIGSTOP)
            launched.process.kill()
            assert is_alive(gateway)
        else:
            os.killpg(launched.process.pid, signal.SIGKILL)
        launched.process.wait(3.0)
        found = cli("leaks", "--json")
        assert found.returncode == 1
        assert json.loads(found.stdout)["stale_files"] == [str(launched.ready_file)]
        assert bool(json.loads(found.stdout)["stale_processes"]) == (i == 1)
    last = run_launch()
    assert cli("leaks").returncode == 0
    last.process.terminate()
    assert last.process.wait(5.0) == 0
    assert_ended(last, home, wait)
    assert set(os.listdir("/dev/shm")) <= segments


# ---- Bad starts --------


def cli(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "pdactors.cli.main", *arguments], capture_output=True, timeout=120, check=False
    )


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield listening.getsockname()[1]


BAD_STARTS: list[tuple[str, dict[str, object], list[str]]] = [
    ("tcp port in use", {"listen.tcp": "127.0.0.1:{taken}"}, ["listen.tcp", "{taken}", "in use"]),
    ("http port in use", {"listen.http": "127.0.0.1:{taken}"}, ["listen.http", "{taken}", "in use"]),
    ("zmq port in use", {"listen.zmq": "tcp://127.0.0.1:{taken}"}, ["listen.zmq", "{taken}", "in use"]),
    ("control port in use", {"router.control": "tcp://127.0.0.1:{taken}"}, ["router.control", "{taken}", "in use"]),
    ("not our address", {"listen.tcp": "192.0.2.1:0", "security.token": "x"}, ["listen.tcp", "192.0.2.1"]),
    ("too little memory", {"kv.memory": "1MiB", "kv.block_tokens": 256, "node.0.decode": 8}, ["kv.memory", "at least"]),
    ("far too little memory", {"kv.memory": 1000}, ["kv.memory", "1MiB"]),
    ("too much memory", {"kv.memory": "64TiB"}, ["kv.memory", "available"]),
    ("too many positions", {"model.max_model_len": 8193}, ["model.max_model_len = 8193", "8192 positions"]),
    ("another store", {"cluster.mode": "kvstore", "kv.store": "disk"}, ["kv.store", "disk", "mooncake"]),
    ("no such mode", {"cluster.mode": "fast"}, ["cluster.mode", "fast"]),
    ("another transport", {"kv.transport": "cuda_ipc"}, ["kv.transport", "cuda_ipc"]),
    ("unknown key", {"kv.memroy": "1GiB"}, ["kv.memroy", "memory"]),
    ("no such model", {"model.path": "/nowhere"}, ["/nowhere"]),
    ("missing token file", {"security.token_file": "/nowhere"}, ["security.token_file", "/nowhere"]),
]


@pytest.mark.parametrize(("keys", "parts"), [case[1:] for case in BAD_STARTS], ids=[case[0] for case in BAD_STARTS])
def test_a_bad_start_is_one_line_that_names_the_key_and_leaves_nothing(
    home: Path,
    tiny_settings: Callable[..., list[str]],
    taken: int,
    tmp_path: Path,
    keys: dict[str, object],
    parts: list[str],
) -> None:
    filled = {key: str(value).replace("{taken}", str(taken)) for key, value in keys.items()}
    result = cli("launch", "--ready-file", str(tmp_path / "ready.json"), *tiny_settings(**filled))
    assert result.returncode == 1
    assert result.stdout == b""
    errors = [line for line in result.stderr.decode().splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "Traceback" not in result.stderr.decode()
    for part in parts:
        assert part.replace("{taken}", str(taken)) in errors[0]
    assert not (tmp_path / "ready.json").exists()
    assert set(os.listdir(home) if home.exists() else []) <= {"models", "logs", "downloads", "kernels"}


def test_wrong_usage_exits_with_2(home: Path, tmp_path: Path) -> None:
    for arguments in (["--nonsense"], [str(tmp_path / "missing.toml")], ["--ready-file", str(tmp_path)]):
        assert cli("launch", *arguments).returncode == 2


def test_a_mistake_in_the_file_is_named_with_its_line(home: Path, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[kv]\nmemory = "1GiB"\nblock_tokens = 33\n')
    result = cli("launch", str(file))
    assert result.returncode == 1
    assert f"{file}:3".encode() in result.stderr or b"line 3" in result.stderr
    assert b"kv.block_tokens" in result.stderr


@pytest.mark.slow
def test_a_model_that_cannot_be_loaded_ends_the_start_with_the_reason(
    home: Path, tiny_model: Path, tiny_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    data = weights.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = "model.layers.1.mlp.down_proj.weight"
    header[name]["shape"] = header[name]["shape"][::-1]
    text = json.dumps(header).encode().ljust(length)
    weights.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    result = cli("launch", *tiny_settings(**{"model.path": broken}))
    assert result.returncode == 1
    (error,) = [line for line in result.stderr.decode().splitlines() if line.startswith("error: ")]
    assert str(broken) in error
    assert f"{name} has the shape (96, 64), expected (64, 96)" in error
    assert not json.loads(cli("leaks", "--json").stdout)["stale_processes"]


def test_a_torn_weights_file_is_refused_before_anything_starts(
    home: Path, tiny_model: Path, tiny_settings: Callable[..., list[str]], tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(tiny_model, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    result = cli("launch", *tiny_settings(**{"model.path": broken}))
    assert result.returncode == 1
    (error,) = [line for line in result.stderr.decode().splitlines() if line.startswith("error: ")]
    assert "model.safetensors" in error
    assert b"starting" not in result.stderr


def test_launch_from_python_raises_with_the_last_words(home: Path, tiny_settings: Callable[..., list[str]]) -> None:
    sets = tiny_settings()[1::2]
    with pytest.raises(ConnectionLost, match=r"kv\.memory"):
        launch(sets=[*sets, "kv.memory=1"])
    with pytest.raises(ConnectionLost, match=r"not ready within"):
        launch(sets=sets, timeout_s=0.5)
