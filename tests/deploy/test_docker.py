"""The Dockerfile as far as it can be checked without a daemon."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

from pages import ROOT, parse

from pdactors import Cluster

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"


def instructions(name: str) -> list[str]:
    """Return what stands behind an instruction, each time that it is used."""
    lines = DOCKERFILE.read_text().replace("\\\n", "").splitlines()
    return [line.partition(" ")[2].strip() for line in lines if line.startswith(f"{name} ")]


def test_hadolint_finds_nothing() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent))
    assert hadolint
    checked = subprocess.run([hadolint, DOCKERFILE], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_what_is_copied_exists_and_is_sent_to_the_daemon() -> None:
    rules = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().splitlines()
    sources = [words[:-1] for line in instructions("COPY") if not (words := line.split())[0].startswith("--from")]
    for source in (word.removeprefix("./") for words in sources for word in words):
        assert (ROOT / source).exists()
        (last,) = [rule for rule in rules if fnmatch(source, rule.removeprefix("!"))][-1:]
        assert last == f"!{source}"


def test_what_is_installed_is_the_lock_and_extras_that_exist() -> None:
    (install,) = (shlex.split(line) for line in instructions("RUN") if "pip install" in line)
    assert install[install.index("--constraint") + 1] == "constraints.txt"
    extras = install[-1].removeprefix(".[").removesuffix("]").split(",")
    assert (
        set(extras) <= tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"].keys()
    )


def test_it_starts_our_command_as_somebody_else_than_root() -> None:
    entry, command = json.loads(instructions("ENTRYPOINT")[0]), json.loads(instructions("CMD")[0])
    assert entry[-1] == "pdactors"
    parse(command)
    assert instructions("USER")[-1] not in ("root", "0")


def test_the_health_check_tells_a_cluster_that_serves_from_none(cluster: Cluster) -> None:
    (check,) = (json.loads(line.partition("CMD ")[2]) for line in instructions("HEALTHCHECK"))

    def healthy(address: str) -> bool:
        command = [sys.executable, *(word.replace("127.0.0.1:7080", address) for word in check[1:])]
        assert any(address in word for word in command)
        return subprocess.run(command, check=False, capture_output=True).returncode == 0

    assert healthy(cluster.http)
    assert not healthy("127.0.0.1:1")
