from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from llvmlite import binding

SCRIPT = Path(__file__).with_name("forced.py")


def run(folder: Path, hidden: list[str], environment: dict[str, str]) -> None:
    result = subprocess.run(
        [sys.executable, SCRIPT, *hidden],
        cwd=folder,
        env=os.environ | {"PDACTORS_HOME": str(folder)} | environment,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (result.returncode, result.stdout) == (0, "done\n"), result.stdout + result.stderr


@pytest.mark.slow
def test_kernels_need_no_amx(tmp_path: Path) -> None:
    run(tmp_path, ["amx"], {"PDACTORS_NO_AMX": "1"})


@pytest.mark.slow
def test_kernels_need_no_avx512(tmp_path: Path) -> None:
    if platform.machine() != "x86_64" or not binding.get_host_cpu_features().get("avx2"):
        pytest.skip("this CPU cannot run code for AVX2")
    # Without the second, numba adds this CPU's own features.
    run(tmp_path, ["amx", "avx512"], {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""})
