"""The command line against a running cluster: what it prints, where, and its exit status."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pdactors import Client, Cluster
from pdactors.cli import status as status_command
from pdactors.cli.main import COMMANDS, main
from pdactors.version import VERSION

Run = Callable[..., Result]
ACTOR_KEYS = {
    "name", "role", "node", "rack", "state", "pid", "incarnation", "running", "waiting", "kv_blocks", "step_ms"
}  # fmt: skip
BLOCK_KEYS = {"total", "free", "cached", "used", "leased_out", "leased_in"}


@pytest.fixture
def run(session_home: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Call `pdactors` in this process, where the shared cluster is the only one."""
    monkeypatch.setenv("PDACTORS_HOME", str(session_home))
    monkeypatch.setenv("COLUMNS", "80")
    return lambda *arguments: CliRunner().invoke(main, list(arguments))


@pytest.fixture
def run_alone(home: Path) -> Run:
    """Call `pdactors` where no cluster runs."""
    return lambda *arguments: CliRunner().invoke(main, list(arguments))


# ---- generate --------


def test_generate_streams_the_answers_text(cluster: Cluster, run: Run) -> None:
    with Client(cluster.zmq) as client:
        chat = client.generate(messages=[{"role": "user", "content": "the cat"}], max_tokens=9)
        raw = client.generate("the cat", max_tokens=9)
    for arguments in (
        [],
        ["--zmq", cluster.zmq],
        ["--zmq", cluster.zmq.removeprefix("tcp://")],
        ["--tcp", cluster.tcp],
    ):
        result = run("generate", "the cat", "--max-tokens", "9", *arguments)
        assert (result.exit_code, result.stdout, result.stderr) == (0, chat.text + "\n", "")
    assert run("generate", "the cat", "--raw", "--max-tokens", "9").stdout == raw.text + "\n"


@pytest.mark.parametrize("over", ["zmq", "tcp"])
def test_generate_json_prints_one_object(cluster: Cluster, run: Run, over: str) -> None:
    address = {"zmq": cluster.zmq, "tcp": cluster.tcp}[over]
    result = run("generate", "the cat", "--max-tokens", "9", "--json", f"--{over}", address)
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    answer = json.loads(result.stdout)
    assert answer.keys() == {"text", "token_ids", "finish_reason", "usage", "timing", "path"}
    assert len(answer["token_ids"]) == answer["usage"]["completion_tokens"] <= 9


def test_generate_passes_the_sampling_options_on(cluster: Cluster, run: Run) -> None:
    hot = ["generate", "the cat", "--max-tokens", "20", "--temperature", "1.5"]
    first = run(*hot, "--seed", "1").stdout
    assert run(*hot, "--seed", "1").stdout == first
    assert run(*hot, "--seed", "2").stdout != first
    greedy = run("generate", "the cat", "--max-tokens", "20").stdout
    assert run(*hot, "--top-p", "0.000001").stdout == greedy != first


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (["generate", "x", "--max-tokens", "0"], 1, "max_tokens"),
        (["generate", "x", "--temperature", "-1"], 1, "temperature"),
        (["generate", ""], 0, ""),
        (["generate", "", "--raw"], 1, "prompt: is empty"),
        (["generate", "\udcff"], 1, "encoded"),
        (["generate", "x", "--max-tokens", "many"], 2, "--max-tokens"),
        (["generate"], 2, "PROMPT"),
        (["generate", "x", "y"], 2, "unexpected extra argument"),
        (["generate", "x", "--tcp", "127.0.0.1:1"], 1, "nobody listens at 127.0.0.1:1; `pdactors launch`"),
        (["generate", "x", "--tcp", "nonsense"], 1, "nonsense"),
        (["generate", "x", "--zmq", "nonsense"], 1, "nonsense"),
        (["generate", "x", "--ready-file", "/nowhere"], 2, "/nowhere"),
        (["generate", "x", "--ready-file", __file__], 1, "not a ready file"),
        (["nonsense"], 2, "nonsense"),
        (["status", "--nonsense"], 2, "nonsense"),
    ],
)
def test_mistakes_are_one_line_on_stderr_with_their_exit_status(
    cluster: Cluster, run: Run, arguments: list[str], status: int, part: str
) -> None:
    result = run(*arguments)
    assert result.exit_code == status
    assert part in result.stderr
    if status:
        assert result.stdout == ""
        assert "Traceback" not in result.stderr
    if status == 1:
        assert result.stderr.startswith("error: ")
        assert result.stderr.count("\n") == 1


