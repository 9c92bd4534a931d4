"""What one core of this machine can do at best: the limits that achieved rates are held against."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pdactors.engine.shape import ModelDtype

TORCH_DTYPES: dict[ModelDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_GEMM = (512, 1536, 576)  # rows, outputs, inputs: a prefill chunk through a layer of a small model
_READ_BYTES = 128 << 20  # well beyond the caches of one core
_ROUNDS = 5


@dataclass(frozen=True)
class Machine:
    """Rates of one thread: matrix multiplication in the model's dtype, and reading memory."""

    flops_per_s: float
    bytes_per_s: float


def measure(dtype: ModelDtype) -> Machine:
    """Measure with the calling thread alone; takes a fraction of a second. The best of a few rounds counts."""
    rows, outputs, inputs = _GEMM
    a = torch.randn(rows, inputs).to(TORCH_DTYPES[dtype])
    b = torch.randn(outputs, inputs).to(TORCH_DTYPES[dtype])
    memory = torch.ones(_READ_BYTES // 4, dtype=torch.float32)
    with torch.inference_mode():
        gemm_s = _best(lambda: torch.nn.functional.linear(a, b))
        read_s = _best(memory.sum)
    return Machine(2.0 * rows * outputs * inputs / gemm_s, _READ_BYTES / read_s)


def _best(action: Callable[[], object]) -> float:
    times = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)
