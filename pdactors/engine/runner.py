"""`Engine`: schedule a step, run it, take its results in. The only code that touches sequences and their blocks.

`admit`, `plan`, `commit` and `remove` run on the actor's loop, between steps; `run` computes in the worker thread and
reads nothing but the step that it is given.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Protocol

import torch

from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.limits import EngineLimits
from pdactors.engine.sampling import SampleRow, sample
from pdactors.engine.sequence import Sequence
from pdactors.engine.step import Outcome, Step, StepResult
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.prefix import Part, chain, parts
from pdactors.messages import FinishReason
from pdactors.policy.batching import Portion, Work, plan_step


class Model(Protocol):
    """What the engine needs of a model; `PagedModel` is one."""

    attention_s: float  # what the last step spent in attention

    def forward(self, batch: StepBatch) -> torch.Tensor: ...


class Engine:
    """Continuous batching over one pool of blocks.

    A sequence is admitted when the blocks for what it has to compute are there; they are set aside for it. While it
    decodes it takes more as it grows. When there are none, the sequence that was admitted last is preempted: its full
    blocks stay in the prefix cache while they can, and what is lost is computed again.
    """

    def __init__(self, model: Model, arena: Arena, pool: BlockPool, limits: EngineLimits) -> None:
        self.model = model
        self.arena = arena
        self.pool = pool
        self.limits = limits
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.num_reserved = 0
        self.num_preempted = 0
        self.num_computed = 0  # tokens of prompts that were computed
        self._block_tokens = arena.layout.block_tokens

    # ---- Sequences --------

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence; it runs once `admit` finds room for it."""
        self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """Take waiting sequences in, in order and interactive ones first, while there is room; return them.

        One whose next block another is just computing is passed over until that block can be read.
        """
        admitted: list[Sequence] = []
        prompts = [s for s in self.running if s.is_prompt and s.handle is None and self.limits.caches]
        coming = {digest for s in prompts for digest in s.digests[s.num_indexed :]}
        for sequence in self._line():
            if len(self.running) >= self.limits.max_sequences:
                break
            num_known = self._find(sequence)
            if not coming.isdisjoint(sequence.digests[num_known : num_known + 1]):
                self._put_back(sequence)
                continue
            if not self._reserve(sequence):
                self._put_back(sequence)
                break
            self._start(sequence)
            if sequence.handle is None and self.limits.caches:
                coming.update(sequence.digests[num_known:])
            admitted.append(sequence)
        return admitted

    def find(self, request: str, attempt: int) -> Sequence | None:
        """Return the sequence of that attempt, waiting or running."""
        return next((s for s in (*self.running, *self.waiting) if s.key == (request, attempt)), None)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence and let go of its own blocks; the leases behind the others are the caller's."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
            self._index_tail(sequence)
            self._vacate(sequence)
        self._drop_kept(sequence)

    def tail_digest(self, sequence: Sequence) -> bytes | None:
        """Return by what its partly filled block can be found, by the longest part of it; it is written no more."""
        end = sequence.num_stored if sequence.saves_kv else min(sequence.num_stored, len(sequence.prompt))
        full = end // self._block_tokens
        if sequence.is_lossy or full != sequence.num_indexed or full == len(sequence.blocks):
            return None
        return next((part.digest for part in self._parts(sequence, full, end)), None)

    def copy_out(self, sequence: Sequence) -> bool:
        """Replace what a running sequence borrows by copies of our own; False if there is no room for them."""
        borrowed = [i for i, block in enumerate(sequence.blocks) if block in sequence.borrowed]
        if sequence not in self.running or sequence.num_pruned or len(borrowed) > self.num_unreserved:
            return False
        for i, copy in zip(borrowed, self.pool.allocate(len(borrowed)), strict=True):
            self.arena.copy_block(sequence.blocks[i], copy)
            sequence.blocks[i] = copy
        sequence.num_indexed = 0  # the copies can be found, too
        self.strip(sequence)
        return True

    def strip(self, sequence: Sequence) -> None:
        """Count on nothing that is lent or kept any more; what is not cached by then is computed after admission."""
        self._extend_digests(sequence, (sequence.num_tokens - 1) // self._block_tokens)
        sequence.borrowed.clear()
        sequence.lent.clear()
        sequence.tail_block, sequence.num_pruned = None, 0
        self._drop_kept(sequence)

    def give_way(self) -> Sequence | None:
        """Choose who does without its leases when we are stalled, waiting ones first; the caller gives them back.

        Otherwise engines that lend to each other would wait for each other.
        """
        holding = [s for s in (*self.running, *self.waiting) if s.leases]
        if not self.is_stalled or not holding:
            return None
        if holding[-1] in self.running:
            self._preempt(holding[-1])
        self.strip(holding[-1])
        return holding[-1]

    @property
    def num_unreserved(self) -> int:
        """Blocks that are set aside for nobody."""
        return self.pool.num_available - self.num_reserved

    def blocks_lacking(self) -> int:
        """Return how many blocks more would let everyone run on and the next waiting sequence in."""
        needed = sum(map(self._lacks_block, self.running))
        if self.waiting and len(self.running) < self.limits.max_sequences:
            needed += self._blocks_needed(self._line()[0]) + len(self.running)
        return max(0, needed - self.num_unreserved)

    @property
    def is_stalled(self) -> bool:
        """Whether there are sequences and none of them has room for its next step, after `admit`."""
        return bool(self.running or self.waiting) and not any(map(self._has_room, self.running))

    # ---- One step --------

    def plan(self) -> Step | None:
        """Choose what to compute next; None when there is nothing, or nothing that has room."""
        self._make_room()
        runnable = [s for s in self.running if self._has_room(s)]
        portions = plan_step(
            [Work(s.num_pending, s.is_prompt, s.is_urgent) for s in runnable],
            token_budget=self.limits.token_budget,
            max_sequences=self.limits.max_sequences,
            prompts_first=self.limits.prompts_first,
        )
        return self._prepare(runnable, portions) if portions else None

    def run(self, step: Step) -> StepResult:
        """Compute a step.

        Raises:
            PDError: the model gave something that cannot be sampled from.
        """
        began = time.perf_counter()
        logits = self.model.forward(step.batch)
        computed = time.perf_counter()
        tokens = sample(logits, step.rows)
        ended = time.perf_counter()
        return StepResult(tokens, ended - began, self.model.attention_s, ended - computed)

    def commit(self, step: Step, result: StepResult) -> list[Outcome]:
        """Take a step's results in; finished sequences stay until the caller removes them."""
        for sequence, num_tokens in step.portions:
            if sequence.is_prompt:
                self.num_computed += num_tokens
            sequence.num_stored += num_tokens
        outcomes = []
        for sequence, sampled in zip(step.sampled, result.tokens, strict=True):
            sequence.tokens.append(sampled.token_id)
            outcomes.append(Outcome(sequence, sampled, self._finish(sequence)))
        for sequence, _ in step.portions:
            self._index_full_blocks(sequence)
        return outcomes

    # ---- Admission --------

    def _line(self) -> list[Sequence]:
        return sorted(self.waiting, key=lambda sequence: not sequence.is_urgent)

    def _find(self, sequence: Sequence) -> int:
        """Build the table of what can be read without computing it; return its number of blocks.

        Own blocks get a reference. At least one token is left to compute.
        """
        limit = (sequence.num_tokens - 1) // self._block_tokens
        if sequence.handle is None:
            self._extend_digests(sequence, limit)
        for i in range(limit):
            own = self._own_block(sequence, i) if sequence.kept or sequence.digests else None
            block = sequence.lent.get(i) if own is None else own
            if block is None:
                break
            if own is None:
                sequence.borrowed.add(block)
            else:
                self.pool.retain([block])
            sequence.blocks.append(block)
        return len(sequence.blocks)

    def _own_block(self, sequence: Sequence, i: int) -> int | None:
        """Return the block of ours that holds block `i` of the sequence."""
        if i in sequence.kept or i >= len(sequence.digests):
            return sequence.kept.get(i)
        return self.pool.cached(sequence.digests[i])

    def _blocks_needed(self, sequence: Sequence) -> int:
        """Return how many unreserved blocks a waiting sequence would take; those that are cached are among them."""
        num_ready = 0
        for i in range((sequence.num_tokens - 1) // self._block_tokens):
            own = self._own_block(sequence, i)
            if own is None and i not in sequence.lent:
                break
            num_ready += own is None or not self.pool.is_idle(own)
        return self.arena.layout.num_blocks(sequence.num_slots(sequence.num_tokens)) - num_ready

    def _reserve(self, sequence: Sequence) -> bool:
        """Set blocks aside, and leave one for the next step of each that runs."""
        needed = self.arena.layout.num_blocks(sequence.num_slots(sequence.num_tokens)) - len(sequence.blocks)
        if needed + len(self.running) > self.num_unreserved:
            return False
        sequence.num_reserved = needed
        self.num_reserved += needed
        return True

    def _start(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.num_admitted += 1
        num_full = sequence.num_indexed = len(sequence.blocks)
        sequence.num_stored = num_full * self._block_tokens + sequence.num_pruned
        self._copy_tail(sequence)
        if sequence.num_admitted == 1 and not sequence.tokens:
            sequence.num_cached = sequence.num_stored

    def _copy_tail(self, sequence: Sequence) -> None:
        """Go on in a copy of a partly filled block, if there is one that follows the full ones: only owners write."""
        full, tail = divmod(sequence.num_lent, self._block_tokens)
        if sequence.tail_block is not None and len(sequence.blocks) == full:
            self._grow(sequence, 1)
            self.arena.copy_block(sequence.tail_block, sequence.blocks[-1])
            sequence.num_stored += tail
        elif sequence.handle is None:
            self._copy_own_tail(sequence)

    def _copy_own_tail(self, sequence: Sequence) -> None:
        for part in self._parts(sequence, len(sequence.blocks), sequence.num_tokens - 1):
            block = self.pool.cached(part.digest)
            if block is None:
                continue
            self.pool.retain([block])  # or it might be what makes room for its copy
            if self.pool.num_available:
                self._grow(sequence, 1)
                self.arena.copy_block(block, sequence.blocks[-1])
                sequence.num_stored += part.num_tokens
            self.pool.free([block])
            return

    def _put_back(self, sequence: Sequence) -> None:
        self.pool.free(sequence.own_blocks)
        sequence.blocks = []
        sequence.borrowed.clear()

    def _drop_kept(self, sequence: Sequence) -> None:
        self.pool.free(list(sequence.kept.values()))
        sequence.kept.clear()

    def _vacate(self, sequence: Sequence) -> None:
        """Let go of the table and of what was set aside."""
        self._put_back(sequence)
        self.num_reserved -= sequence.num_reserved
        sequence.num_reserved = 0
        sequence.num_stored = 0

    # ---- Growth --------

    def _lacks_block(self, sequence: Sequence) -> bool:
        """Whether the next token of a decoding sequence needs a block that was not set aside."""
        is_full = sequence.num_slots(sequence.num_stored) == len(sequence.blocks) * self._block_tokens
        return not sequence.is_prompt and is_full and not sequence.num_reserved

    def _has_room(self, sequence: Sequence) -> bool:
        return not self._lacks_block(sequence) or self.num_unreserved > 0

    def _make_room(self) -> None:
        """Preempt, last admitted first, until every decoding sequence that is left can take its next step."""
        while len(self.running) > 1 and sum(map(self._lacks_block, self.running)) > self.num_unreserved:
            self._preempt(max(enumerate(self.running), key=lambda item: (not item[1].is_urgent, item[0]))[1])

    def _preempt(self, sequence: Sequence) -> None:
        self._index_full_blocks(sequence)
        self.running.remove(sequence)
        self._vacate(sequence)
        self.waiting.appendleft(sequence)
        self.num_preempted += 1

    def _grow(self, sequence: Sequence, count: int) -> None:
        sequence.blocks += self.pool.allocate(count)
        from_reserve = min(count, sequence.num_reserved)
        sequence.num_reserved -= from_reserve
        self.num_reserved -= from_reserve

    # ---- Steps --------

    def _prepare(self, runnable: list[Sequence], portions: list[Portion]) -> Step:
        ids: list[int] = []
        positions: list[int] = []
        spans: list[Span] = []
        chosen: list[tuple[Sequence, int]] = []
        sampled: list[Sequence] = []
        logit_rows: list[int] = []
        for portion in portions:
            sequence, start = runnable[portion.index], len(ids)
            stop = sequence.num_stored + portion.num_tokens
            self._grow(sequence, max(0, self.arena.layout.num_blocks(sequence.num_slots(stop)) - len(sequence.blocks)))
            ids += sequence.token_ids(sequence.num_stored, stop)
            positions += range(sequence.num_stored, stop)
            spans.append(Span(start, portion.num_tokens, sequence.num_slots(stop), tuple(sequence.blocks)))
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
        """Make our full blocks findable by what they hold; not after a lossy codec, which is in all that follows."""
        num_full = sequence.num_stored // self._block_tokens
        if not sequence.saves_kv:
            num_full = min(num_full, len(sequence.prompt) // self._block_tokens)
        if num_full <= sequence.num_indexed or sequence.is_lossy:
            return
        self._extend_digests(sequence, num_full)
        for i in range(sequence.num_indexed, num_full if self.limits.caches else 0):  # none of them is borrowed
            self.pool.insert(sequence.digests[i], sequence.blocks[i], self._parent(sequence, i))
        sequence.num_indexed = num_full

    def _index_tail(self, sequence: Sequence) -> None:
        digest, full = self.tail_digest(sequence), sequence.num_indexed
        if digest is not None and self.limits.caches:
            self.pool.insert(digest, sequence.blocks[full], self._parent(sequence, full))

    def _parts(self, sequence: Sequence, full: int, end: int) -> list[Part]:
        """Return the parts of the block after the first `full`, as far as tokens are known up to `end`."""
        start, size = full * self._block_tokens, self._block_tokens
        tokens = sequence.token_ids(start, min(start + size, end))
        return parts(tokens, size, self.limits.prefix_key, self._parent(sequence, full))

    def _parent(self, sequence: Sequence, num_blocks: int) -> bytes | None:
        """Return the digest of the last of the first `num_blocks` blocks."""
        self._extend_digests(sequence, num_blocks)
        return sequence.digests[num_blocks - 1] if num_blocks else None

    def _extend_digests(self, sequence: Sequence, num_blocks: int) -> None:
        """Know the digests of the first `num_blocks` blocks at least."""
        known = len(sequence.digests)
        if known < num_blocks:
            tokens = sequence.token_ids(known * self._block_tokens, num_blocks * self._block_tokens)
            parent = sequence.digests[-1] if known else None
            sequence.digests += chain(tokens, self._block_tokens, self.limits.prefix_key, parent)

    def _finish(self, sequence: Sequence) -> FinishReason | None:
        if sequence.tokens[-1] in self.limits.eos_ids and not sequence.sampling.ignore_eos:
            return "stop"
        if len(sequence.tokens) >= sequence.sampling.max_tokens:
            return "length"
        return None
