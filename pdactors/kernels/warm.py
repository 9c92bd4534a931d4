"""Compiles the kernels into the cache: `python -m pdactors.kernels.warm DTYPE`, at low priority, while others serve."""

from __future__ import annotations

import ctypes
import fcntl
import os
import signal
import sys

import numpy as np

from pdactors.kernels import attention, choose, cpu, forward
from pdactors.kernels.pack import DEPTH, DTYPES, ROWS, packed_size, tiled_size
from pdactors.kernels.simd import LANES

_PR_SET_PDEATHSIG = 1
_NICENESS = 10


def is_warm(dtype: str) -> bool:
    """Say whether the kernels for a dtype are in the cache."""
    return (cpu.cache_folder() / f"warm-{dtype}").exists()


def compile_scan() -> None:
    """Compile, or load, what sampling needs whatever computes the logits."""
    choose.scan(np.zeros(LANES, np.float32), 1, LANES, LANES, np.zeros(1, np.int64))


def compile_all(dtype: str) -> None:
    """Compile what a step needs, or load it from the cache, by running a step of a model of zeros."""
    element = DTYPES[dtype]
    size, rows = DEPTH, 2 * ROWS
    sizes = np.zeros(forward.NUM_SIZES, np.int64)
    one = [forward.LAYERS, forward.HEADS, forward.KV_HEADS]
    sizes[one] = 1
    sizes[[forward.HIDDEN, forward.HEAD_DIM, forward.GATED, forward.VOCAB, forward.BLOCK_TOKENS]] = size
    sizes[[forward.BLOCK_STRIDE, forward.LAYER_STRIDE]] = 2 * size * size
    places = np.full((2, forward.NUM_PLACES), -1, np.int64)
    places[:, [forward.QKV, forward.OUTPUT, forward.GATE_UP, forward.DOWN, forward.NORM, forward.GATED_NORM]] = 0
    model = forward.Model(
        sizes, 1e-5, 1.0, places, np.zeros(packed_size(3 * size, size), element), np.zeros(size, np.float32),
        np.zeros(size * size, element), np.zeros(size, np.float32),
    )  # fmt: skip
    tiled = np.zeros(tiled_size(rows, size), element)
    work = forward.Work(
        np.zeros(rows * size, np.float32), tiled, np.zeros(rows * 3 * size, np.float32),
        np.zeros(size * LANES, element), tiled.copy(), tiled.copy(), np.zeros(size, np.float32),
        np.zeros(forward.scratch_floats(size), np.float32),
        np.zeros(attention.scratch_elements(size), element), cpu.tile_shapes(), np.zeros(forward.NUM_CLOCKS, np.int64),
        np.zeros(1, np.int64),
    )  # fmt: skip
    step = forward.Step(
        np.zeros((1, forward.NUM_ROW_COLUMNS), np.int64), np.array([[0, 1, 1, 0, 0]]), np.zeros(1, np.int64),
        np.zeros(1, np.int64),
    )  # fmt: skip
    forward.forward(model, work, step, np.zeros(2 * size * size, element), 0, 1)
    compile_scan()
    (cpu.cache_folder() / f"warm-{dtype}").touch()


def main() -> None:
    """Compile for the dtype that is named."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    os.nice(_NICENESS)
    folder = cpu.cache_folder()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one at a time: the others find its work done
        if not is_warm(sys.argv[1]):
            compile_all(sys.argv[1])


if __name__ == "__main__":
    main()
