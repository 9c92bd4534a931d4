"""`calibrate`: steps of a real model split into the formula's parts, and costs found again in what they lead to."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from pdactors.cli.main import main
from pdactors.config.load import load
from pdactors.engine.load import load_model
from pdactors.sim.calibrate import (
    BATCHES,
    CONTEXTS,
    PAST,
    ROWS,
    fit_processes,
    fit_steps,
    measure_codecs,
    measure_steps,
    put_loads,
    requests_of,
)
from pdactors.sim.cluster import SimCluster
from pdactors.sim.cost import Crowd, StepWork, read_cost, roofline
from pdactors.sim.hardware import HARDWARE
from tests.sim.conftest import MODEL

CPU = roofline(MODEL, "bfloat16", HARDWARE["cpu"])


def test_a_real_model_is_measured_and_its_codecs(tiny_model):
    told = []
    model = load_model(tiny_model, "float32", threads=1, way="lean")
    steps = measure_steps(model, 1, lambda *progress: told.append(progress))
    codecs = measure_codecs(model, 32)
    model.close()
    assert [count for count, _ in steps.body.points] == list(ROWS)
    assert steps.body.at(512) > steps.body.at(1) > 0
    assert {name: cost.ratio for name, cost in codecs.items()} == {"int8": 0.28125, "int4": 0.1875}
    assert all(cost.quantise_bytes_s > 1e6 and cost.dequantise_bytes_s > 1e6 for cost in codecs.values())
    assert told == [("steps", done, 23) for done in range(23)]


def test_steps_that_follow_the_formula_give_its_parts():
    seconds = {("chunk", rows, 0): CPU.step(StepWork(rows, 1, 0, rows * (rows + 1) / 2, 1)) for rows in ROWS}
    last = ROWS[-1]
    seconds["chunk", last, PAST] = CPU.step(StepWork(last, 1, 0, last * PAST + last * (last + 1) / 2, 1))
    for batch in BATCHES:
        for context in CONTEXTS:
            seconds["decode", batch, context] = CPU.step(StepWork(batch, batch, batch * context, 0, batch))
    found = fit_steps(seconds)
    assert found.kv_token_s == pytest.approx(CPU.kv_token_s, rel=1e-3)
    assert found.pair_s == pytest.approx(CPU.pair_s, rel=1e-3)
    for batch in BATCHES:
        whole = CPU.step(StepWork(batch, batch, 0, 0, batch))
        assert found.body.at(batch) + found.head.at(batch) == pytest.approx(whole, rel=1e-2)


def test_what_processes_cost_is_found_again_in_what_they_do():
    crowd = Crowd(decode_by_decode=0.4, decode_by_prompt=0.1, prompt_by_decode=0.3, prompt_by_prompt=0.2)
    true = msgspec.structs.replace(CPU, step_s=2e-3, sequence_s=3e-4, control_s=4e-4, request_s=5e-3, crowd=crowd)
    bare = msgspec.structs.replace(CPU, step_s=0.0, sequence_s=0.0, control_s=0.0, request_s=0.0)

    def ask(sets, wanted):
        cluster = SimCluster(load(None, sets=sets), MODEL, true)
        found = []
        for number, (kinds, in_flight) in enumerate(wanted):
            records = cluster.run_closed(iter(requests_of(kinds, f"{number}", range(1000))), in_flight, patience_s=100)
            found.append(list(records))
            records.clear()
        return found

    found = fit_processes(bare, put_loads(ask, 3))
    assert found.step_s == pytest.approx(true.step_s, rel=0.05)
    assert found.sequence_s == pytest.approx(true.sequence_s, rel=0.05)
    assert found.control_s == pytest.approx(true.control_s, rel=0.05)
    assert found.request_s == pytest.approx(true.request_s, rel=0.1)
    for field in Crowd.__struct_fields__:
        assert getattr(found.crowd, field) == pytest.approx(getattr(crowd, field), rel=0.1), field


@pytest.mark.slow
def test_the_command_writes_what_simulate_reads(tiny_settings, home, tmp_path):
    sets, path = tiny_settings(), tmp_path / "cost.json"
    result = CliRunner().invoke(main, ["calibrate", *sets, "--rounds", "2", "-o", str(path)])
    assert result.exit_code == 0, result.output
    assert "beside another engine" in result.stdout
    cost = read_cost(path)
    assert cost.step_s > 0
    assert cost.links.host.bytes_s > 1e6
    arguments = ["simulate", *sets, "--cost", str(path), "--requests", "20", "--modes", "chunked", "--json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["servers"]["chunked"]["overall"]["errors"] == {}


def test_several_nodes_are_refused(two_nodes: Path):
    result = CliRunner().invoke(main, ["calibrate", str(two_nodes)])
    assert result.exit_code == 1
    assert "one [[node]]" in result.stderr
