"""chat, top, drain and scale against a running cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pdactors import Client, Cluster
from pdactors.cli.main import COMMANDS, main
from pdactors.cli.top import Sample, figures, view

GROUPS = {"bench", "model", "config"}  # whose subcommands have the examples
NUMBERS = re.compile(r"\[(\d+) tokens, (\d+) of (\d+) prompt tokens cached, first after \d+ ms, then \d+ ms each\]")
Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Call `pdactors` in this process, on a cluster: `run(cluster, "top", "--once")`."""

    def call(cluster: Cluster, *arguments: str, text: str = "") -> Result:
        return CliRunner().invoke(main, [*arguments, "--zmq", cluster.zmq], input=text)

    return call


def _chat(cluster: Cluster, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pdactors.cli.main", "chat", "--zmq", cluster.zmq, *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60, check=False)


def test_chat_answers_what_is_piped_in_and_reuses_the_earlier_turns(cluster: Cluster) -> None:
    turns = ["the cat sat on the mat" * 12, "what is the capital of France?" * 5]
    result = _chat(cluster, "\n".join(turns) + "\n", "--max-tokens", "30", "--system", "the cat")
    assert (result.returncode, result.stderr) == (0, "")
    (first, second) = [tuple(map(int, numbers)) for numbers in NUMBERS.findall(result.stdout)]
    assert first[1] < 40 <= second[1]
    assert second[1] >= first[2] + first[0] - 64
    with Client(cluster.zmq) as client:
        messages = [{"role": "system", "content": "the cat"}, {"role": "user", "content": turns[0]}]
        answer = client.generate(messages=messages, max_tokens=30)
    assert answer.text in result.stdout


def test_chat_ends_with_an_empty_line_and_says_nothing_of_its_end(cluster: Cluster) -> None:
    result = _chat(cluster, "the cat\n\nthe mat\n", "--max-tokens", "3")
    assert (result.returncode, result.stderr) == (0, "")
    assert len(NUMBERS.findall(result.stdout)) == 1
    empty = _chat(cluster, "")
    assert (empty.returncode, empty.stderr) == (0, "")


def test_chat_goes_on_after_a_message_that_is_too_long(cluster: Cluster) -> None:
    result = _chat(cluster, f"{'the cat ' * 3000}\nthe mat\n", "--max-tokens", "3")
    assert result.returncode in (0, 1)
    assert "Traceback" not in result.stderr
    assert "model.max_model_len" in result.stderr


def test_top_shows_what_every_actor_did_in_between(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(cluster.zmq) as client:
        earlier = Sample(time.monotonic(), client.status(), client.requests())
        answer = client.generate("^", max_tokens=40, ignore_eos=True)
        later = Sample(time.monotonic(), client.status(), client.requests())
    found = figures(earlier, later)
    tokens = {a["role"]: round(found["seconds"] * a["tokens_s"]) for a in found["actors"] if a["tokens_s"] is not None}
    assert tokens == {"gateway": 40, "prefill": 1, "decode": 39}
    (decode,) = [actor for actor in found["actors"] if actor["role"] == "decode"]
    assert 0 < decode["busy"] <= 1.01
    assert found["recent"][0]["request"] == answer.request
    monkeypatch.setenv("COLUMNS", "80")
    Console().print(view(found))
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80, lines
    for actor in cluster.ready.actors:
        assert [line for line in lines if line.startswith("n0 ") and f" {actor.name.removeprefix('n0/')} " in line]
    (line,) = [line for line in lines if line.startswith(answer.request)]
    assert "length" in line
    assert [float(figure) for figure in line.split()[-2:]] == pytest.approx(
        [answer.timing.ttft_ms, answer.timing.total_ms], abs=0.6
    )


def test_top_without_a_terminal_prints_one_interval_after_the_other(cluster: Cluster) -> None:
    command = [sys.executable, "-m", "pdactors.cli.main", "top", "--zmq", cluster.zmq, "--interval", "0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "80"}) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        while sum(cluster.ready.run_id in line for line in lines) < 2:
            lines.append(process.stdout.readline())
            assert lines[-1], lines
        process.terminate()
    assert "\x1b" not in "".join(lines)


def test_top_once_and_json_show_one_interval_and_leave(cluster: Cluster, run: Run) -> None:
    result = run(cluster, "top", "--once", "--interval", "0.1")
    assert (result.exit_code, result.stderr) == (0, "")
    assert cluster.ready.run_id in result.stdout
    result = run(cluster, "top", "--json", "--interval", "0.1")
    assert (result.exit_code, result.stderr, result.stdout.count("\n")) == (0, "", 1)
    assert json.loads(result.stdout).keys() >= {"run_id", "actors", "moves", "recent", "seconds"}


def test_scale_and_drain_wait_until_it_is_so(
    growing: Cluster, run: Run, settled: Any, names_of: Any, wait: Any
) -> None:
    first = names_of(settled(growing))
    up = run(growing, "scale", "n0", "decode=2")
    (new,) = names_of(settled(growing)).keys() - first.keys()
    assert (up.exit_code, up.stdout, up.stderr) == (0, f"started: {new}\n", "")
    same = run(growing, "scale", "n0", "decode=2")
    assert (same.exit_code, same.stdout) == (0, "n0 has 2 decode already\n")
    drained = run(growing, "drain", new)
    assert (drained.exit_code, drained.stdout, drained.stderr) == (0, f"{new} is drained and stopped\n", "")
    assert names_of(settled(growing)) == first
    run(growing, "scale", "n0", "decode=2", "--no-wait")
    down = run(growing, "scale", "n0", "decode=1")  # before it is ready
    assert down.exit_code == 0
    with Client(growing.zmq) as client:
        wait(lambda: [a["state"] for a in client.status()["actors"]] == ["ready"] * 5, 20.0, "it did not settle")
    assert names_of(settled(growing)) == first


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (["drain", "n0/nobody"], 1, "no engine is called n0/nobody"),
        (["drain"], 2, "ACTOR"),
        (["scale", "n0", "decode"], 2, "ROLE=COUNT"),
        (["scale", "n0", "decode=-1"], 2, "ROLE=COUNT"),
        (["scale", "n0", "router=2"], 2, "ROLE=COUNT"),
        (["scale", "n0", "decode=0"], 1, "at least one decode"),
        (["scale", "n0", "decode=999"], 1, "count"),
        (["scale", "n9", "decode=2"], 1, "no node is called n9"),
        (["top", "--interval", "0"], 2, "--interval"),
        (["chat", "--max-tokens", "many"], 2, "--max-tokens"),
    ],
)
def test_mistakes_are_said_on_stderr(growing: Cluster, run: Run, arguments: list[str], status: int, part: str) -> None:
    result = run(growing, *arguments)
    assert result.exit_code == status
    assert part in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize("command", sorted(COMMANDS.keys() - GROUPS))
def test_the_help_of_every_command_has_an_example(command: str) -> None:
    text = CliRunner().invoke(main, [command, "--help"]).stdout
    assert re.search(rf"Examples?:\s+pdactors {command}", text), text


def test_status_json_has_the_counters(cluster: Cluster, run: Run) -> None:
    found = json.loads(run(cluster, "status", "--json").stdout)
    for actor in found["actors"]:
        assert actor.keys() >= {"use", "prompt_tokens_computed", "preempted", "step_ms"}
