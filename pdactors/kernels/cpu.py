"""What this CPU offers the kernels, and where their compiled code is kept. Imported before any kernel is made."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from pathlib import Path

import llvmlite
import numba
import numpy as np
from llvmlite import binding
from numpy.typing import NDArray

from pdactors.config.home import home

_ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA = 0x1023, 18
_SYS_ARCH_PRCTL = 158
NUM_TILES, TILE_ROWS, ROW_BYTES = 8, 16, 64


def _may_use_tiles() -> bool:
    """Ask the kernel for AMX's registers; an x86-64 Linux without them says no."""
    return bool(ctypes.CDLL(None).syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, _XFEATURE_XTILEDATA) == 0)


def _offers(*features: str) -> bool:
    """Whether the CPU that numba compiles for has them all; another than this one is taken to have none."""
    is_other = numba.config.CPU_NAME or numba.config.CPU_FEATURES is not None
    return not is_other and all(binding.get_host_cpu_features().get(feature) for feature in features)


def _has_amx() -> bool:
    wanted = not os.environ.get("PDACTORS_NO_AMX")
    return wanted and _offers("amx-tile", "amx-bf16", "avx512f") and _may_use_tiles()


HAS_AMX: bool = _has_amx()
"""Whether bfloat16 products run on AMX tiles; otherwise, as for float32, on SIMD registers."""


HAS_AVX512: bool = _offers("avx512f", "avx512dq", "avx512bw", "avx512vl")
"""Whether 16 lanes are one register."""

ROUNDS_BF16: bool = HAS_AVX512 and _offers("avx512bf16")
"""Whether an instruction rounds to bfloat16; for CPUs without, LLVM calls a function that is not there."""


def name() -> str:
    """Return what the kernels are compiled for, e.g. "sapphirerapids+amx"."""
    cpu = numba.config.CPU_NAME or binding.get_host_cpu_name()
    return f"{cpu}+amx" if HAS_AMX else str(cpu)


@functools.cache
def cache_folder() -> Path:
    """Return where compiled kernels lie: one folder for each version of sources, compiler and CPU."""
    digest = hashlib.blake2b(digest_size=8)
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    features = numba.config.CPU_FEATURES
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    digest.update(f"{numba.__version__} {llvmlite.__version__} {np.__version__} {name()} {features}".encode())
    return home() / "kernels" / f"{name()}-{digest.hexdigest()}"


def tile_shapes() -> NDArray[np.uint8]:
    """Return AMX's configuration: eight tiles of 16 rows of 64 bytes."""
    config = np.zeros(64, np.uint8)
    config[0] = 1  # palette
    config[16 : 16 + 2 * NUM_TILES : 2] = ROW_BYTES
    config[48 : 48 + NUM_TILES] = TILE_ROWS
    return config


numba.config.CACHE_DIR = str(cache_folder())
