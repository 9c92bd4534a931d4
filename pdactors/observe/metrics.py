"""The figures of `/metrics`: what the gateway counted itself, and what the cluster's actors reported when asked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from pdactors.client_messages import DoneEvent
from pdactors.messages import STEP_BOUNDS_S, PhaseUse, Report, Role, StepCounts, TransferCounts
from pdactors.policy.scaling import ENGINES

OWNERS = (*ENGINES, "migrator")  # of KV blocks
LABELS = ("model_name", "actor", "node", "role")
REASONS = {"stop": "stop", "length": "length", "cancelled": "abort"}  # ours -> vLLM's
# Seconds. vLLM's, and smaller ones.
FIRST_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
REQUEST_BUCKETS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480)
HANDOVER_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # OpenMetrics may not have the colons of vLLM's names

disable_created_metrics()  # type: ignore[no-untyped-call]  # a series for each counter and histogram that nobody reads


class Metrics:
    """Counts requests as the gateway sees them, under the names that vLLM's dashboards read and, beyond them, ours."""

    def __init__(self, model: str, actor: str, node: str, kv_token_bytes: int) -> None:
        self._kv_token_bytes = kv_token_bytes
        self._registry = CollectorRegistry()
        self._reported = _Reported(model)
        self._registry.register(self._reported)
        self._own = (model, actor, node, "gateway")
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "to the first token", FIRST_BUCKETS)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "between two tokens", STEP_BOUNDS_S)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "per token after the first, request by request", STEP_BOUNDS_S
        )
        self._e2e = self._histogram("vllm:e2e_request_latency_seconds", "of whole requests", REQUEST_BUCKETS)
        self._queue = self._histogram("vllm:request_queue_time_seconds", "until prefill begins", REQUEST_BUCKETS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "of prefill", REQUEST_BUCKETS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "from first to last token", REQUEST_BUCKETS)
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "prompt tokens of requests that got a token")
        self._generated = self._counter("vllm:generation_tokens", "generated tokens")
        self._queries = self._counter("vllm:prefix_cache_queries", "prompt tokens that were looked up")
        self._hits = self._counter("vllm:prefix_cache_hits", "prompt tokens that were cached")
        self._success = Counter(
            "vllm:request_success", "ended requests", (*LABELS, "finished_reason"), registry=self._registry
        )
        self._failures = Counter("pdactors:requests_failed", "by error", (*LABELS, "code"), registry=self._registry)
        self._handover = Histogram(
            "pdactors:handover_seconds",
            "from the prefill's word to the adoption by decode",
            (*LABELS, "path", "codec"),
            buckets=HANDOVER_BUCKETS,
            registry=self._registry,
        )
        self._handover_bytes = Counter(
            "pdactors:handover_kv_bytes",
            "of prompts' KV as it lies in memory, copied or not",
            (*LABELS, "path", "codec"),
            registry=self._registry,
        )
        for reason in REASONS.values():
            self._success.labels(*self._own, reason)

    def tokens(self, count: int, seconds: float, prompt: tuple[int, int] | None) -> None:
        """A request got `count` tokens, `seconds` after those before, or after it came if they are its first.

        With the first comes the prompt: how many tokens it has, and how many of them were cached.
        """
        if not count:
            return
        if prompt is None:
            self._itl.observe(seconds)
        else:
            self._ttft.observe(seconds)
            self._prompt_tokens.inc(prompt[0])
            self._queries.inc(prompt[0])
            self._hits.inc(prompt[1])
        for _ in range(count - 1):  # they had overtaken it
            self._itl.observe(0.0)
        self._generated.inc(count)

    def ended(self, done: DoneEvent) -> None:
        """A request ended; the times of those that their clients left are not counted."""
        self._success.labels(*self._own, REASONS[done.finish_reason]).inc()
        timing, tokens = done.timing, done.usage.completion_tokens
        if done.path != "none":
            self._handover.labels(*self._own, done.path, done.codec).observe(timing.migration_ms / 1000)
            num_bytes = (done.usage.prompt_tokens - done.pruned_tokens) * self._kv_token_bytes
            self._handover_bytes.labels(*self._own, done.path, done.codec).inc(num_bytes)
        if done.finish_reason == "cancelled":
            return
        self._e2e.observe(timing.total_ms / 1000)
        self._queue.observe(timing.queue_ms / 1000)
        self._prefill.observe(timing.prefill_ms / 1000)
        self._decode.observe(timing.tpot_ms * (tokens - 1) / 1000)
        if tokens > 1:
            self._tpot.observe(timing.tpot_ms / 1000)

    def failed(self, code: str) -> None:
        """A request ended with an error."""
        self._failures.labels(*self._own, code).inc()

    def expose(self, reports: Sequence[Report], silent: Sequence[str]) -> bytes:
        """Write everything as `CONTENT_TYPE` says; `silent` are actors that did not report."""
        self._reported.reports, self._reported.silent = reports, silent
        return generate_latest(self._registry)

    def _histogram(self, name: str, what: str, buckets: Sequence[float]) -> Histogram:
        kind = Histogram(name, f"Seconds {what}.", LABELS, buckets=buckets, registry=self._registry)
        return kind.labels(*self._own)

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, f"Number of {what}.", LABELS, registry=self._registry).labels(*self._own)