def test_without_a_cluster_the_commands_say_how_to_start_one(run_alone: Run) -> None:
    for command in (["generate", "x"], ["status"], ["status", "--json"]):
        result = run_alone(*command)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "pdactors launch" in result.stderr


# ---- status --------


def test_status_json_has_exactly_the_promised_keys(cluster: Cluster, run: Run, tmp_path: Path) -> None:
    ready_file = tmp_path / "ready.json"
    actors = [
        {"name": a.name, "role": a.role, "node": a.node, "rack": a.rack, "pid": a.pid} for a in cluster.ready.actors
    ]
    ready = cluster.ready
    ready_file.write_text(
        json.dumps(
            {
                "run_id": ready.run_id,
                "pid": ready.pid,
                "tcp": ready.tcp,
                "zmq": ready.zmq,
                "http": ready.http,
                "actors": actors,
            }
        )
    )
    for arguments in ([], ["--zmq", cluster.zmq], ["--ready-file", str(ready_file)]):
        result = run("status", "--json", *arguments)
        assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1)
        found = json.loads(result.stdout)
        assert found.keys() >= {"run_id", "mode", "model", "actors"}
        assert (found["run_id"], found["mode"]) == (ready.run_id, "disaggregated")
        assert {actor["name"] for actor in found["actors"]} == {actor["name"] for actor in actors}
        for actor in found["actors"]:
            assert actor.keys() >= ACTOR_KEYS
            assert actor["kv_blocks"].keys() == BLOCK_KEYS
            assert actor["step_ms"].keys() == {"mean", "p50", "p99"}


def test_the_status_table_shows_every_actor_in_80_columns(cluster: Cluster, run: Run) -> None:
    result = run("status")
    lines = result.stdout.splitlines()
    assert (result.exit_code, result.stderr) == (0, "")
    assert cluster.ready.run_id in lines[0]
    assert all(len(line) <= 80 for line in lines[1:])
    for actor in cluster.ready.actors:
        (line,) = [line for line in lines if line.startswith(actor.name + " ")]
        assert "ready" in line
        assert str(actor.pid) in line


