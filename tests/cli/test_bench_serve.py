"""The options of `pdactors bench serve`; what it does with them is in tests/house/test_bench_serve.py."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from pdactors.cli.bench_serve import WORKLOADS, _load, _objective
from pdactors.cli.main import main


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--rate", "1", "--concurrency", "2"], "--rate and --concurrency exclude each other"),
        (["--rate", "1", "--find-max-rate"], "--rate and --find-max-rate exclude each other"),
        (["--seconds", "1", "--requests", "2"], "--seconds and --requests exclude each other"),
        (["--workload", "chat", "--trace", __file__], "--workload and --trace exclude each other"),
        (["--workload", "poetry"], "'poetry' is not one of"),
        (["--scale", "2"], "--scale needs --trace"),
        (["--trace", __file__, "--scale", "0.5"], "--scale"),
        (["--trace", "/nowhere.jsonl"], "does not exist"),
        (["--url", "http://x", "--modes", "chunked"], "--url and --modes exclude each other"),
        (["--api-key", "k"], "need --url"),
        (["--modes", "fast"], "'fast' is none of colocated, chunked, disaggregated, kvstore"),
        (["--set", "cluster.mode=chunked"], "use --modes"),
        (["--rate", "0"], "--rate"),
        (["--concurrency", "0"], "--concurrency"),
        (["--rounds", "0"], "--rounds"),
        (["--slo", "ttft=5"], "'ttft=5' is none of ttft_ms=MS, tpot_ms=MS and share=SHARE"),
        (["--slo", "ttft_ms"], "'ttft_ms' is none of"),
        (["--slo", "ttft_ms=soon"], "'soon' is no number"),
        (["--slo", "ttft_ms=-1"], "must be above 0"),
        (["--slo", "tpot_ms=nan"], "must be above 0"),
        (["--slo", "share=1.5"], "must be above 0, at most 1"),
    ],
)
def test_wrong_options_are_refused_before_anything_runs(arguments, part):
    result = CliRunner().invoke(main, ["bench", "serve", *arguments])
    assert (result.exit_code, result.stdout) == (2, "")
    assert part in " ".join(result.stderr.split())


def test_what_is_not_there_yet_is_refused(tiny_model):
    sets = [f"model.path={tiny_model}", "kv.memory=8MiB", "kv.transport=cuda_ipc"]
    arguments = [part for value in sets for part in ("--set", value)]
    result = CliRunner().invoke(main, ["bench", "serve", "--modes", "kvstore", *arguments])
    assert (result.exit_code, result.stdout) == (1, "")
    assert "cuda_ipc" in result.stderr


def test_requests_that_do_not_fit_the_model_are_refused(tiny_model):
    sets = [f"model.path={tiny_model}", "kv.memory=8MiB", "model.max_model_len=1024"]
    arguments = [part for value in sets for part in ("--set", value)]
    result = CliRunner().invoke(main, ["bench", "serve", "--workload", "long", *arguments])
    assert result.exit_code == 1
    assert "model.max_model_len = 1024: requests of workload long take 2016" in result.stderr


def test_a_file_that_is_no_trace_is_refused_by_line(tiny_model):
    result = CliRunner().invoke(main, ["bench", "serve", "--trace", __file__, "--set", f"model.path={tiny_model}"])
    assert result.exit_code == 1
    assert "test_bench_serve.py, line 1: " in result.stderr


def test_the_objective_keeps_what_is_left_out():
    assert _objective(None, None, "").ttft_ms == 2000.0
    found = _objective(None, None, " ttft_ms = 500, share=0.9")
    assert (found.ttft_ms, found.tpot_ms, found.share) == (500.0, 150.0, 0.9)


@pytest.mark.parametrize(
    ("given", "rate", "seconds", "requests"),
    [
        ({}, 1.0, 60.0, None),
        ({"rate": 2.0, "requests": 5}, 2.0, None, 5),
        ({"concurrency": 4}, None, 60.0, None),
        ({"find_max_rate": True, "seconds": 5.0}, None, 5.0, None),
        ({"trace": "x"}, None, 60.0, None),
        ({"trace": "x", "rate": 3.0}, 3.0, 60.0, None),
    ],
)
def test_what_is_left_out_of_the_load_has_a_default(given, rate, seconds, requests):
    nothing = dict.fromkeys(("rate", "concurrency", "seconds", "requests", "trace"))
    load = _load({**nothing, "find_max_rate": False, **given})
    assert (load.rate, load.seconds, load.requests) == (rate, seconds, requests)


def test_the_command_knows_every_workload():
    from pdactors.bench import workload

    assert set(workload.WORKLOADS) == set(WORKLOADS)
