"""`pdactors plan`, end to end: what it finds holds, fewer would not, and wrong questions are refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from pdactors.bench.figures import Objective
from pdactors.bench.workload import lengths
from pdactors.cli.main import main
from pdactors.sim import plan
from pdactors.sim.hardware import HARDWARE
from pdactors.sim.plan import Cluster, Planner
from tests.sim.conftest import MODEL

ASKED = ["plan", "--model", "smollm2-135m", "--hardware", "cpu", "--lengths", "64:8", "--rate", "10"]
SLO = ["--slo", "ttft_ms=300,tpot_ms=60"]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch):
    monkeypatch.setattr(plan, "MIN_SECONDS", 2.0)
    monkeypatch.setattr(plan, "MIN_REQUESTS", 50)
    monkeypatch.setattr(plan, "MAX_REQUESTS", 100)


def ask(*arguments):
    return CliRunner().invoke(main, [*ASKED, *SLO, *arguments])


def test_the_cheapest_of_each_mode_is_found_with_what_limits_it():
    result = ask("--max-devices", "3", "--modes", "chunked,disaggregated", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    clusters = [found["best"], *found["others"]]
    assert {one["cluster"]["mode"] for one in clusters} == {"chunked", "disaggregated"}
    assert [one["price"] for one in clusters] == sorted(one["price"] for one in clusters)
    for one in clusters:
        assert one["is_held"]
        assert one["figures"]["slo_share"] >= 0.95
        assert "miss the TTFT" in one["limit"]
    engines = next(one["cluster"] for one in clusters if one["cluster"]["mode"] == "disaggregated")
    assert [(ratio["prefill"], ratio["decode"]) for ratio in found["ratios"]] == [
        (prefill, engines["prefill"] + engines["decode"] - prefill)
        for prefill in range(1, engines["prefill"] + engines["decode"])
    ]
    assert max(ratio["max_rate"] for ratio in found["ratios"]) >= 10


def test_fewer_engines_than_the_plan_says_do_not_hold_the_rate():
    planner = Planner(
        MODEL, "bfloat16", HARDWARE["cpu"], (lengths("64:8"),), "x", 40.0, Objective(300, 60), modes=("chunked",)
    )
    best = planner.plan().best
    assert best is not None
    engines = best.cluster.prefill
    assert engines > 1
    sizes = best.cluster.chunk_tokens, best.cluster.max_batch
    assert not planner.try_out(Cluster("chunked", 1, engines - 1, 0, *sizes)).is_held


def test_a_table_says_it_to_people():
    result = ask("--max-devices", "1", "--modes", "chunked")
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    assert "smollm2-135m bfloat16 on cpu" in words
    assert "The cheapest that holds 10 requests/s of 64:8, 95% of them with TTFT within 300 ms" in words
    assert "chunked, 1 workers" in words


@pytest.mark.slow
def test_a_report_has_the_limits_and_a_plot(tmp_path):
    report = tmp_path / "plan.html"
    result = ask("--max-devices", "2", "--modes", "disaggregated", "-o", str(report))
    assert result.exit_code == 0, result.output
    text = report.read_text()
    assert "What limits each" in text
    assert "<svg" in text


def test_what_no_cluster_holds_is_said_with_exit_status_1():
    result = ask("--max-devices", "1", "--modes", "colocated", "--rate", "500")
    assert result.exit_code == 1
    assert "No cluster that was tried holds 500 requests/s" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (["--model", "llama-9"], 1, "llama-9 is neither"),
        (["--hardware", "abacus"], 1, "no hardware is called abacus"),
        (["--model", "llama-3-70b"], 1, "does not fit on cpu"),
        (["--lengths", "9000:100"], 1, "8192 positions; requests take 9100"),
        (["--workload", "chat"], 2, "--workload and --lengths exclude each other"),
        (["--tp", "two"], 2, "write numbers of devices"),
        (["--modes", "fast"], 2, "'fast' is none of"),
    ],
)
def test_wrong_questions_are_refused(arguments, status, part):
    result = ask(*arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert part in " ".join(result.stderr.split())
