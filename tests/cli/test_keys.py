"""`pdactors keys`, and that no secret is to be seen from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
from click.testing import CliRunner

from pdactors.cli.main import main

SECRET = "open-sesame-0815"
SHOW = """
import os, sys
from pdactors.cli.conceal import conceal, conceal_environment
conceal(sys.argv)
conceal_environment()
print("ready", "PDACTORS_SECURITY_TOKEN" in os.environ, os.environ["KEPT"], flush=True)
sys.stdin.read()
"""


def test_keys_are_made_and_never_printed(home: Path) -> None:
    result = CliRunner().invoke(main, ["keys", "--client", "alice"])
    assert result.exit_code == 0
    folder = home / "keys"
    files = [file for file in folder.iterdir() if file.suffix != ".pub"]
    assert {file.name for file in files} == {"cluster.key", "client.key", "alice.key", "token", "join_token"}
    assert not [file for file in files if file.read_text().strip() in result.output]
    assert all(str(file) in result.output for file in files)
    again = CliRunner().invoke(main, ["keys"])
    assert "has all of them already" in again.output


def test_keys_tell_what_they_made_as_json(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["keys", "--dir", str(tmp_path / "k"), "--json"])
    found = json.loads(result.stdout)
    assert found["dir"] == str(tmp_path / "k")
    assert all(Path(file).exists() for file in found["made"])


def test_arguments_and_environment_do_not_show_secrets() -> None:
    arguments = ["--set", f"security.token={SECRET}", "--token", SECRET, f"--token={SECRET}", "--set", "x=1"]
    environ = {**os.environ, "PDACTORS_SECURITY_TOKEN": SECRET, "PDACTORS_SECURITY_JOIN_TOKEN": SECRET, "KEPT": "kept"}
    with subprocess.Popen(
        [sys.executable, "-c", SHOW, *arguments], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready False kept\n"
        shown = psutil.Process(process.pid)
        assert shown.cmdline()[-2:] == ["--set", "x=1"]
        assert SECRET not in " ".join(shown.cmdline())
        assert SECRET not in Path(f"/proc/{process.pid}/environ").read_text()
        assert "KEPT=kept" in Path(f"/proc/{process.pid}/environ").read_text()
        process.stdin.close()  # type: ignore[union-attr]
