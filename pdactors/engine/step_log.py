"""`StepLog`: how long steps take, where the time goes, and how much of the machine each phase uses."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from pdactors.engine.machine import Machine
from pdactors.engine.shape import ModelShape
from pdactors.engine.step import Step, StepResult
from pdactors.messages import STEP_BOUNDS_S, Phase, PhaseUse, StepCounts, StepTimes

NUM_STEPS = 512
SLOW_LOG_PERIOD_S = 1.0


@dataclass
class _Durations:
    """All steps of one phase and range of batches, sorted by how long they took."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(STEP_BOUNDS_S) + 1))
    seconds: float = 0.0


@dataclass
class _Phase:
    """Recent steps of one kind: durations, and the work that they did."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_STEPS))
    flops: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_STEPS))
    bytes: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_STEPS))

    def use(self, machine: Machine, threads: int) -> PhaseUse:
        total = sum(self.seconds)
        if not total:
            return PhaseUse()
        flops = sum(self.flops) / total / (machine.flops_per_s * threads)
        read = sum(self.bytes) / total / (machine.bytes_per_s * threads)
        return PhaseUse(len(self.seconds), round(flops, 4), round(read, 4))


class StepLog:
    """Keeps the last steps of each phase.

    Work is counted from the model's shape: 2 FLOPs per weight and token (those of the head only where logits are
    wanted), 4 per head dimension, head, layer and token of context; bytes are the weights once per step and each
    sequence's KV. So prefill shows a high share of the machine's FLOP/s and decode one of its memory bandwidth.
    """

    def __init__(
        self, shape: ModelShape, weight_bytes: int, kv_token_bytes: int, machine: Machine, threads: int
    ) -> None:
        self._shape = shape
        self._weight_bytes = weight_bytes
        self._kv_token_bytes = kv_token_bytes
        self._machine = machine
        self._threads = threads
        self._prefill = _Phase()
        self._decode = _Phase()
        self._durations: dict[tuple[Phase, int], _Durations] = {}  # by phase and largest batch
        self.busy_s = 0.0  # what all steps took
        self._slow_logged_s = -SLOW_LOG_PERIOD_S

    def add(self, step: Step, result: StepResult) -> None:
        """Take note of a step."""
        phase = self._decode if step.is_decode else self._prefill
        kind: tuple[Phase, int] = ("decode" if step.is_decode else "prefill", _max_batch(len(step.portions)))
        durations = self._durations.setdefault(kind, _Durations())
        durations.counts[bisect_left(STEP_BOUNDS_S, result.duration_s)] += 1
        durations.seconds += result.duration_s
        num_tokens = len(step.batch.input_ids)
        context = sum(span.num_tokens * (span.context_len - (span.num_tokens - 1) / 2) for span in step.batch.spans)
        shape = self._shape
        attention = 4.0 * shape.head_dim * shape.num_heads * shape.num_layers * context
        self.busy_s += result.duration_s
        phase.seconds.append(result.duration_s)
        head = shape.vocab_size * shape.hidden_size
        products = (shape.num_floats - head) * num_tokens + head * len(step.batch.logit_rows)
        phase.flops.append(2.0 * products + attention)
        phase.bytes.append(self._weight_bytes + self._kv_token_bytes * float(step.num_kv_tokens))

    def times(self) -> StepTimes:
        """Return how long recent decode steps took; of prefill steps where there are no others."""
        seconds = self._decode.seconds or self._prefill.seconds
        if not seconds:
            return StepTimes()
        times = np.array(seconds) * 1000
        p50, p99 = np.percentile(times, (50, 99))
        return StepTimes(round(float(times.mean()), 3), round(float(p50), 3), round(float(p99), 3))

    def counts(self) -> tuple[StepCounts, ...]:
        """Return how long all steps took, by phase and batch."""
        return tuple(
            StepCounts(phase, max_batch, tuple(durations.counts), durations.seconds)
            for (phase, max_batch), durations in sorted(self._durations.items())
        )

    def uses(self) -> tuple[PhaseUse, PhaseUse]:
        """Return what prefill and decode steps achieve."""
        return (
            self._prefill.use(self._machine, self._threads),
            self._decode.use(self._machine, self._threads),
        )

    def slow(
        self, step: Step, result: StepResult, waited_s: float, slow_ms: float, now: float
    ) -> dict[str, object] | None:
        """Describe a decode step that took longer than `slow_ms`, at most one a second; None for the others."""
        is_due = now - self._slow_logged_s >= SLOW_LOG_PERIOD_S
        if not step.is_decode or result.duration_s * 1000 <= slow_ms or not is_due:
            return None
        self._slow_logged_s = now
        rest_s = result.duration_s - result.attention_s - result.sampling_s
        _, decode = self.uses()
        return {
            "ms": round(result.duration_s * 1000, 1),
            "batch": len(step.portions),
            "kv_tokens": step.num_kv_tokens,
            "attention_ms": round(result.attention_s * 1000, 1),
            "gemm_ms": round(rest_s * 1000, 1),
            "sampling_ms": round(result.sampling_s * 1000, 1),
            "waiting_ms": round(waited_s * 1000, 1),
            "flops_share": decode.flops_share,
            "bandwidth_share": decode.bandwidth_share,
        }


def _max_batch(batch: int) -> int:
    """Return the power of two that a batch is at most."""
    return 1 << (batch - 1).bit_length()
