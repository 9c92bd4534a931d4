"""`VirtualEngine`: the engine's own scheduling with no model behind it; unchanged decode steps are taken at once."""

from __future__ import annotations

from typing import Any, cast

from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.limits import EngineLimits
from pdactors.engine.runner import Engine
from pdactors.engine.sampling import Sampled
from pdactors.engine.sequence import Sequence
from pdactors.engine.step import Outcome, Step, StepResult
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.policy.batching import Portion
from pdactors.sim.memory import NoBytes

_TOKEN = Sampled(0)


class VirtualEngine(Engine):
    """Admission, batches, chunks, preemption and prefix cache are those of `Engine`; every sampled token is 0."""

    def __init__(self, layout: KVLayout, pool: BlockPool, limits: EngineLimits) -> None:
        super().__init__(cast(Any, None), cast(Any, NoBytes(layout)), pool, limits)

    def num_unchanged(self, spare_blocks: int) -> int:
        """Return how many steps are decode steps of just these sequences, none of them ending before the last.

        0 if the next step is none. No more than leave `spare_blocks` blocks: with fewer, memory is asked for.
        """
        is_open = self.waiting and len(self.running) < self.limits.max_sequences
        if is_open or not self.running or any(s.is_prompt for s in self.running):
            return 0
        steps = min(s.sampling.max_tokens - len(s.tokens) for s in self.running)
        num_blocks = self.arena.layout.num_blocks
        while steps > 1:
            grown = sum(num_blocks(s.num_stored + steps) - len(s.blocks) - s.num_reserved for s in self.running)
            if grown <= self.num_unreserved - spare_blocks:
                return steps
            steps //= 2
        return 0

    def decode(self, steps: int) -> list[Outcome]:
        """Take that many unchanged steps; the outcomes are those of the last one."""
        outcomes = []
        for sequence in self.running:
            sequence.num_stored += steps
            if (missing := self.arena.layout.num_blocks(sequence.num_stored) - len(sequence.blocks)) > 0:
                self._grow(sequence, missing)
            sequence.tokens += [_TOKEN.token_id] * steps
            self._index_full_blocks(sequence)
            outcomes.append(Outcome(sequence, _TOKEN, self._finish(sequence)))
        return outcomes

    def _prepare(self, runnable: list[Sequence], portions: list[Portion]) -> Step:
        """Give the sequences their blocks; of what a model would need, spans without tables are left."""
        spans, chosen, sampled = [], [], []
        num_rows = 0
        for portion in portions:
            sequence = runnable[portion.index]
            stop = sequence.num_stored + portion.num_tokens
            if (missing := self.arena.layout.num_blocks(stop) - len(sequence.blocks)) > 0:
                self._grow(sequence, missing)
            spans.append(Span(num_rows, portion.num_tokens, stop, ()))
            num_rows += portion.num_tokens
            chosen.append((sequence, portion.num_tokens))
            if stop == sequence.num_tokens:
                sampled.append(sequence)
        return Step(chosen, StepBatch(range(num_rows), (), spans, ()), sampled, [])

    def take_in(self, step: Step) -> list[Outcome]:
        """Commit a step of which nothing was computed."""
        return self.commit(step, StepResult([_TOKEN] * len(step.sampled), 0.0, 0.0, 0.0))
