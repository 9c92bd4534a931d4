"""`Engine` over a model that keeps its tokens in the KV blocks: a wrong table or a lost byte changes the answer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdactors.engine.paged import StepBatch
from pdactors.engine.runner import Engine, EngineLimits, Outcome, Step
from pdactors.engine.sequence import Sequence
from pdactors.errors import PDError
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.messages import FinishReason, KVHandle, Lease, Sampling

BLOCK = 4
VOCAB = 31
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_tokens=BLOCK, dtype="float32")
OWN = range(32)
LENT = range(32, 48)  # another engine's blocks


def favourite(context: list[int]) -> int:
    """Return the token that the model likes best after `context`; every token of it counts. The next id is second."""
    value = 7
    for token in context:
        value = (value * 33 + token + 1) % 1_000_003
    return value % VOCAB


def answer(prompt: tuple[int, ...], count: int, *, banned: frozenset[int] = frozenset(), ban: int = 0) -> list[int]:
    """Return `count` greedy tokens; those in `banned` are not chosen among the first `ban`."""
    tokens: list[int] = []
    while len(tokens) < count:
        token = favourite([*prompt, *tokens])
        while len(tokens) < ban and token in banned:
            token = (token + 1) % VOCAB
        tokens.append(token)
    return tokens


class Scribe:
    """A model that writes each token's id and position into its KV slot and reads its whole context from there."""

    def __init__(self, arena: Arena) -> None:
        # [blocks, layers, 2, kv_heads, block_tokens, head_dim]; every layer holds the same
        self.kv = arena.payload().view(np.float32).reshape(arena.num_blocks, *LAYOUT.shape)
        self.steps: list[list[int]] = []  # tokens computed for each span of each step
        self.written: set[int] = set()  # blocks

    def forward(self, batch: StepBatch) -> torch.Tensor:
        ends = {}
        row = 0
        for span in batch.spans:
            assert span.start == row, "spans lie side by side"
            row += span.num_tokens
            first = span.context_len - span.num_tokens
            assert list(batch.positions[span.start : row]) == list(range(first, span.context_len))
            assert len(set(span.blocks)) == len(span.blocks)
            for position, token in zip(range(first, span.context_len), batch.input_ids[span.start : row], strict=True):
                self._write(span.blocks[position // BLOCK], position, token)
            ends[row - 1] = self._read(span.blocks, span.context_len)
        assert row == len(batch.input_ids) == len(batch.positions)
        self.steps.append([span.num_tokens for span in batch.spans])
        logits = torch.zeros(len(batch.logit_rows), VOCAB)
        for i, wanted in enumerate(batch.logit_rows):
            best = favourite(ends[wanted])
            for rank in range(VOCAB):
                logits[i, (best + rank) % VOCAB] = VOCAB - rank
        return logits

    def _write(self, block: int, position: int, token: int) -> None:
        self.kv[block, :, 0, 0, position % BLOCK] = token
        self.kv[block, :, 1, 0, position % BLOCK] = position
        self.written.add(block)

    def _read(self, blocks: object, count: int) -> list[int]:
        found = self.kv[list(blocks)]  # [blocks, layers, 2, 1, block_tokens, 2]
        values = found[:, :, :, 0].transpose(1, 2, 0, 3, 4).reshape(2, 2, -1, 2)[:, :, :count]
        assert (values[:, 1] == np.arange(count)[None, :, None]).all(), "a slot holds another position"
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

    def submit(self, name: str, prompt: tuple[int, ...], max_tokens: int = 4, **options: object) -> Sequence:
        """Queue a sequence; options of Sampling, `is_urgent`, and `lent`: the blocks that hold its prompt's KV."""
        is_urgent, lent = bool(options.pop("is_urgent", True)), options.pop("lent", None)
        sequence = Sequence(name, 1, prompt, Sampling(max_tokens=max_tokens, **options), is_urgent=is_urgent)
        if lent is not None:
            sequence.handle = KVHandle("n0", "n0/prefill-0", LAYOUT.fingerprint, lent, len(prompt), Lease(0, 1))
            sequence.tokens = answer(prompt, 1)
        self.tokens[name] = list(sequence.tokens)
        self.engine.submit(sequence)
        return sequence

    def step(self) -> list[Outcome]:
        """Admit, compute one step, and remove what finished; no outcomes when there was nothing to do."""
        self.engine.admit()
        step = self.engine.plan()
        return self.compute(step) if step else []

    def compute(self, step: Step) -> list[Outcome]:
        outcomes = self.engine.commit(step, self.engine.run(step))
        for outcome in outcomes:
            name = outcome.sequence.request
            self.tokens[name].append(outcome.sampled.token_id)
            if outcome.finish is not None:
                self.finishes[name] = outcome.finish
                self.engine.remove(outcome.sequence)
        self.check()
        return outcomes

    def drain(self, limit: int = 300) -> None:
        """Step until nothing runs or waits."""
        while self.engine.running or self.engine.waiting:
            limit -= 1
            assert limit, f"{len(self.engine.running)} running, {len(self.engine.waiting)} waiting for ever"
            self.step()

    def check(self) -> None:
        self.pool.check()
        assert self.engine.num_reserved == sum(s.num_reserved for s in self.engine.running)
        assert self.engine.num_unreserved >= 0
        assert all(s.num_reserved >= 0 for s in self.engine.running)
        assert self.model.written <= set(OWN), "a block of somebody else was written"

    def is_empty(self) -> bool:
        """Whether every block is free or cached and nothing is reserved."""
        account = self.pool.account()
        assert account.free + account.cached + account.used + account.leased_out == account.total
        return not (account.used or account.leased_out or self.engine.num_reserved)

    def lend(self, prompt: tuple[int, ...], blocks: range = LENT) -> tuple[int, ...]:
        """Put a prompt's KV into blocks of somebody else, what lies behind it included; return those blocks."""
        table = tuple(blocks[: LAYOUT.num_blocks(len(prompt))])
        self.model.kv[list(table)] = -1
        for position, token in enumerate(prompt):
            self.model.kv[table[position // BLOCK], :, 0, 0, position % BLOCK] = token
            self.model.kv[table[position // BLOCK], :, 1, 0, position % BLOCK] = position
        return table


def make_rig(
    num_blocks: int = 16,
    *,
    max_sequences: int = 4,
    token_budget: int = 8,
    eos_ids: frozenset[int] = frozenset(),
    prompt_only: bool = False,
) -> Rig:
    arena = Arena.create(
        LAYOUT, len(OWN) + len(LENT), extent_blocks=8, num_slots=2, leases_per_slot=1, max_lease_blocks=8
    )
    pool = BlockPool()
    pool.add_extent(OWN[:num_blocks])
    model = Scribe(arena)
    limits = EngineLimits(max_sequences, token_budget, eos_ids, prefix_key=b"key", prompt_only=prompt_only)
    return Rig(arena, pool, model, Engine(model, arena, pool, limits))


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = make_rig()
    yield rig
    rig.check()


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    return tuple(int(token) for token in np.random.default_rng([seed, length]).integers(0, VOCAB, length))


# ---- Answers --------


def test_a_sequence_continues_as_the_model_says(rig):
    rig.submit("a", prompt_of(10), 6)
    rig.drain()
    assert rig.tokens["a"] == answer(prompt_of(10), 6)
    assert rig.finishes == {"a": "length"}
    assert rig.is_empty()


def test_sequences_that_share_steps_do_not_disturb_each_other(rig):
    prompts = {name: prompt_of(length, seed) for seed, (name, length) in enumerate({"a": 3, "b": 9, "c": 4}.items())}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 5)
    rig.drain()
    assert rig.tokens == {name: answer(prompt, 5) for name, prompt in prompts.items()}
    assert max(map(len, rig.model.steps)) == 3


def test_a_prompt_is_computed_in_chunks_and_gives_a_token_after_the_last(rig):
    rig.submit("a", prompt_of(20), 1)
    assert [len(rig.step()) for _ in range(3)] == [0, 0, 1]
    assert rig.model.steps == [[8], [8], [4]]


def test_decoding_goes_on_beside_the_chunks_of_a_prompt(rig):
    rig.submit("a", prompt_of(4), 6)
    rig.step()
    rig.submit("b", prompt_of(20), 1)
    for _ in range(3):
        assert "a" in [outcome.sequence.request for outcome in rig.step()]
    assert rig.model.steps[1:] == [[1, 7], [1, 7], [1, 6]]
    assert rig.tokens["b"] == answer(prompt_of(20), 1)


def test_a_step_without_work_is_none(rig):
    assert rig.engine.admit() == []
    assert rig.engine.plan() is None


def test_logits_that_are_not_finite_fail_the_step_and_change_nothing(rig, monkeypatch):
    sequence = rig.submit("a", prompt_of(4), 2)
    rig.engine.admit()
    step = rig.engine.plan()
    monkeypatch.setattr(rig.model, "forward", lambda batch: torch.full((1, VOCAB), float("nan")))
    with pytest.raises(PDError, match="not finite"):
        rig.engine.run(step)
    rig.engine.remove(sequence)
    assert rig.is_empty()


def test_step_times_tell_of_the_steps_that_ran(rig):
    assert rig.engine.step_times().mean == 0.0
    rig.submit("a", prompt_of(20), 1)
    rig.drain()
    times = rig.engine.step_times()
    assert 0 < times.p50 <= times.p99
    assert times.mean > 0


# ---- Endings --------


def test_a_sequence_stops_at_the_end_token():
    tokens = answer(prompt_of(6), 5)
    rig = make_rig(eos_ids=frozenset({tokens[2]}))
    rig.submit("a", prompt_of(6), 5)
    rig.drain()
    assert rig.tokens["a"] == tokens[: tokens.index(tokens[2]) + 1]
    assert rig.finishes == {"a": "stop"}
    assert rig.is_empty()


def test_an_ignored_end_token_is_a_token_like_any_other():
    tokens = answer(prompt_of(6), 5)
    rig = make_rig(eos_ids=frozenset({tokens[2]}))
    rig.submit("a", prompt_of(6), 5, ignore_eos=True)
    rig.drain()
    assert (rig.tokens["a"], rig.finishes["a"]) == (tokens, "length")


def test_the_end_token_is_not_chosen_before_min_tokens():
    tokens = answer(prompt_of(6), 5)
    eos = frozenset({tokens[0], tokens[1]})
    rig = make_rig(eos_ids=eos)
    rig.submit("a", prompt_of(6), 8, min_tokens=3)
    rig.drain()
    expected = answer(prompt_of(6), 8, banned=eos, ban=3)
    assert not eos & set(expected[:3])
    assert rig.tokens["a"] == expected[: len(rig.tokens["a"])]
    assert len(rig.tokens["a"]) >= 3


def test_an_end_token_that_comes_last_is_a_stop():
    tokens = answer(prompt_of(6), 1)
    rig = make_rig(eos_ids=frozenset(tokens))
    rig.submit("a", prompt_of(6), 1)
    rig.drain()
    assert rig.finishes == {"a": "stop"}


@pytest.mark.parametrize("prompt_only", [True, False])
def test_one_token_ends_an_answer_that_wants_one(prompt_only):
    rig = make_rig(prompt_only=prompt_only)
    rig.submit("a", prompt_of(8), 1)
    rig.drain()
    assert (rig.tokens["a"], rig.finishes["a"]) == (answer(prompt_of(8), 1), "length")
    assert rig.is_empty()


# ---- Room --------


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "num_blocks"), [(4, 1, 1), (4, 2, 2), (4, 5, 2), (4, 6, 3), (5, 1, 2), (1, 1, 1)]
)
def test_the_last_tokens_kv_needs_no_room(prompt_tokens, max_tokens, num_blocks):
    tight = make_rig(num_blocks)
    tight.submit("a", prompt_of(prompt_tokens), max_tokens)
    tight.drain()
    assert len(tight.tokens["a"]) == max_tokens
    short = make_rig(num_blocks - 1) if num_blocks > 1 else None
    if short is not None:
        short.submit("a", prompt_of(prompt_tokens), max_tokens)
        assert short.engine.admit() == []
        assert short.engine.blocks_lacking() == 1


def test_a_prefill_engine_needs_room_for_the_prompt_only():
    rig = make_rig(2, prompt_only=True)
    rig.submit("a", prompt_of(8), 1000)
    assert len(rig.engine.admit()) == 1


def test_what_a_running_sequence_may_still_need_is_not_given_away():
    rig = make_rig(6)
    rig.submit("a", prompt_of(4), 13)  # 4 blocks in the end, 1 at first
    rig.submit("b", prompt_of(4, 1), 9)  # 3 blocks
    rig.step()
    assert [s.request for s in rig.engine.running] == ["a"]
    assert rig.pool.num_free == 5
    assert rig.engine.num_unreserved == 2
    assert rig.engine.blocks_lacking() == 1
    rig.drain()
    assert {name: len(tokens) for name, tokens in rig.tokens.items()} == {"a": 13, "b": 9}


def test_new_memory_lets_a_waiting_sequence_in():
    rig = make_rig(2)
    rig.submit("a", prompt_of(12), 1)
    assert rig.engine.admit() == []
    rig.pool.add_extent(OWN[2:4])
    assert len(rig.engine.admit()) == 1


def test_no_more_sequences_run_than_allowed():
    rig = make_rig(max_sequences=2)
    for name in "abc":
        rig.submit(name, prompt_of(4), 3)
    rig.engine.admit()
    assert [s.request for s in rig.engine.running] == ["a", "b"]
    assert rig.engine.blocks_lacking() == 0  # it is not memory that is lacking
    rig.drain()
    assert rig.tokens["c"] == answer(prompt_of(4), 3)


def test_interactive_sequences_go_before_batch_ones_in_order():
    rig = make_rig(max_sequences=3)
    for name in ("B", "a", "C", "b"):
        rig.submit(name, prompt_of(4), 2, is_urgent=name.islower())
    assert [s.request for s in rig.engine.admit()] == ["a", "b", "B"]


def test_memory_is_lacking_for_whoever_is_next_in_line():
    rig = make_rig(4)
    rig.submit("small", prompt_of(4), 1, is_urgent=False)
    rig.submit("big", prompt_of(24), 1)
    assert rig.engine.admit() == []
    assert rig.engine.blocks_lacking() == 2


# ---- Prefixes --------


def test_a_prompt_with_a_known_beginning_computes_only_its_end(rig):
    first, second = prompt_of(14), (*prompt_of(14)[:9], *prompt_of(6, 1))
    rig.submit("a", first, 3)
    rig.drain()
    rig.model.steps.clear()
    sequence = rig.submit("b", second, 3)
    rig.drain()
    assert sequence.num_cached == 8
    assert rig.model.steps[0] == [len(second) - 8]
    assert rig.tokens["b"] == answer(second, 3)
    assert rig.is_empty()


def test_at_least_one_token_of_a_known_prompt_is_computed(rig):
    for name, cached in (("a", 0), ("b", 4)):
        sequence = rig.submit(name, prompt_of(8), 2)
        rig.drain()
        assert sequence.num_cached == cached
        assert rig.tokens[name] == answer(prompt_of(8), 2)


def test_two_sequences_read_the_same_blocks_at_once(rig):
    rig.submit("a", prompt_of(13), 8)
    rig.step(), rig.step()
    sequence = rig.submit("b", prompt_of(13), 8)
    rig.step()
    assert sequence.num_cached == 12
    assert sequence.blocks[:3] == rig.engine.find("a", 1).blocks[:3]
    rig.drain()
    assert rig.tokens["a"] == rig.tokens["b"] == answer(prompt_of(13), 8)
    assert rig.is_empty()


def test_cached_blocks_give_way_to_new_sequences():
    rig = make_rig(4)
    for seed in range(4):
        rig.submit(str(seed), prompt_of(14, seed), 3)
        rig.drain()
        assert rig.tokens[str(seed)] == answer(prompt_of(14, seed), 3)
    assert rig.pool.account().cached == 3


def test_a_sequence_that_finds_no_room_lets_go_of_its_prefix():
    rig = make_rig(4)
    rig.submit("a", prompt_of(9), 1)
    rig.drain()
    rig.submit("b", (*prompt_of(9)[:8], *prompt_of(12, 1)), 1)
    assert rig.engine.admit() == []
    assert rig.engine.blocks_lacking() > 0
    assert rig.is_empty()
    assert rig.pool.account().cached == 2


# ---- Adoption --------


@pytest.mark.parametrize(("length", "num_own"), [(10, 1), (11, 1), (12, 0), (3, 1), (4, 0)])
def test_adoption_takes_a_block_for_the_tail_and_borrows_the_rest(rig, length, num_own):
    prompt = prompt_of(length)
    lent = rig.lend(prompt)
    sequence = rig.submit("a", prompt, 8, lent=lent)
    assert rig.engine.admit() == [sequence]
    full = length // BLOCK
    assert sequence.blocks[:full] == list(lent[:full])
    assert len(sequence.own_blocks) == num_own
    assert rig.pool.account().used == num_own
    assert set(sequence.own_blocks) <= set(OWN)
    assert sequence.num_stored == length
    assert sequence.num_pending == 1


def test_adoption_copies_the_tokens_of_the_tail_and_nothing_else(rig):
    prompt = prompt_of(10)
    lent = rig.lend(prompt)
    rig.model.kv[:16] = -7
    sequence = rig.submit("a", prompt, 8, lent=lent)
    rig.engine.admit()
    (own,) = sequence.own_blocks
    assert (rig.model.kv[own][..., :2, :] == rig.model.kv[lent[2]][..., :2, :]).all()
    assert (rig.model.kv[own][..., 2:, :] == -7).all()
    assert (rig.model.kv[[block for block in range(16) if block != own]] == -7).all()


@pytest.mark.parametrize("length", [1, 4, 7, 12, 14])
def test_an_adopted_sequence_goes_on_and_leaves_what_is_lent_untouched(rig, length):
    prompt = prompt_of(length)
    lent = rig.lend(prompt)
    before = rig.arena.payload()[LENT.start :].copy()
    rig.submit("a", prompt, 9, lent=lent)
    rig.drain()
    assert rig.tokens["a"] == answer(prompt, 9)
    assert (rig.arena.payload()[LENT.start :] == before).all()
    assert rig.is_empty()
    assert rig.pool.num_free == 16  # nothing of it is cached here


def test_two_sequences_may_adopt_the_same_blocks(rig):
    prompt = prompt_of(10)
    lent = rig.lend(prompt)
    for name in "ab":
        rig.submit(name, prompt, 6, lent=lent)
    rig.drain()
    assert rig.tokens["a"] == rig.tokens["b"] == answer(prompt, 6)


def test_borrowed_blocks_need_no_room():
    rig = make_rig(2)
    prompt = prompt_of(30)
    rig.submit("a", prompt, 7, lent=rig.lend(prompt))  # the tail's 2 tokens and 6 more: 2 blocks
    assert len(rig.engine.admit()) == 1
    rig.drain()
    assert rig.tokens["a"] == answer(prompt, 7)


def test_an_adopted_sequence_waits_for_room_without_a_block():
    rig = make_rig(2)
    prompt = prompt_of(6)
    sequence = rig.submit("a", prompt, 20, lent=rig.lend(prompt))
    assert rig.engine.admit() == []
    assert (sequence.blocks, rig.engine.num_reserved, rig.pool.num_free) == ([], 0, 2)


# ---- Removal --------


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("is_adopted", [True, False])
def test_removal_returns_every_block_at_every_stage(rig, steps, is_adopted):
    prompt = prompt_of(18)
    sequence = rig.submit("a", prompt, 12, lent=rig.lend(prompt) if is_adopted else None)
    other = rig.submit("b", prompt_of(5), 12)
    for _ in range(steps):
        rig.step()
    assert rig.engine.find("a", 1) is sequence
    rig.engine.remove(sequence)
    rig.check()
    assert rig.engine.find("a", 1) is None
    rig.drain()
    assert rig.tokens["b"] == answer(prompt_of(5), 12)
    assert other.request == "b"
    assert rig.is_empty()


def test_a_removed_sequence_is_in_no_further_step(rig):
    rig.submit("a", prompt_of(20), 3)
    rig.step()
    rig.engine.remove(rig.engine.find("a", 1))
    assert rig.step() == []
    assert rig.is_empty()


def test_a_sequence_is_found_by_request_and_attempt(rig):
    sequence = rig.submit("a", prompt_of(4))
    assert rig.engine.find("a", 1) is sequence
    assert rig.engine.find("a", 2) is None
    assert rig.engine.find("b", 1) is None


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("submit"), st.integers(1, 26), st.integers(1, 12), st.integers(0, 2)),
        st.tuples(st.just("adopt"), st.integers(1, 26), st.integers(2, 12), st.integers(0, 2)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("remove"), st.integers(0, 7)),
    ),
    max_size=30,
)


