from __future__ import annotations

import json

import numpy as np
import pytest
from click.testing import CliRunner

from pdactors.bench import engine as bench
from pdactors.cli.main import main


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(bench, "BATCHES", (1, 8))
    monkeypatch.setattr(bench, "CONTEXTS", (64, 1024))
    monkeypatch.setattr(bench, "PROMPTS", (128, 600))
    monkeypatch.setattr(bench, "_READ_FLOATS", 1 << 18)


def run(model, *more):
    return CliRunner(env={"COLUMNS": "200"}).invoke(
        main, ["bench", "engine", "--model", str(model), "--rounds", "1", *more]
    )


@pytest.mark.parametrize("threads", [1, 2])
def test_every_step_is_measured_beside_its_references(tiny_model, threads):
    result = run(tiny_model, "--json", "--threads", str(threads))
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["dtype"], found["threads"], found["rounds"]) == ("bfloat16", threads, 1)
    assert [(cost["batch"], cost["context"]) for cost in found["decode"]] == [(1, 64), (8, 64), (1, 1024), (8, 1024)]
    assert [cost["tokens"] for cost in found["prefill"]] == [128, 600]
    for cost in [*found["decode"], *found["prefill"]]:
        assert cost["ms"] > cost["attention_ms"] > 0
        assert min(cost["transformers_ms"], cost["limit_ms"]) > 0
    assert min(found["read_gb_s"], found["gemm_tflop_s"], found["attention_read_ratio"]) > 0


def test_a_table_says_how_far_the_limit_is(tiny_model):
    result = run(tiny_model)
    assert result.exit_code == 0, result.output
    for text in ("decode, batch 8, context 1024", "prefill, 600 tokens", "of the limit", "attention reads KV at"):
        assert text in result.stdout


def test_the_limit_reads_all_of_its_memory():
    memory, part = np.ones(1 << 18, np.float32), 1 << 17
    assert sum(bench.stream.read(memory, begin, part) for begin in (0, part)) == len(memory)