def test_the_status_table_cuts_no_number_of_a_busy_cluster(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    blocks = dict.fromkeys(BLOCK_KEYS, 0) | {"total": 20481, "free": 20482, "cached": 20483, "used": 20484}
    blocks |= {"leased_out": 2048, "leased_in": 2049}
    actors = [
        {
            "name": name, "rack": "r0", "state": "draining", "pid": 4194304, "running": 32, "waiting": 1024,
            "kv_blocks": blocks, "step_ms": {"p50": 123.4}, "use": {}, "way": "lean",
        }
        for name in ("n0/prefill-0", "a-node-with-a-long-name/decode-12")
    ]  # fmt: skip
    found = {"run_id": "r", "mode": "m", "model": "x", "actors": actors, "silent": ["n0/decode-1"]}
    Console().print(status_command.view(found))
    text = capsys.readouterr().out
    for number in ("20481", "20482", "20483", "20484", "2048", "2049", "4194304", "1024", "123.4", "draining"):
        assert text.count(number) >= 2, text
    assert all(len(line) <= 80 for line in text.splitlines()[1:])
    assert "n0/decode-1 did not answer" in text


# ---- leaks --------


def test_leaks_is_clean_and_exits_with_0(cluster: Cluster, run: Run) -> None:
    result = run("leaks")
    assert (result.exit_code, result.stdout) == (0, "nothing is held for nobody\n")
    found = json.loads(run("leaks", "--json").stdout)
    assert found.keys() >= {"leases", "blocks_unaccounted", "stale_segments"}
    assert not any(found.values())


def test_leaks_finds_an_actor_without_a_supervisor_and_exits_with_1(run_alone: Run, wait: Any) -> None:
    script = "import os, subprocess, sys; subprocess.Popen([*sys.argv[1:], str(os.getpid())], stdin=subprocess.PIPE)"
    sleep = [sys.executable, "-c", "import time; time.sleep(60)", "pdactors.actors", "n0/decode-0", "deadbeef"]
    subprocess.run([sys.executable, "-c", script, *sleep], check=True)
    result = run_alone("leaks", "--json")
    found = json.loads(result.stdout)
    (stale,) = [process for process in found["stale_processes"] if "deadbeef" in process["command"]]
    subprocess.run(["kill", str(stale["pid"])], check=True)
    assert result.exit_code == 1
    wait(lambda: "deadbeef" not in run_alone("leaks").stdout, 5.0, "it is found although it is dead")


# ---- config, model --------


def test_config_show_prints_what_takes_effect(run_alone: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tomllib

    file = tmp_path / "cluster.toml"
    file.write_text('[kv]\nmemory = "1GiB"\n[security]\ntoken = "open-sesame"\n')
    monkeypatch.setenv("PDACTORS_KV_BLOCK_TOKENS", "64")
    result = run_alone("config", "show", str(file), "--set", "engine.max_batch=7")
    assert (result.exit_code, result.stderr) == (0, "")
    shown = tomllib.loads(result.stdout)
    assert (shown["kv"]["memory"], shown["kv"]["block_tokens"], shown["engine"]["max_batch"]) == ("1GiB", 64, 7)
    assert "open-sesame" not in result.stdout
    file.write_text("[kv]\nmemry = 1\n")
    wrong = run_alone("config", "show", str(file))
    assert (wrong.exit_code, wrong.stdout) == (1, "")
    assert "kv.memry" in wrong.stderr
    assert run_alone("config", "show", "/nowhere.toml").exit_code == 2


def test_model_list_says_what_is_cached(run_alone: Run) -> None:
    assert json.loads(run_alone("model", "list", "--json").stdout) == {"models": []}
    empty = run_alone("model", "list")
    assert (empty.exit_code, empty.stdout) == (0, "")
    assert "pdactors model fetch" in empty.stderr


def test_model_list_shows_the_real_one(real_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PDACTORS_HOME", raising=False)
    models = json.loads(CliRunner().invoke(main, ["model", "list", "--json"]).stdout)["models"]
    assert {"name", "path", "size_bytes", "source"} <= models[0].keys()
    assert str(real_model) in {model["path"] for model in models}


# ---- Help --------


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_help(run_alone: Run, command: str) -> None:
    result = run_alone(command, "--help")
    assert result.exit_code == 0
    assert result.stdout.startswith("Usage: ")
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_the_top_help_lists_the_commands_and_how_to_begin(run_alone: Run) -> None:
    text = run_alone("--help").stdout
    assert all(command in text for command in COMMANDS)
    assert "pdactors launch" in text
    assert run_alone("--version").stdout == f"pdactors, version {VERSION}\n"


def test_the_installed_program_prints_json_and_nothing_else(cluster: Cluster) -> None:
    program = Path(sys.executable).with_name("pdactors")
    result = subprocess.run(
        [program, "status", "--json", "--zmq", cluster.zmq], capture_output=True, timeout=60, check=True
    )
    assert json.loads(result.stdout)["run_id"] == cluster.ready.run_id
    assert result.stderr == b""


def test_a_reader_that_leaves_is_no_error_of_ours(cluster: Cluster) -> None:
    program = Path(sys.executable).with_name("pdactors")
    command: list[Any] = [program, "generate", "the cat", "--zmq", cluster.zmq, "--max-tokens", "2000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        process.wait(20)
        assert b"Traceback" not in process.stderr.read()
