"""What README and docs show is run as it stands: one cluster, the small default model, every command and program."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pages import ROOT, Block, blocks, shape

from pdactors.config.home import home as default_home

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NOT_RUN = {  # the bracket at a command's end -> why it is not run here
    "launch": "stays in the foreground; the cluster of this test is started by one of them",
    "minutes": "takes minutes; what it does has tests of its own",
    "machines": "needs machines with these addresses; tests/house/test_nodes.py has network namespaces instead",
    "setup": "sets up the shell, as this test does by itself",
}
PORTS = {"tcp": 7070, "zmq": 7071, "http": 7080}  # that the pages show
COMMAND_S = 120.0
TYPED = "Hi\n\n"  # to whatever asks


class Desk:
    """A user's folder and shell, with the README's cluster file as cluster.toml."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder = folder
        self.environ = {
            **os.environ,
            "PDACTORS_HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "COLUMNS": "80",
        }
        self.addresses: dict[str, str] = {}  # of the cluster, by name, once it runs
        (text,) = (
            block.text for block in runnable("toml") if block.page.name == "README.md" and "mode =" in block.text
        )
        (folder / "cluster.toml").write_text(text, "utf-8")
        (folder / "examples").symlink_to(ROOT / "examples")

    def here(self, text: str) -> str:
        """Put the cluster's ports into what a page says."""
        for name, address in self.addresses.items():
            text = text.replace(str(PORTS[name]), address.rpartition(":")[2])
        return text

    def run(self, *command: str, typed: str = TYPED, **variables: str) -> str:
        """Run a command to its end and return its output; fails where it does."""
        ended = subprocess.run(
            [self.here(word) for word in command],
            cwd=self.folder,
            env={**self.environ, **variables},
            input=typed,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        assert ended.returncode == 0, f"{command[-1]}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
        return ended.stdout


def runnable(*languages: str) -> list[Block]:
    return [block for block in blocks(*languages) if block.page.name != "simulator.md"]  # tests/sim has its own


def programs(*, start_a_cluster: bool) -> list[Block]:
    """Return the programs that need a cluster: those that start one, or those that talk to one that runs."""
    starting = [block for block in runnable("python") if "launch(" in block.text]
    talking = [block for block in runnable("python") if "127.0.0.1:70" in block.text and block not in starting]
    return starting if start_a_cluster else talking


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory, real_model: Path) -> Desk:
    home = tmp_path_factory.mktemp("home")
    for shared in ("models", "kernels"):
        (home / shared).symlink_to(default_home() / shared)
    return Desk(tmp_path_factory.mktemp("desk"), home)


@pytest.fixture(scope="module")
def running(desk: Desk) -> Iterator[Desk]:
    """The README's cluster, started as it says, at the ports that the pages show or at others where one is taken."""
    command, *_ = (c for b in runnable("console") for c in b.commands if c.line.startswith("pdactors launch"))
    variables = {} if all(map(_is_free, PORTS.values())) else _other_ports()
    with subprocess.Popen(
        ["bash", "-c", f"exec {command.line}"],
        cwd=desk.folder,
        env={**desk.environ, **variables},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            word, _, addresses = process.stdout.readline().partition(" ")
            assert word == "ready"
            desk.addresses = {name: address for name, address in json.loads(addresses).items() if name in PORTS}
            yield desk
            assert desk.run("pdactors", "leaks") == "nothing is held for nobody\n"
        finally:
            process.send_signal(signal.SIGINT)
    assert process.returncode == 0
    assert desk.run("pdactors", "leaks") == "nothing is held for nobody\n"


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def _other_ports() -> dict[str, str]:
    addresses = {"TCP": "127.0.0.1:0", "ZMQ": "tcp://127.0.0.1:0", "HTTP": "127.0.0.1:0"}
    return {f"PDACTORS_LISTEN_{name}": address for name, address in addresses.items()}


def test_few_commands_are_not_run_and_each_says_why() -> None:
    commands = [command for block in runnable("console") for command in block.commands]
    tags = [command.tag for command in commands if command.tag]
    assert set(tags) == set(NOT_RUN)
    assert len(tags) < 0.6 * len(commands)


@pytest.mark.parametrize("block", programs(start_a_cluster=True), ids=lambda block: block.place)
def test_a_program_that_starts_a_cluster_runs(block: Block, desk: Desk) -> None:
    assert desk.run(sys.executable, "-c", block.text, **_other_ports()).strip()


@pytest.mark.parametrize("block", runnable("console"), ids=lambda block: block.place)
def test_commands_print_what_is_shown(block: Block, running: Desk) -> None:
    if any(re.search(r"\bnc\b", command.line) for command in block.commands) and shutil.which("nc") is None:
        pytest.skip("nc is not here; it comes with netcat-openbsd")
    for command in block.commands:
        if not command.tag:
            printed = running.run("bash", "-o", "pipefail", "-c", command.line)
            shown = "\n".join(command.output).strip().splitlines()
            lines = [line.strip() for line in printed.strip().splitlines()]
            assert not shown or shape(shown).fullmatch("\n".join(lines)), f"{command.line}\n{printed}"


@pytest.mark.parametrize("block", programs(start_a_cluster=False), ids=lambda block: block.place)
def test_a_program_talks_to_the_cluster(block: Block, running: Desk) -> None:
    assert running.run(sys.executable, "-c", block.text).strip()


def test_the_example_of_a_conversation_reuses_what_it_had(running: Desk) -> None:
    address = running.addresses["zmq"]
    said = running.run(sys.executable, "examples/chat_client.py", address, typed="Hi\nWho are you?\n\n")
    first, second = (line.split() for line in said.splitlines() if "prompt tokens were cached" in line)
    assert int(second[0].strip("[")) > int(first[0].strip("["))


def test_the_example_of_a_load_serves_all(running: Desk) -> None:
    said = running.run(sys.executable, "examples/load_test.py", running.addresses["zmq"], "8", "4")
    assert said.startswith("8 answers, ")
    assert "median TTFT" in said