Value = Callable[[Report], float | None]  # None: that actor has no such figure


class _Reported:
    """Makes metrics of the latest reports."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.reports: Sequence[Report] = ()
        self.silent: Sequence[str] = ()

    def collect(self) -> Iterator[Metric]:
        yield self._gauge("vllm:num_requests_running", "Sequences that run on an engine.", _of_engine(_running))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait there.", _waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use or lent, 0 to 1.", _of_engine(_usage))
        yield self._counter("vllm:num_preemptions", "Sequences preempted.", _of_engine(lambda r: r.load.num_preempted))
        yield self._gauge("pdactors:up", "Whether the actor is ready; 0 where it did not answer.", _is_ready)
        yield self._gauge(
            "pdactors:pending_prompt_tokens", "Not computed yet.", _of_engine(lambda r: r.load.pending_tokens)
        )
        yield self._counter(
            "pdactors:prompt_tokens_computed", "Not cached ones.", _of_engine(lambda r: r.load.prompt_tokens_computed)
        )
        yield self._gauge("pdactors:kv_blocks_lacking", "For what waits.", _of_engine(lambda r: r.load.blocks_lacking))
        yield self._counter("pdactors:sampled_tokens", "Tokens sampled.", _of_engine(_count("sampled_tokens")))
        yield self._counter("pdactors:busy_seconds", "Seconds in steps.", _of_engine(lambda r: r.load.busy_s))
        yield self._gauge("pdactors:leases", "Leases that it gave and that live.", _of(OWNERS, lambda r: len(r.leases)))
        yield self._counter("pdactors:leases_expired", "Leases that ran out.", _of(OWNERS, _count("leases_expired")))
        yield self._counter("pdactors:retries", "Attempts after requests' first.", _of(("router",), _count("retries")))
        yield self._by_label(CounterMetricFamily, "pdactors:dropped_messages", "Late or unknown.", "kind", _dropped)
        yield self._by_label(GaugeMetricFamily, "pdactors:kv_blocks", "KV blocks by state.", "state", _blocks)
        yield self._by_label(GaugeMetricFamily, "pdactors:device_flops_share", "Of its FLOP/s.", "phase", _flops)
        yield self._by_label(GaugeMetricFamily, "pdactors:device_bandwidth_share", "Of memory's.", "phase", _bandwidth)
        yield self._steps()
        yield self._gauge("pdactors:migrations_running", "To and from other nodes.", _of_migrator(_running))
        for name, what in MIGRATIONS.items():
            yield self._counter(name, what, _of_migrator(_count(name.removeprefix("pdactors:"))))
        for name, (what, value) in TRANSFERS.items():
            yield self._transfers(name, what, value)

    def _labels(self, report: Report) -> list[str]:
        return [self._model, report.name, report.node, report.role]

    def _gauge(self, name: str, what: str, value: Value) -> Metric:
        family = GaugeMetricFamily(name, what, labels=LABELS)
        for labels, found in self._values(value):
            family.add_metric(labels, found)
        if name == "pdactors:up":
            for actor in self.silent:
                family.add_metric([self._model, actor, actor.rpartition("/")[0], ""], 0)
        return family

    def _counter(self, name: str, what: str, value: Value) -> Metric:
        family = CounterMetricFamily(name, what, labels=LABELS)
        for labels, found in self._values(value):
            family.add_metric(labels, found)
        return family

    def _by_label(
        self,
        kind: type[CounterMetricFamily] | type[GaugeMetricFamily],
        name: str,
        what: str,
        label: str,
        values: Callable[[Report], Iterable[tuple[str, float]]],
    ) -> Metric:
        family = kind(name, what, labels=(*LABELS, label))
        for report in self.reports:
            for key, value in values(report):
                family.add_metric([*self._labels(report), key], value)
        return family

    def _steps(self) -> Metric:
        what = "Durations of steps, whose batch is at most `batch` and more than half of it."
        family = HistogramMetricFamily("pdactors:step_seconds", what, labels=(*LABELS, "phase", "batch"))
        for report in self.reports:
            for steps in report.steps:
                labels = [*self._labels(report), steps.phase, str(steps.max_batch)]
                family.add_metric(labels, _cumulative(steps), steps.seconds)
        return family

    def _transfers(self, name: str, what: str, value: Callable[[TransferCounts], float]) -> Metric:
        family = CounterMetricFamily(name, what, labels=(*LABELS, "direction", "path", "codec"))
        for report in self.reports:
            for counts in report.transfers:
                labels = [*self._labels(report), counts.direction, counts.path, counts.codec]
                family.add_metric(labels, value(counts))
        return family

    def _values(self, value: Value) -> Iterator[tuple[list[str], float]]:
        for report in self.reports:
            if (found := value(report)) is not None:
                yield self._labels(report), found


MIGRATIONS = {
    "pdactors:migrations": "Sequences whose KV was sent to another node.",
    "pdactors:migrations_pruned": "Of them, those whose KV was pruned.",
    "pdactors:migrations_failed": "Sequences whose KV could not be sent; it is computed again.",
}
TRANSFERS: dict[str, tuple[str, Callable[[TransferCounts], float]]] = {
    "pdactors:transfers": ("Transfers of KV that arrived whole.", lambda counts: counts.num_stored),
    "pdactors:transfer_errors": ("Transfers that were damaged or lost.", lambda counts: counts.num_failed),
    "pdactors:transfer_bytes": ("Bytes on the wire of those that arrived.", lambda counts: counts.num_bytes),
    "pdactors:transfer_seconds": (
        "Seconds of those that arrived, from room to storage.",
        lambda counts: counts.seconds,
    ),
}


def _of(roles: Sequence[Role], value: Callable[[Report], float]) -> Value:
    return lambda report: value(report) if report.role in roles else None


def _of_engine(value: Callable[[Report], float]) -> Value:
    return _of(ENGINES, value)


def _of_migrator(value: Callable[[Report], float]) -> Value:
    return _of(("migrator",), value)


def _count(what: str) -> Callable[[Report], float]:
    return lambda report: report.counts.get(what, 0)


def _running(report: Report) -> float:
    return report.load.running


def _waiting(report: Report) -> float | None:
    return report.load.waiting if report.role in (*ENGINES, "router") else None


def _is_ready(report: Report) -> float:
    return report.state == "ready"


def _usage(report: Report) -> float:
    blocks = report.load.blocks
    return (blocks.used + blocks.leased_out) / blocks.total if blocks.total else 0.0


def _blocks(report: Report) -> Iterator[tuple[str, float]]:
    blocks = report.load.blocks
    if report.role not in OWNERS:
        return
    for state in ("free", "cached", "used", "leased_out", "leased_in"):
        yield state, getattr(blocks, state)


def _dropped(report: Report) -> Iterator[tuple[str, float]]:
    yield from report.dropped.items()


def _flops(report: Report) -> Iterator[tuple[str, float]]:
    return ((phase, use.flops_share) for phase, use in _uses(report))


def _bandwidth(report: Report) -> Iterator[tuple[str, float]]:
    return ((phase, use.bandwidth_share) for phase, use in _uses(report))


def _uses(report: Report) -> Iterator[tuple[str, PhaseUse]]:
    for phase, use in (("prefill", report.load.prefill_use), ("decode", report.load.decode_use)):
        if use.num_steps:
            yield phase, use


def _cumulative(steps: StepCounts) -> list[tuple[str, float]]:
    """Return the buckets of a histogram: how many steps took at most so long."""
    bounds = [*map(floatToGoString, STEP_BOUNDS_S), "+Inf"]
    return list(zip(bounds, accumulate(steps.counts), strict=True))
