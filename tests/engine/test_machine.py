from __future__ import annotations

from itertools import accumulate
from types import SimpleNamespace

import pytest

from pdactors.engine import machine
from pdactors.engine.machine import Machine, measure

GEMM_S = [0.5, 0.25, 0.375, 0.25, 4.0]
READ_S = [0.125, 0.5, 0.0625, 0.25, 1.0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_rates_are_those_of_the_best_round(monkeypatch, dtype):
    pauses = [pause for seconds in (*GEMM_S, *READ_S) for pause in (1.0, seconds)]  # before a round, and during it
    clock = accumulate(pauses)
    monkeypatch.setattr(machine, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 12)
    assert measure(dtype) == Machine(2 * 512 * 1536 * 576 / 0.25, (1 << 12) / 0.0625)
    assert next(clock, None) is None, "every round is timed"


def test_a_real_machine_has_plausible_rates():
    found = measure("float32")
    assert 1e8 < found.flops_per_s < 1e14
    assert 1e7 < found.bytes_per_s < 1e13
