"""What Prometheus reads, by its own parser; and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdactors.client_messages import DoneEvent, Timing, Usage
from pdactors.messages import STEP_BOUNDS_S, Blocks, Load, PhaseUse, Report, StepCounts, TransferCounts
from pdactors.observe.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"
LOAD = Load(
    running=2,
    waiting=3,
    pending_tokens=70,
    blocks=Blocks(total=10, free=4, cached=1, used=3, leased_out=2, leased_in=1),
    prompt_tokens_computed=900,
    num_preempted=4,
    decode_use=PhaseUse(5, 0.1, 0.6),
    busy_s=7.5,
)
TIMES = (0, 3, 0, 0, 2, *[0] * (len(STEP_BOUNDS_S) - 5), 1)  # steps of at most 2.5 and 25 ms, and one of more than 40 s
ROUTER = Report(
    "router",
    "router",
    "n0",
    "r0",
    "ready",
    1,
    1,
    Load(running=9, waiting=5),
    dropped={"Finished": 3, "stranger": 4},
    counts={"retries": 2},
)
DECODE = Report(
    "n0/decode-0",
    "decode",
    "n0",
    "r0",
    "draining",
    2,
    1,
    LOAD,
    counts={"sampled_tokens": 77},
    steps=(StepCounts("decode", 4, TIMES, 41.05), StepCounts("prefill", 1, (1, *TIMES[1:]), 41.06)),
)
MIGRATOR = Report(
    "n0/migrator",
    "migrator",
    "n0",
    "r0",
    "ready",
    3,
    1,
    Load(running=2, blocks=Blocks(total=5, free=5)),
    counts={"migrations": 6, "migrations_pruned": 1, "migrations_failed": 2, "leases_expired": 3},
    transfers=(
        TransferCounts("send", "ucx", "int8", 9, 1, 9000, 0.5),
        TransferCounts("receive", "ucx", "none", 4, 0, 800, 0.25),
    ),
)


def done(reason: Any = "stop", tokens: int = 4, path: Any = "lease", **how: Any) -> DoneEvent:
    timing = Timing(queue_ms=10, prefill_ms=20, migration_ms=1, ttft_ms=31, tpot_ms=5, total_ms=50)
    return DoneEvent("id", reason, Usage(8, tokens, 2), timing, path, **how)


class Shown:
    """What a scrape shows."""

    def __init__(self, metrics: Metrics, *reports: Report, silent: tuple[str, ...] = ()) -> None:
        text = metrics.expose(reports, silent).decode()
        self.samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        self.names = {sample.name for sample in self.samples}

    def value(self, name: str, **labels: str) -> float:
        (sample,) = [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]
        return sample.value


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("tiny", "gateway", "n0", kv_token_bytes=100)


def test_a_request_is_counted_where_it_belongs(metrics: Metrics) -> None:
    metrics.tokens(1, 0.031, (8, 2))
    metrics.tokens(1, 0.005, None)
    metrics.tokens(0, 9.0, None)
    metrics.tokens(2, 0.010, None)
    metrics.ended(done())
    shown = Shown(metrics)
    for name, expected in {
        "prompt_tokens_total": 8,
        "prefix_cache_queries_total": 8,
        "prefix_cache_hits_total": 2,
        "generation_tokens_total": 4,
        "time_to_first_token_seconds_sum": 0.031,
        "inter_token_latency_seconds_count": 3,
        "inter_token_latency_seconds_sum": 0.015,
        "request_time_per_output_token_seconds_sum": 0.005,
        "e2e_request_latency_seconds_sum": 0.05,
        "request_queue_time_seconds_sum": 0.01,
        "request_prefill_time_seconds_sum": 0.02,
        "request_decode_time_seconds_sum": 0.015,
    }.items():
        assert shown.value(f"vllm:{name}") == pytest.approx(expected), name
    assert shown.value("pdactors:handover_seconds_sum", path="lease", codec="none") == 0.001


def test_hand_overs_are_told_apart_by_path_and_codec(metrics: Metrics) -> None:
    metrics.ended(done())
    metrics.ended(done(path="ucx", codec="int8", pruned_tokens=3))
    metrics.ended(done(path="ucx", codec="int8"))
    shown = Shown(metrics)
    found = {
        (s.labels["path"], s.labels["codec"]): s.value
        for s in shown.samples
        if s.name == "pdactors:handover_kv_bytes_total"
    }
    assert found == {("lease", "none"): 800, ("ucx", "int8"): 500 + 800}
    assert shown.value("pdactors:handover_seconds_count", path="ucx", codec="int8") == 2


def test_what_never_moved_was_not_handed_over(metrics: Metrics) -> None:
    metrics.ended(done(path="none"))
    assert "pdactors:handover_seconds_count" not in Shown(metrics).names


def test_one_token_has_no_time_per_token(metrics: Metrics) -> None:
    metrics.ended(done(tokens=1))
    shown = Shown(metrics)
    assert shown.value("vllm:request_time_per_output_token_seconds_count") == 0
    assert shown.value("vllm:request_decode_time_seconds_sum") == 0


def test_endings_are_told_apart_and_those_by_clients_have_no_times(metrics: Metrics) -> None:
    for reason in ("stop", "length", "length", "cancelled"):
        metrics.ended(done(reason))
    metrics.failed("overloaded")
    shown = Shown(metrics)
    found = {r: shown.value("vllm:request_success_total", finished_reason=r) for r in ("stop", "length", "abort")}
    assert found == {"stop": 1, "length": 2, "abort": 1}
    assert shown.value("pdactors:requests_failed_total", code="overloaded") == 1
    assert shown.value("vllm:e2e_request_latency_seconds_count") == 3


def test_reports_become_gauges_with_the_actors_labels(metrics: Metrics) -> None:
    shown = Shown(metrics, ROUTER, DECODE, silent=("n0/prefill-0",))
    decode = {"actor": "n0/decode-0", "node": "n0", "role": "decode", "model_name": "tiny"}
    assert shown.value("vllm:num_requests_running", **decode) == 2
    assert shown.value("vllm:num_requests_waiting", **decode) == 3
    assert shown.value("vllm:num_requests_waiting", actor="router") == 5  # not counted elsewhere
    assert shown.value("vllm:kv_cache_usage_perc", **decode) == 0.5
    assert shown.value("vllm:num_preemptions_total", **decode) == 4
    assert shown.value("pdactors:kv_blocks", state="leased_out", **decode) == 2
    assert shown.value("pdactors:busy_seconds_total", **decode) == 7.5
    assert shown.value("pdactors:sampled_tokens_total", **decode) == 77
    assert shown.value("pdactors:device_bandwidth_share", phase="decode", **decode) == 0.6
    assert shown.value("pdactors:dropped_messages_total", actor="router", kind="stranger") == 4
    assert shown.value("pdactors:retries_total") == 2
    assert shown.value("pdactors:leases_expired_total", **decode) == 0
    up = {name: shown.value("pdactors:up", actor=name) for name in ("router", "n0/decode-0", "n0/prefill-0")}
    assert up == {"router": 1, "n0/decode-0": 0, "n0/prefill-0": 0}
    assert shown.value("pdactors:up", actor="n0/prefill-0", node="n0") == 0


def test_steps_become_a_histogram_for_each_phase_and_batch(metrics: Metrics) -> None:
    shown = Shown(metrics, DECODE)
    name, kind = "pdactors:step_seconds", {"phase": "decode", "batch": "4"}
    bounds = ("0.001", "0.0025", "0.01", "0.025", "40.0", "+Inf")
    assert [shown.value(f"{name}_bucket", le=le, **kind) for le in bounds] == [0, 3, 3, 5, 5, 6]
    assert (shown.value(f"{name}_count", **kind), shown.value(f"{name}_sum", **kind)) == (6, 41.05)
    assert shown.value(f"{name}_count", phase="prefill", batch="1") == 7


def test_transfers_are_told_apart_by_direction_path_and_codec(metrics: Metrics) -> None:
    shown = Shown(metrics, MIGRATOR, DECODE)
    for labels, expected in {
        ("send", "ucx", "int8"): (9, 1, 9000, 0.5),
        ("receive", "ucx", "none"): (4, 0, 800, 0.25),
    }.items():
        kind = dict(zip(("direction", "path", "codec"), labels, strict=True))
        names = ("transfers", "transfer_errors", "transfer_bytes", "transfer_seconds")
        assert tuple(shown.value(f"pdactors:{name}_total", **kind) for name in names) == expected
    assert shown.value("pdactors:migrations_running") == 2
    counts = [shown.value(f"pdactors:migrations{which}_total") for which in ("", "_pruned", "_failed")]
    assert counts == [6, 1, 2]
    assert shown.value("pdactors:leases_expired_total", role="migrator") == 3
    assert shown.value("pdactors:kv_blocks", role="migrator", state="free") == 5


def test_an_actor_that_is_gone_is_shown_no_longer(metrics: Metrics) -> None:
    Shown(metrics, ROUTER, DECODE)
    assert {s.labels["actor"] for s in Shown(metrics, ROUTER).samples} == {"gateway", "router"}


def test_two_gateways_of_one_process_count_apart(metrics: Metrics) -> None:
    Metrics("tiny", "gateway", "n1", 100).failed("internal")
    assert "pdactors:requests_failed_total" not in Shown(metrics).names


def test_the_dashboard_asks_for_what_exists(metrics: Metrics) -> None:
    metrics.tokens(2, 0.1, (8, 2))
    metrics.ended(done())
    metrics.failed("overloaded")
    names = Shown(metrics, ROUTER, DECODE, MIGRATOR).names
    queries = [t["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for t in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"(?:vllm|pdactors):\w+", query)}
    assert len(asked) > 30
    assert asked <= names
