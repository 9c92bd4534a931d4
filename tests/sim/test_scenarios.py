"""The scenarios of docs/simulator.md load and run, with a few requests each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from pdactors.cli.main import main
from pdactors.sim.cost import roofline
from pdactors.sim.hardware import HARDWARE
from pdactors.sim.shapes import ModelSize

SCENARIOS = Path(__file__).parents[2] / "examples" / "scenarios"
WIDTHS = {"70b_colocated": (8, None), "70b_separated": (4, 8), "8b_one_device": (1, None), "eight_nodes": (8, None)}


def simulated(name: str, *options: str) -> dict:
    width, decode_width = WIDTHS[name]
    widths = ["--tp", str(width), *(["--decode-tp", str(decode_width)] if decode_width else [])]
    asked = ["simulate", str(SCENARIOS / f"{name}.toml"), "--hardware", "a100-80g", *widths, *options, "--json"]
    result = CliRunner().invoke(main, asked)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["servers"]


def test_every_scenario_is_run_here():
    assert {file.stem for file in SCENARIOS.glob("*.toml")} == set(WIDTHS)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        ("70b_colocated", "colocated"),
        ("70b_separated", "disaggregated"),
        ("8b_one_device", "colocated"),
        ("8b_one_device", "chunked"),
        ("eight_nodes", "disaggregated"),
    ],
)
def test_a_scenario_runs(name, mode):
    load = ("--lengths", "300:20", "--rate", "4", "--requests", "5")
    (server,) = simulated(name, "--modes", mode, *load).values()
    assert server["overall"]["done"] == 5


def test_decode_engines_of_more_devices_decode_faster_and_prefill_takes_as_long():
    load = ("--modes", "disaggregated", "--lengths", "700:20", "--requests", "3", "--concurrency", "1")
    as_it_is = simulated("70b_separated", *load)["disaggregated"]
    narrow = simulated("70b_separated", *load, "--decode-tp", "4")["disaggregated"]
    assert {name: actor["way"] for name, actor in as_it_is["rounds"][0]["actors"].items()} == {
        "n0/prefill-0": "a100-80g x 4",
        "n1/decode-0": "a100-80g x 8",
    }
    assert as_it_is["overall"]["ttft_ms"] == narrow["overall"]["ttft_ms"]
    assert as_it_is["overall"]["tpot_ms"]["p50"] < 0.7 * narrow["overall"]["tpot_ms"]["p50"]


def test_prompts_take_the_time_that_is_worked_out_in_the_docs():
    cost = roofline(ModelSize.find("llama-3-8b"), "bfloat16", HARDWARE["a100-80g"])
    load = ("--modes", "colocated", "--requests", "2", "--concurrency", "1")
    for length, expected_ms in ((100, 10.83), (4000, 330.4)):
        overall = simulated("8b_one_device", *load, "--lengths", f"{length}:1")["colocated"]["overall"]
        assert overall["ttft_ms"]["p50"] == pytest.approx(expected_ms, rel=0.001)
        assert cost.body.at(length) * 1000 < expected_ms


def test_without_an_end_of_memory_a_trace_hits_all_that_came_before(tmp_path):
    """One worker, one request after the other: every block of an earlier prompt's beginning is found again."""
    ids = [[0, 1, 2], [0, 1, 3], [4], [0, 1, 2, 5], [4, 6], [0, 7]]
    lines = [
        {"timestamp": 1000 * i, "input_length": 512 * len(some), "output_length": 16, "hash_ids": some}
        for i, some in enumerate(ids)
    ]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("\n".join(json.dumps(line) for line in lines))
    asked = ["--trace", str(trace), "--scale", "16", "--concurrency", "1", "--requests", "6", "--modes", "chunked"]
    sets = ["--set", "kv.memory=1TiB", "--set", "kv.block_tokens=32", "--set", "model.max_model_len=8192"]
    overall = simulated("8b_one_device", *asked, *sets)["chunked"]["overall"]
    assert overall["cached_tokens"] == 32 * (0 + 2 + 0 + 3 + 1 + 1)
