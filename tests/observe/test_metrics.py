"""What Prometheus reads, by its own parser; and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pdactors.client_messages import DoneEvent, Timing, Usage
from pdactors.messages import Blocks, Load, PhaseUse, Report, StepTimes
from pdactors.observe.metrics import Metrics

DASHBOARD = Path(__file__).parents[2] / "examples" / "grafana.json"
LOAD = Load(
    running=2,
    waiting=3,
    pending_tokens=70,
    blocks=Blocks(total=10, free=4, cached=1, used=3, leased_out=2, leased_in=1),
    step_ms=StepTimes(20.0, 19.0, 40.0),
    prompt_tokens_computed=900,
    num_preempted=4,
    decode_use=PhaseUse(5, 0.1, 0.6),
)
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
DECODE = Report("n0/decode-0", "decode", "n0", "r0", "draining", 2, 1, LOAD)


def done(reason: Any = "stop", tokens: int = 4, path: Any = "lease") -> DoneEvent:
    timing = Timing(queue_ms=10, prefill_ms=20, migration_ms=1, ttft_ms=31, tpot_ms=5, total_ms=50)
    return DoneEvent("id", reason, Usage(8, tokens, 2), timing, path)


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
    return Metrics("tiny", "gateway", "n0")


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
    assert shown.value("pdactors:step_seconds", quantile="0.99", **decode) == 0.04
    assert shown.value("pdactors:device_bandwidth_share", phase="decode", **decode) == 0.6
    assert shown.value("pdactors:dropped_messages_total", actor="router", kind="stranger") == 4
    assert shown.value("pdactors:retries_total") == 2
    assert shown.value("pdactors:leases_expired_total", **decode) == 0
    up = {name: shown.value("pdactors:up", actor=name) for name in ("router", "n0/decode-0", "n0/prefill-0")}
    assert up == {"router": 1, "n0/decode-0": 0, "n0/prefill-0": 0}
    assert shown.value("pdactors:up", actor="n0/prefill-0", node="n0") == 0


def test_an_actor_that_is_gone_is_shown_no_longer(metrics: Metrics) -> None:
    Shown(metrics, ROUTER, DECODE)
    assert {s.labels["actor"] for s in Shown(metrics, ROUTER).samples} == {"gateway", "router"}


def test_two_gateways_of_one_process_count_apart(metrics: Metrics) -> None:
    Metrics("tiny", "gateway", "n1").failed("internal")
    assert "pdactors:requests_failed_total" not in Shown(metrics).names


def test_the_dashboard_asks_for_what_exists(metrics: Metrics) -> None:
    metrics.tokens(2, 0.1, (8, 2))
    metrics.ended(done())
    metrics.failed("overloaded")
    names = Shown(metrics, ROUTER, DECODE).names
    queries = [t["expr"] for panel in json.loads(DASHBOARD.read_text())["panels"] for t in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"(?:vllm|pdactors):\w+", query)}
    assert len(asked) > 20
    assert asked <= names
