"""Ctrl-C: quiet, at whatever the command line is."""

from __future__ import annotations

import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from pdactors.cli import interrupt
from pdactors.cli import main as command_line

PROGRAM = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == {when!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever runs the tests may ignore it
sys.meta_path.insert(0, Interrupt())
sys.argv = ["pdactors", "leaks", "--help"]
from {module} import {function}
{function}()
"""


@pytest.mark.parametrize("when", ["click", "pdactors.errors", "pdactors.cli.leaks"])
def test_ctrl_c_ends_a_program_that_still_imports_without_a_word(when: str) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text("utf-8"))["project"]
    module, function = project["scripts"]["pdactors"].split(":")
    program = PROGRAM.format(when=when, module=module, function=function)
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (-signal.SIGINT, "", "")


def test_ctrl_c_ends_a_command_with_its_status(monkeypatch: pytest.MonkeyPatch) -> None:
    @click.command()
    def command() -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setitem(sys.modules, "waits", SimpleNamespace(command=command))
    monkeypatch.setitem(command_line.COMMANDS, "wait", ("waits", ""))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        ended = CliRunner().invoke(command_line.main, ["wait"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert (ended.exit_code, ended.output) == (interrupt.STATUS, "\n")


def test_ctrl_c_stays_ignored_where_it_was() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt.ends_at_once():
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
