"""Answers, endings, room, prefixes and removal of one engine; `conftest.py` has the model that checks its tables."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from pdactors.engine import runner
from pdactors.errors import PDError

BLOCK = 4
VOCAB = 31
OWN, LENT = range(32), range(32, 48)


# ---- Answers --------


def test_a_sequence_continues_as_the_model_says(rig):
    rig.submit("a", rig.prompt(10), 6)
    rig.drain()
    assert rig.tokens["a"] == rig.answer(rig.prompt(10), 6)
    assert rig.finishes == {"a": "length"}
    assert rig.is_empty()


def test_sequences_that_share_steps_do_not_disturb_each_other(rig):
    prompts = {"a": rig.prompt(3, 0), "b": rig.prompt(9, 1), "c": rig.prompt(4, 2)}
    for name, prompt in prompts.items():
        rig.submit(name, prompt, 5)
    rig.drain()
    assert rig.tokens == {name: rig.answer(prompt, 5) for name, prompt in prompts.items()}
    assert max(map(len, rig.model.steps)) == 3


def test_a_prompt_is_computed_in_chunks_and_gives_a_token_after_the_last(rig):
    rig.submit("a", rig.prompt(20), 1)
    assert [len(rig.step()) for _ in range(3)] == [0, 0, 1]
    assert rig.model.steps == [[8], [8], [4]]


def test_decoding_goes_on_beside_the_chunks_of_a_prompt(rig):
    rig.submit("a", rig.prompt(4), 6)
    rig.step()
    rig.submit("b", rig.prompt(20, 1), 1)
    for _ in range(3):
        assert "a" in [outcome.sequence.request for outcome in rig.step()]
    assert rig.model.steps[1:] == [[1, 7], [1, 7], [1, 6]]
    assert rig.tokens["b"] == rig.answer(rig.prompt(20, 1), 1)


def test_a_step_without_work_is_none(rig):
    assert rig.engine.admit() == []
    assert rig.engine.plan() is None


def test_logits_that_are_not_finite_fail_the_step_and_change_nothing(rig, monkeypatch):
    sequence = rig.submit("a", rig.prompt(4), 2)
    rig.engine.admit()
    step = rig.engine.plan()
    monkeypatch.setattr(rig.model, "forward", lambda batch: torch.full((1, VOCAB), float("nan")))
    with pytest.raises(PDError, match="not finite"):
        rig.engine.run(step)
    rig.engine.remove(sequence)
    assert rig.is_empty()


def test_a_result_says_where_the_time_went(rig, monkeypatch):
    ticks = iter((10.0, 10.75, 11.0))
    monkeypatch.setattr(runner, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    rig.model.attention_s = 0.5
    rig.submit("a", rig.prompt(4), 2)
    result = rig.engine.run(rig.plan())
    assert (result.duration_s, result.attention_s, result.sampling_s) == (1.0, 0.5, 0.25)


def test_a_step_knows_what_it_reads_and_whether_it_only_decodes(rig):
    rig.submit("a", rig.prompt(11), 4)
    sizes = []
    for _ in range(3):
        step = rig.plan()
        sizes.append((step.num_kv_tokens, step.is_decode))
        rig.engine.commit(step, rig.engine.run(step))
    assert sizes == [(8, False), (11, False), (12, True)]


def test_only_tokens_of_prompts_count_as_computed(rig):
    rig.submit("a", rig.prompt(11), 6)
    rig.adopt("b", rig.prompt(6, 1), 6)
    rig.drain()
    assert rig.engine.num_computed == 11


# ---- Endings --------


def test_a_sequence_stops_at_the_end_token(rig, make_rig):
    tokens = rig.answer(rig.prompt(6), 5)
    rig = make_rig(eos_ids=frozenset({tokens[2]}))
    rig.submit("a", rig.prompt(6), 5)
    rig.drain()
    assert rig.tokens["a"] == tokens[: tokens.index(tokens[2]) + 1]
    assert rig.finishes == {"a": "stop"}
    assert rig.is_empty()


def test_an_ignored_end_token_is_a_token_like_any_other(rig, make_rig):
    tokens = rig.answer(rig.prompt(6), 5)
    rig = make_rig(eos_ids=frozenset({tokens[2]}))
    rig.submit("a", rig.prompt(6), 5, ignore_eos=True)
    rig.drain()
    assert (rig.tokens["a"], rig.finishes["a"]) == (tokens, "length")


def test_the_end_token_is_not_chosen_before_min_tokens(rig, make_rig):
    tokens = rig.answer(rig.prompt(6), 5)
    eos = frozenset({tokens[0], tokens[1]})
    rig = make_rig(eos_ids=eos)
    rig.submit("a", rig.prompt(6), 8, min_tokens=3)
    rig.drain()
    expected = rig.answer(rig.prompt(6), 8, banned=eos, ban=3)
    assert not eos & set(expected[:3])
    assert rig.tokens["a"] == expected[: len(rig.tokens["a"])]
    assert len(rig.tokens["a"]) >= 3


def test_an_end_token_that_comes_last_is_a_stop(rig, make_rig):
    tokens = rig.answer(rig.prompt(6), 1)
    rig = make_rig(eos_ids=frozenset(tokens))
    rig.submit("a", rig.prompt(6), 1)
    rig.drain()
    assert rig.finishes == {"a": "stop"}


def test_one_token_ends_an_answer_that_wants_one(rig):
    rig.submit("a", rig.prompt(8), 1)
    rig.drain()
    assert (rig.tokens["a"], rig.finishes["a"]) == (rig.answer(rig.prompt(8), 1), "length")
    assert rig.is_empty()


# ---- Room --------


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "num_blocks"), [(4, 1, 1), (4, 2, 2), (4, 5, 2), (4, 6, 3), (5, 1, 2), (1, 1, 1)]
)
def test_the_last_tokens_kv_needs_no_room(make_rig, prompt_tokens, max_tokens, num_blocks):
    tight = make_rig(num_blocks)
    tight.submit("a", tight.prompt(prompt_tokens), max_tokens)
    tight.drain()
    assert len(tight.tokens["a"]) == max_tokens


@pytest.mark.parametrize(("prompt_tokens", "num_blocks"), [(4, 1), (5, 2), (8, 2), (9, 3)])
def test_a_sequence_comes_in_when_there_is_room_for_what_it_has_to_compute(make_rig, prompt_tokens, num_blocks):
    rig = make_rig(num_blocks)
    sequence = rig.submit("a", rig.prompt(prompt_tokens), 1000)
    assert rig.engine.admit() == [sequence]
    assert rig.engine.num_reserved == num_blocks
    short = make_rig(num_blocks - 1)
    waiting = short.submit("a", short.prompt(prompt_tokens), 1000)
    assert short.engine.admit() == []
    assert short.engine.blocks_lacking() == 1
    assert (waiting.blocks, short.engine.num_reserved) == ([], 0)


def test_what_is_set_aside_for_a_prompt_is_not_given_away(make_rig):
    rig = make_rig(6)
    rig.submit("a", rig.prompt(16), 1)  # 4 blocks, 2 of them in the first step
    rig.submit("b", rig.prompt(8, 1), 1)
    rig.step()
    assert rig.names() == ["a"]
    assert rig.pool.num_free == 4
    assert rig.engine.num_unreserved == 2
    rig.drain()
    assert rig.tokens == {"a": rig.answer(rig.prompt(16), 1), "b": rig.answer(rig.prompt(8, 1), 1)}


@pytest.mark.parametrize(("num_blocks", "can_enter"), [(4, False), (5, True)])
def test_a_newcomer_leaves_a_block_for_the_next_step_of_each_that_runs(make_rig, num_blocks, can_enter):
    rig = make_rig(num_blocks)
    rig.submit("a", rig.prompt(4), 3)
    rig.submit("b", rig.prompt(4, 1), 3)
    rig.engine.admit()
    assert rig.names() == (["a", "b"] if num_blocks > 2 else ["a"])
    rig.submit("c", rig.prompt(4, 2), 3)
    assert bool(rig.engine.admit()) is can_enter
    assert rig.engine.blocks_lacking() == (0 if can_enter else 1)


def test_a_sequence_takes_a_block_when_the_last_is_full_and_not_before(rig):
    sequence = rig.submit("a", rig.prompt(6), 12)
    held = []
    for _ in range(8):
        rig.step()
        held.append((sequence.num_stored, len(sequence.blocks)))
    assert held == [(6, 2), (7, 2), (8, 2), (9, 3), (10, 3), (11, 3), (12, 3), (13, 4)]
    assert rig.engine.num_reserved == 0


def test_new_memory_lets_a_waiting_sequence_in(make_rig):
    rig = make_rig(2)
    rig.submit("a", rig.prompt(12), 1)
    assert rig.engine.admit() == []
    rig.pool.add_extent(OWN[2:4])
    assert len(rig.engine.admit()) == 1


def test_no_more_sequences_run_than_allowed(make_rig):
    rig = make_rig(max_sequences=2)
    for name in "abc":
        rig.submit(name, rig.prompt(4), 3)
    rig.engine.admit()
    assert rig.names() == ["a", "b"]
    assert rig.engine.blocks_lacking() == 0  # it is not memory that is lacking
    rig.drain()
    assert rig.tokens["c"] == rig.answer(rig.prompt(4), 3)


def test_interactive_sequences_go_before_batch_ones_in_order(make_rig):
    rig = make_rig(max_sequences=3)
    for name in ("B", "a", "C", "b"):
        rig.submit(name, rig.prompt(4), 2, is_urgent=name.islower())
    assert [s.request for s in rig.engine.admit()] == ["a", "b", "B"]


def test_memory_is_lacking_for_whoever_is_next_in_line(make_rig):
    rig = make_rig(4)
    rig.submit("small", rig.prompt(4, 1), 1, is_urgent=False)
    rig.submit("big", rig.prompt(24, 1), 1)
    assert rig.engine.admit() == []
    assert rig.engine.blocks_lacking() == 2


# ---- Prefixes --------


def test_a_prompt_with_a_known_beginning_computes_only_its_end(rig):
    first, second = rig.prompt(14), (*rig.prompt(9), *rig.prompt(6, 1))
    rig.submit("a", first, 3)
    rig.drain()
    rig.model.steps.clear()
    sequence = rig.submit("b", second, 3)
    rig.drain()
    assert sequence.num_cached == 8
    assert rig.model.steps[0] == [len(second) - 8]
    assert rig.tokens["b"] == rig.answer(second, 3)
    assert rig.is_empty()


def test_at_least_one_token_of_a_known_prompt_is_computed(rig):
    for name, cached in (("a", 0), ("b", 4)):
        sequence = rig.submit(name, rig.prompt(8), 2)
        rig.drain()
        assert sequence.num_cached == cached
        assert rig.tokens[name] == rig.answer(rig.prompt(8), 2)


def test_two_sequences_read_the_same_blocks_at_once(rig):
    first = rig.submit("a", rig.prompt(13), 8)
    rig.step(), rig.step()
    second = rig.submit("b", rig.prompt(13), 8)
    rig.step()
    assert second.num_cached == 12
    assert second.blocks[:3] == first.blocks[:3]
    rig.drain()
    assert rig.tokens["a"] == rig.tokens["b"] == rig.answer(rig.prompt(13), 8)
    assert rig.is_empty()


def test_cached_blocks_give_way_to_new_sequences(make_rig):
    rig = make_rig(4)
    for seed in range(4):
        rig.submit(str(seed), rig.prompt(13, seed), 3)
        rig.drain()
        assert rig.tokens[str(seed)] == rig.answer(rig.prompt(13, seed), 3)
    assert rig.pool.account().cached == 4


def test_a_sequence_that_finds_no_room_lets_go_of_its_prefix(make_rig):
    rig = make_rig(4)
    rig.submit("a", rig.prompt(9), 1)
    rig.drain()
    rig.submit("b", (*rig.prompt(8), *rig.prompt(12, 1)), 1)
    assert rig.engine.admit() == []
    assert rig.engine.blocks_lacking() > 0
    assert rig.is_empty()
    assert rig.pool.account().cached == 3  # a part of the last block, too


# ---- Removal --------


@pytest.mark.parametrize("steps", range(7))
@pytest.mark.parametrize("is_adopted", [True, False])
def test_removal_returns_every_block_at_every_stage(rig, steps, is_adopted):
    sequence = (rig.adopt if is_adopted else rig.submit)("a", rig.prompt(18), 12)
    rig.submit("b", rig.prompt(5, 1), 12)
    for _ in range(steps):
        rig.step()
    assert rig.engine.find("a", 1) is sequence
    rig.engine.remove(sequence)
    rig.check()
    assert rig.engine.find("a", 1) is None
    rig.drain()
    assert rig.tokens["b"] == rig.answer(rig.prompt(5, 1), 12)
    assert rig.is_empty()


@pytest.mark.parametrize("is_running", [True, False])
def test_removal_lets_go_of_kept_blocks(rig, is_running):
    kept = rig.keep(rig.prompt(8))
    sequence = rig.submit("a", rig.prompt(10), kept=dict(enumerate(kept)), adopted=True)
    rig.pool.free(kept)
    if is_running:
        rig.step()
    assert rig.pool.account().used >= 2
    rig.engine.remove(sequence)
    assert rig.is_empty()


def test_a_removed_sequence_is_in_no_further_step(rig):
    rig.submit("a", rig.prompt(20), 3)
    rig.step()
    rig.engine.remove(rig.engine.find("a", 1))
    assert rig.step() == []
    assert rig.is_empty()


def test_a_sequence_is_found_by_request_and_attempt(rig):
    sequence = rig.submit("a", rig.prompt(4))
    assert rig.engine.find("a", 1) is sequence
    assert rig.engine.find("a", 2) is None
    assert rig.engine.find("b", 1) is None