@settings(max_examples=60, deadline=None)
@given(operations=OPERATIONS, num_blocks=st.integers(10, 16), token_budget=st.integers(3, 12))
def test_whatever_happens_answers_are_right_and_every_block_comes_back(operations, num_blocks, token_budget):
    rig = make_rig(num_blocks, max_sequences=3, token_budget=token_budget)
    wanted: dict[str, list[int]] = {}
    tables = {seed: LENT[seed * 5 : seed * 5 + 5] for seed in range(3)}
    for number, (operation, *values) in enumerate(operations):
        name = str(number)
        if operation in ("submit", "adopt"):
            length, count, seed = values
            length = min(length, 5 * BLOCK) if operation == "adopt" else length
            prompt = prompt_of(26, seed)[:length]
            lent = rig.lend(prompt_of(26, seed)[:20], tables[seed]) if operation == "adopt" else None
            rig.submit(name, prompt, count, lent=lent[: LAYOUT.num_blocks(length)] if lent else None)
            wanted[name] = answer(prompt, count)
        elif operation == "step":
            for _ in range(values[0]):
                rig.step()
        else:
            alive = [*rig.engine.running, *rig.engine.waiting]
            if alive:
                victim = alive[values[0] % len(alive)]
                rig.engine.remove(victim)
                del wanted[victim.request]
        rig.check()
    rig.drain()
    assert {name: rig.tokens[name] for name in wanted} == wanted
    assert all(rig.finishes[name] == "length" for name in wanted)
    assert rig.is_empty()
    rig.arena.close()
