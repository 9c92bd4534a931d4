"""`Engine`: schedule a step, run it, take its results in. The only code that touches sequences and their blocks.

`admit`, `plan`, `commit` and `remove` run on the actor's loop, between steps; `run` computes in the worker thread and
reads nothing but the step that it is given.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pdactors.engine.paged import Span, StepBatch
from pdactors.engine.sampling import Sampled, SampleRow, sample
from pdactors.engine.sequence import Sequence
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.prefix import chain
from pdactors.messages import FinishReason, KVHandle, StepTimes
from pdactors.policy.batching import Portion, Work, plan_step

NUM_TIMED_STEPS = 512


class Model(Protocol):
    """What the engine needs of a model; `PagedModel` is one."""

    def forward(self, batch: StepBatch) -> torch.Tensor: ...


@dataclass(frozen=True)
class EngineLimits:
    """How much one engine takes on at once."""

    max_sequences: int
    token_budget: int
    eos_ids: frozenset[int]
    prefix_key: bytes
    prompts_first: bool = False
    prompt_only: bool = False  # a prefill engine: sequences leave after their first token


@dataclass(frozen=True)
class Step:
    """A planned step: what each sequence computes, and what the model needs for it."""

    portions: list[tuple[Sequence, int]]
    batch: StepBatch
    sampled: list[Sequence]  # those that get a token, in the order of the logit rows
    rows: list[SampleRow]


@dataclass(frozen=True)
class StepResult:
    tokens: list[Sampled]
    duration_s: float


@dataclass(frozen=True)
class Outcome:
    """A sequence got a token; `finish` says whether it was the last one."""

    sequence: Sequence
    sampled: Sampled
    finish: FinishReason | None


class Engine:
    """Continuous batching over one pool of blocks.

    A sequence is admitted when every block that it may need is there, so it never stops for memory once it runs;
    blocks are taken one by one as they are needed.
    """

    def __init__(self, model: Model, arena: Arena, pool: BlockPool, limits: EngineLimits) -> None:
        self.model = model
        self.arena = arena
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_reserved = 0
        self._step_ms: deque[float] = deque(maxlen=NUM_TIMED_STEPS)

    # ---- Sequences --------

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; it runs once `admit` finds room for it."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Take waiting sequences in, in order and interactive ones first, while there is room; return them."""
        admitted = []
        for sequence in self._line():
            if len(self.running) >= self.limits.max_sequences or not self._take_in(sequence):
                break
            self.waiting.remove(sequence)
            self.running.append(sequence)
            admitted.append(sequence)
        return admitted

    def find(self, request: str, attempt: int) -> Sequence | None:
        """Return the sequence of that attempt, waiting or running."""
        return next((s for s in (*self.running, *self.waiting) if s.key == (request, attempt)), None)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and let go of its own blocks."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            return
        self.running.remove(sequence)
        self.pool.free(sequence.own_blocks)
        self.num_reserved -= sequence.num_reserved

    def blocks_lacking(self) -> int:
        """Return how many blocks more would let the next waiting sequence in; 0 if none waits for memory."""
        if not self.waiting or len(self.running) >= self.limits.max_sequences:
            return 0
        return max(0, self._blocks_needed(self._line()[0]) - self.num_unreserved)

    @property
    def num_unreserved(self) -> int:
        """Blocks that nobody may still claim."""
        return self.pool.num_available - self.num_reserved

    # ---- One step --------

    def plan(self) -> Step | None:
        """Choose what to compute next; None when there is nothing."""
        works = [Work(s.num_pending, s.is_prompt, s.is_urgent) for s in self.running]
        portions = plan_step(
            works,
            token_budget=self.limits.token_budget,
            max_sequences=self.limits.max_sequences,
            prompts_first=self.limits.prompts_first,
        )
        return self._prepare(portions) if portions else None

    def run(self, step: Step) -> StepResult:
        """Compute a step.

        Raises:
            PDError: the model gave something that cannot be sampled from.
        """
        began = time.perf_counter()
        logits = self.model.forward(step.batch)
        tokens = sample(logits, step.rows)
        return StepResult(tokens, time.perf_counter() - began)

    def commit(self, step: Step, result: StepResult) -> list[Outcome]:
        """Take a step's results in; finished sequences stay until the caller removes them."""
        self._step_ms.append(result.duration_s * 1000)
        for sequence, num_tokens in step.portions:
            sequence.num_stored += num_tokens
            self._index_full_blocks(sequence)
        outcomes = []
        for sequence, sampled in zip(step.sampled, result.tokens, strict=True):
            sequence.tokens.append(sampled.token_id)
            outcomes.append(Outcome(sequence, sampled, self._finish(sequence)))
        return outcomes

    def step_times(self) -> StepTimes:
        """Return how long recent steps took."""
        if not self._step_ms:
            return StepTimes()
        times = np.array(self._step_ms)
        p50, p99 = np.percentile(times, (50, 99))
        return StepTimes(round(float(times.mean()), 3), round(float(p50), 3), round(float(p99), 3))

    # ---- Private --------

    def _line(self) -> list[Sequence]:
        return sorted(self.waiting, key=lambda sequence: not sequence.is_urgent)

    def _blocks_needed(self, sequence: Sequence) -> int:
        """Return the blocks that it will own at most, beyond those that it can read."""
        layout = self.arena.layout
        total = len(sequence.prompt)
        if not self.limits.prompt_only:
            total += sequence.sampling.max_tokens - 1  # the last token's KV is never needed
        readable = sequence.handle.num_tokens // layout.block_tokens if sequence.handle else len(sequence.blocks)
        return layout.num_blocks(total) - readable

    def _take_in(self, sequence: Sequence) -> bool:
        if sequence.handle is None:
            sequence.blocks = self._match(sequence)
        needed = self._blocks_needed(sequence)
        if needed > self.num_unreserved:
            self.pool.free(sequence.blocks)
            sequence.blocks = []
            return False
        sequence.num_reserved = needed
        self.num_reserved += needed
        if sequence.handle is not None:
            self._adopt(sequence, sequence.handle)
        else:
            sequence.num_stored = sequence.num_cached = len(sequence.blocks) * self.arena.layout.block_tokens
        return True

    def _match(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks of the prompt, with a reference; at least one token is left to compute."""
        block_tokens = self.arena.layout.block_tokens
        if not sequence.digests:
            sequence.digests = chain(sequence.prompt, block_tokens, self.limits.prefix_key)
        return self.pool.match(sequence.digests[: (len(sequence.prompt) - 1) // block_tokens])

    def _adopt(self, sequence: Sequence, handle: KVHandle) -> None:
        """Read full blocks where they lie; copy the partly filled one, since only owners write."""
        full, tail = divmod(handle.num_tokens, self.arena.layout.block_tokens)
        sequence.blocks = list(handle.blocks[:full])
        sequence.num_borrowed = full
        sequence.num_stored = handle.num_tokens
        if tail:
            self._grow(sequence, 1)
            self.arena.copy_block(handle.blocks[full], sequence.blocks[full], tail)

    def _grow(self, sequence: Sequence, count: int) -> None:
        sequence.blocks += self.pool.allocate(count)
        sequence.num_reserved -= count
        self.num_reserved -= count

    def _prepare(self, portions: list[Portion]) -> Step:
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        chosen: list[tuple[Sequence, int]] = []
        sampled: list[Sequence] = []
        logit_rows: list[int] = []
        for portion in portions:
            sequence, start = self.running[portion.index], len(ids)
            stop = sequence.num_stored + portion.num_tokens
            lacking = self.arena.layout.num_blocks(stop) - len(sequence.blocks)
            if lacking > 0:
                self._grow(sequence, lacking)
            ids += sequence.token_ids(sequence.num_stored, stop)
            positions += range(sequence.num_stored, stop)
            spans.append(Span(start, portion.num_tokens, stop, tuple(sequence.blocks)))
            chosen.append((sequence, portion.num_tokens))
            if stop == sequence.num_tokens:
                sampled.append(sequence)
                logit_rows.append(len(ids) - 1)
        batch = StepBatch(ids, positions, spans, logit_rows)
        return Step(chosen, batch, sampled, [self._sample_row(sequence) for sequence in sampled])

    def _sample_row(self, sequence: Sequence) -> SampleRow:
        position = len(sequence.tokens)
        banned = tuple(self.limits.eos_ids) if position < sequence.sampling.min_tokens else ()
        return SampleRow(sequence.sampling, position, banned)

    def _index_full_blocks(self, sequence: Sequence) -> None:
        """Make our full blocks findable by what they hold."""
        block_tokens = self.arena.layout.block_tokens
        num_full = min(sequence.num_stored, len(sequence.prompt)) // block_tokens
        for i in range(max(sequence.num_borrowed, sequence.num_indexed), num_full):
            parent = sequence.digests[i - 1] if i else None
            self.pool.insert(sequence.digests[i], sequence.blocks[i], parent)
        sequence.num_indexed = num_full

    def _finish(self, sequence: Sequence) -> FinishReason | None:
        if sequence.tokens[-1] in self.limits.eos_ids and not sequence.sampling.ignore_eos:
            return "stop"
        if len(sequence.tokens) >= sequence.sampling.max_tokens:
            return "length"
        return None
