"""An engine over a model that keeps its tokens in the KV blocks: a wrong table or a lost byte changes the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from pdactors.engine.batch import StepBatch
from pdactors.engine.limits import EngineLimits
from pdactors.engine.runner import Engine
from pdactors.engine.sequence import Sequence
from pdactors.engine.step import Outcome, Step
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.messages import FinishReason, KVHandle, Lease, Sampling, Segment

BLOCK = 4
VOCAB = 31
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_tokens=BLOCK, dtype="float32")
OWN = range(32)
LENT = range(32, 48)  # another engine's blocks
LESSOR = "n0/prefill-0"
_LOGITS = torch.arange(VOCAB, 0.0, -1.0)  # when token 0 is the favourite


def favourite(context: list[int]) -> int:
    """Return the token that the model likes best after `context`; every token of it counts. The next id is second."""
    value = 7
    for token in context:
        value = (value * 33 + token + 1) % 1_000_003
    return value % VOCAB


class Scribe:
    """A model that writes each token's id and position into its KV slot and reads its whole context from there."""

    attention_s = 0.0

    def __init__(self, arena: Arena) -> None:
        # [blocks, layers, 2, kv_heads, block_tokens, head_dim]; every layer holds the same
        self.kv = arena.payload().view(np.float32).reshape(arena.num_blocks, *LAYOUT.shape[:3], BLOCK, -1)
        self.steps: list[list[int]] = []  # tokens computed for each span of each step
        self.written: set[int] = set()  # blocks

    def forward(self, batch: StepBatch) -> torch.Tensor:
        ends = {}
        row = 0
        for span in batch.spans:
            assert span.start == row, "spans lie side by side"
            row += span.num_tokens
            first = span.context_len - span.num_tokens
            left_out = batch.positions[span.start] - first  # of a prompt that was pruned
            assert list(batch.positions[span.start : row]) == list(range(first + left_out, span.context_len + left_out))
            assert len(set(span.blocks)) == len(span.blocks)
            self.write(span.blocks, first, batch.input_ids[span.start : row], left_out)
            ends[row - 1] = self._read(span.blocks, span.context_len, left_out)
        assert row == len(batch.input_ids) == len(batch.positions)
        assert row, "a step computes something"
        self.steps.append([span.num_tokens for span in batch.spans])
        logits = [_LOGITS.roll(favourite(ends[wanted])) for wanted in batch.logit_rows]
        return torch.stack(logits) if logits else torch.zeros(0, VOCAB)

    def write(self, blocks: object, first: int, tokens: object, left_out: int = 0) -> None:
        """Store `tokens` from slot `first` on, whose position is so many tokens later as were left out."""
        for slot, token in enumerate(tokens, first):
            block = blocks[slot // BLOCK]
            self.kv[block, :, 0, 0, slot % BLOCK] = token
            self.kv[block, :, 1, 0, slot % BLOCK] = slot + left_out
            self.written.add(block)

    def _read(self, blocks: object, count: int, left_out: int) -> list[int]:
        found = self.kv[list(blocks)]  # [blocks, layers, 2, 1, block_tokens, 2]
        values = found[:, :, :, 0].transpose(1, 2, 0, 3, 4).reshape(2, 2, -1, 2)[:, :, :count]
        shift = values[:, 1] - np.arange(count)[None, :, None]
        assert np.isin(shift, [0, left_out]).all(), "a slot holds another position"
        assert (np.diff(shift, axis=1) >= 0).all(), "a slot holds another position"
        assert (values[0] == values[1]).all(), "a layer was left out"
        return [int(token) for token in values[0, 0, :, 0]]


@dataclass
class Rig:
    """An engine and what its sequences have got."""

    arena: Arena
    pool: BlockPool
    model: Scribe
    engine: Engine
    tokens: dict[str, list[int]] = field(default_factory=dict)
    finishes: dict[str, FinishReason] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)

    @staticmethod
    def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
        """Return the beginning of an endless prompt; each seed has its own."""
        return tuple(int(token) for token in np.random.default_rng([seed]).integers(0, VOCAB, 200)[:length])

    @staticmethod
    def answer(prompt: tuple[int, ...], count: int, *, banned: frozenset[int] = frozenset(), ban: int = 0) -> list[int]:
        """Return `count` greedy tokens; those in `banned` are not chosen among the first `ban`."""
        tokens: list[int] = []
        while len(tokens) < count:
            token = favourite([*prompt, *tokens])
            while len(tokens) < ban and token in banned:
                token = (token + 1) % VOCAB
            tokens.append(token)
        return tokens

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int = 4, **options: object) -> Sequence:
        """Queue a sequence.

        Options are those of Sampling, `is_urgent`, `saves_kv`; `lent` and `kept`, block index -> block; `num_lent`,
        where what is lent ends; and `adopted`: the first token is there, and `lent` and `kept` hold what a prefill
        left, its tail included.
        """
        fields = {key: options.pop(key) for key in ("is_urgent", "saves_kv", "lent", "kept") if key in options}
        is_adopted = bool(options.pop("adopted", False))
        num_lent = options.pop("num_lent", 0)
        sequence = Sequence(name, 1, prompt, Sampling(max_tokens=max_tokens, **options), **fields)
        self.pool.retain(list(sequence.kept.values()))
        sequence.set_tail_apart(num_lent, BLOCK)
        if is_adopted:
            segment = Segment(LESSOR, Lease(0, 1), 0, tuple(sequence.lent.values()))
            sequence.handle = KVHandle("n0", LESSOR, LAYOUT.fingerprint, (segment,), len(prompt))
            sequence.tokens = self.answer(prompt, 1)
            sequence.set_tail_apart(len(prompt), BLOCK)
        self.tokens[name] = list(sequence.tokens)
        self.engine.submit(sequence)
        return sequence

    def adopt(self, name: str, prompt: tuple[int, ...], max_tokens: int = 4, **options: object) -> Sequence:
        """Queue a sequence whose whole KV is lent."""
        return self.submit(name, prompt, max_tokens, adopted=True, lent=dict(enumerate(self.lend(prompt))), **options)

    def plan(self) -> Step | None:
        """Admit and plan, and take note of who was preempted for it."""
        self.engine.admit()
        before = list(self.engine.running)
        step = self.engine.plan()
        self.preempted += [s.request for s in reversed(before) if s in self.engine.waiting]
        return step

    def step(self) -> list[Outcome]:
        """Compute one step, and remove what finished; no outcomes when there was nothing to do."""
        step = self.plan()
        if step is None:
            self.check()
            return []
        outcomes = self.engine.commit(step, self.engine.run(step))
        for outcome in outcomes:
            name = outcome.sequence.request
            self.tokens[name].append(outcome.sampled.token_id)
            if outcome.finish is not None:
                self.finishes[name] = outcome.finish
                self.engine.remove(outcome.sequence)
        self.check()
        return outcomes

    def drain(self, limit: int = 400) -> None:
        """Step until nothing runs or waits."""
        while self.engine.running or self.engine.waiting:
            limit -= 1
            assert limit, f"{len(self.engine.running)} running, {len(self.engine.waiting)} waiting for ever"
            self.step()

    def check(self) -> None:
        engine = self.engine
        self.pool.check()
        assert engine.num_reserved == sum(s.num_reserved for s in engine.running)
        assert engine.num_unreserved >= 0
        assert all(s.num_reserved >= 0 for s in engine.running)
        assert not any(s.blocks or s.borrowed or s.num_reserved for s in engine.waiting)
        assert all(map(self.pool.owns, self.model.written)), "a block of somebody else was written"

    def is_empty(self) -> bool:
        """Whether every block is free or cached and nothing is reserved."""
        account = self.pool.account()
        assert account.free + account.cached + account.used + account.leased_out == account.total
        return not (account.used or account.leased_out or self.engine.num_reserved)

    def names(self) -> list[str]:
        """Return who runs, in order of admission."""
        return [s.request for s in self.engine.running]

    def lend(self, tokens: tuple[int, ...], first_block: int = 0) -> tuple[int, ...]:
        """Put KV of `tokens` into blocks of somebody else, from `first_block` of them on; return those blocks."""
        table = tuple(LENT[first_block : first_block + LAYOUT.num_blocks(len(tokens))])
        self.model.kv[list(table)] = -1
        written = set(self.model.written)
        self.model.write(table, 0, tokens)
        self.model.written = written
        return table

    def keep(self, tokens: tuple[int, ...]) -> list[int]:
        """Put KV of `tokens` into blocks of ours that the test holds; they are in no cache."""
        blocks = self.pool.allocate(LAYOUT.num_blocks(len(tokens)))
        self.model.write(blocks, 0, tokens)
        return blocks


