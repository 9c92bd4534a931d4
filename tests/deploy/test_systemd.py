"""The unit is what systemd takes, and what it starts exists."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from pages import ROOT, parse

UNIT = ROOT / "deploy" / "systemd" / "pdactors@.service"


def test_the_command_and_the_folders_fit(tmp_path: Path) -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str
    unit.read(UNIT)
    service = unit["Service"]
    (tmp_path / "cluster.toml").touch()
    program, *words = shlex.split(service["ExecStart"].replace("/etc/pdactors", str(tmp_path)).replace("%i", "n0"))
    assert program.endswith("/bin/pdactors")
    parse(words)
    assert service["Environment"] == f"PDACTORS_HOME=/var/lib/{service['StateDirectory']}"
    assert words[-1] == f"/run/{service['RuntimeDirectory']}/n0.json"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not here")
def test_systemd_takes_it(tmp_path: Path) -> None:
    copy = tmp_path / "pdactors@n0.service"
    copy.write_text(UNIT.read_text().replace("/opt/pdactors/bin/pdactors", "/bin/true"))  # which must exist
    verified = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