def build(arena: Arena, own: range, limits: EngineLimits) -> Rig:
    """Return an engine that owns some blocks of an arena."""
    pool = BlockPool()
    pool.add_extent(own)
    model = Scribe(arena)
    return Rig(arena, pool, model, Engine(model, arena, pool, limits))


@pytest.fixture
def build_rig() -> Callable[[Arena, range, EngineLimits], Rig]:
    return build


@pytest.fixture
def make_rig() -> Iterator[Callable[..., Rig]]:
    """Make engines: `make_rig(num_blocks, **limits)`."""
    with ExitStack() as stack:

        def make(
            num_blocks: int = 16,
            *,
            max_sequences: int = 4,
            token_budget: int = 8,
            eos_ids: frozenset[int] = frozenset(),
        ) -> Rig:
            size = len(OWN) + len(LENT)
            arena = Arena.create(LAYOUT, size, extent_blocks=8, num_slots=2, leases_per_slot=1, max_lease_blocks=8)
            stack.enter_context(arena)
            return build(arena, OWN[:num_blocks], EngineLimits(max_sequences, token_budget, eos_ids, prefix_key=b"key"))

        yield make


@pytest.fixture
def rig(make_rig: Callable[..., Rig]) -> Iterator[Rig]:
    rig = make_rig()
    yield rig
    rig.check()


@pytest.fixture
def copies(monkeypatch, rig):
    """Take note of what is copied: source and target."""
    noted, copy_block = [], rig.arena.copy_block

    def noting(src, dst):
        noted.append((src, dst))
        copy_block(src, dst)

    monkeypatch.setattr(rig.arena, "copy_block", noting)
    return noted
