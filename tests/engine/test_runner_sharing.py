"""Tables of blocks that several sequences and several engines share."""

from __future__ import annotations

import pytest

from pdactors.kv.prefix import chain, parts

BLOCK = 4
OWN, LENT = range(32), range(32, 48)


def cache(rig, tokens):
    """Have the KV of `tokens` computed and left in the prefix cache."""
    rig.submit("filler", tokens, 1)
    rig.drain()
    rig.model.steps.clear()
    rig.engine.num_computed = 0


# ---- Prompts that are being computed --------


@pytest.mark.parametrize("count", [2, 4])
def test_equal_prompts_that_arrive_together_compute_their_beginning_once(rig, count):
    sequences = [rig.submit(str(i), rig.prompt(18), 3) for i in range(count)]
    rig.drain()
    assert rig.engine.num_computed == 18 + (count - 1) * 2
    assert [s.num_cached for s in sequences] == [0] + [16] * (count - 1)
    assert rig.tokens == {str(i): rig.answer(rig.prompt(18), 3) for i in range(count)}


def test_a_prompt_waits_for_the_blocks_that_it_shares_and_no_longer(rig):
    rig.submit("a", rig.prompt(30), 3)
    other = (*rig.prompt(9), *rig.prompt(9, 1))
    second = rig.submit("b", other, 3)
    rig.engine.admit()
    assert rig.names() == ["a"]
    rig.step()  # computes the two blocks that both begin with
    rig.engine.admit()
    assert rig.names() == ["a", "b"]
    assert second.num_cached == 8
    rig.drain()
    assert rig.tokens["b"] == rig.answer(other, 3)


def test_those_behind_a_prompt_that_waits_pass_it(rig):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        rig.submit(name, rig.prompt(20, seed), 2)
    assert [s.request for s in rig.engine.admit()] == ["a", "c"]
    rig.drain()
    assert len(rig.finishes) == 3


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_prompt_goes_on_alone_when_the_one_it_waits_for_is_removed(rig, steps):
    first = rig.submit("a", rig.prompt(18), 3)
    second = rig.submit("b", rig.prompt(18), 3)
    rig.engine.admit()
    for _ in range(steps):
        rig.step()
    rig.engine.remove(first)
    rig.drain()
    assert second.num_cached == 8 * steps
    assert rig.engine.num_computed == 18
    assert rig.tokens["b"] == rig.answer(rig.prompt(18), 3)
    assert rig.is_empty()


def test_a_prompt_waits_for_no_generated_block(rig):
    rig.submit("a", rig.prompt(5), 20)
    rig.step()
    rig.submit("b", (*rig.prompt(5), *rig.answer(rig.prompt(5), 20)), 3)
    rig.engine.admit()
    assert rig.names() == ["a", "b"]


# ---- Tables of blocks of several owners --------


def test_a_table_has_cached_lent_and_computed_blocks(rig):
    prompt = rig.prompt(22)
    cache(rig, prompt[:5])
    lent = rig.lend(prompt[:16])
    before = rig.arena.payload()[LENT.start :].copy()
    sequence = rig.submit("a", prompt, 5, lent={2: lent[2], 1: lent[1]})
    rig.engine.admit()
    assert sequence.blocks[0] in OWN
    assert sequence.blocks[1:] == [lent[1], lent[2]]
    assert (sequence.num_cached, sequence.borrowed) == (12, {lent[1], lent[2]})
    assert rig.engine.num_reserved == 3
    rig.drain()
    assert rig.tokens["a"] == rig.answer(prompt, 5)
    assert rig.engine.num_computed == 10
    assert (rig.arena.payload()[LENT.start :] == before).all()
    assert rig.is_empty()


def test_what_lies_behind_a_gap_is_computed(rig):
    prompt = rig.prompt(18)
    lent = rig.lend(prompt)
    sequence = rig.submit("a", prompt, 3, lent={0: lent[0], 2: lent[2], 3: lent[3]})
    rig.engine.admit()
    assert (sequence.blocks, sequence.num_stored) == ([lent[0]], 4)
    rig.drain()
    assert rig.tokens["a"] == rig.answer(prompt, 3)
    assert rig.engine.num_computed == 14


def test_at_least_one_token_is_computed_whatever_is_lent(rig):
    lent = rig.lend(rig.prompt(8))
    sequence = rig.submit("a", rig.prompt(8), 3, lent=dict(enumerate(lent)))
    rig.drain()
    assert sequence.num_cached == 4
    assert rig.tokens["a"] == rig.answer(rig.prompt(8), 3)


def test_an_adopted_table_has_kept_lent_and_copied_blocks(rig, copies):
    prompt = rig.prompt(18)
    kept = rig.keep(prompt[:8])
    lent = rig.lend(prompt)
    sequence = rig.submit(
        "a", prompt, 5, kept=dict(enumerate(kept)), lent={i: lent[i] for i in (2, 3, 4)}, adopted=True
    )
    rig.pool.free(kept)
    assert rig.pool.account().used == 2  # the sequence keeps them while it waits
    rig.engine.admit()
    assert sequence.blocks[:4] == [*kept, lent[2], lent[3]]
    assert copies == [(lent[4], sequence.blocks[4])]
    assert (sequence.num_stored, sequence.num_pending, sequence.num_cached) == (18, 1, 0)
    rig.drain()
    assert rig.tokens["a"] == rig.answer(prompt, 5)
    assert rig.engine.num_computed == 0
    assert len(copies) == 1
    assert rig.is_empty()


@pytest.mark.parametrize("gap", [0, 2, 3])
def test_an_adoption_with_a_gap_computes_from_there_and_leaves_the_tail(rig, copies, gap):
    prompt = rig.prompt(18)
    lent = rig.lend(prompt)
    rig.model.kv[lent[4]] = -9
    blocks = {i: block for i, block in enumerate(lent) if i != gap}
    sequence = rig.submit("a", prompt, 5, lent=blocks, adopted=True)
    rig.engine.admit()
    assert sequence.num_stored == gap * BLOCK
    rig.drain()
    assert rig.tokens["a"] == rig.answer(prompt, 5)  # the first token is the prefill's; no second one is sampled
    assert copies == []
    assert rig.engine.num_computed == 19 - gap * BLOCK
    assert rig.is_empty()


def test_an_adoption_without_its_tail_computes_the_tail(rig, copies):
    prompt = rig.prompt(18)
    lent = rig.lend(prompt)
    rig.submit("a", prompt, 5, lent=dict(enumerate(lent[:4])), adopted=True)
    rig.drain()
    assert rig.tokens["a"] == rig.answer(prompt, 5)
    assert (copies, rig.engine.num_computed) == ([], 3)


# ---- Generated blocks --------


def test_a_conversation_finds_prompt_and_answer_of_the_turn_before(rig):
    history, num_known = rig.prompt(10), 0
    for turn in range(3):
        sequence = rig.submit(str(turn), history, 9)
        rig.drain()
        assert sequence.num_cached == num_known
        assert rig.tokens[str(turn)] == rig.answer(history, 9)
        num_known = len(history) + 8  # the last token's KV is not there
        history = (*history, *rig.tokens[str(turn)], *rig.prompt(3, turn + 1))


def test_without_saving_only_the_prompt_is_found_again(rig):
    sequence = rig.submit("a", rig.prompt(10), 9, saves_kv=False)
    rig.drain()
    assert sequence.num_indexed == 2
    assert rig.pool.account().cached == 3
    again = rig.submit("b", (*rig.prompt(10), *rig.tokens["a"]), 2)
    rig.drain()
    assert again.num_cached == 10
    assert rig.tokens["b"] == rig.answer((*rig.prompt(10), *rig.tokens["a"]), 2)


def test_what_a_sequence_generates_on_borrowed_blocks_is_cached_under_the_whole_chain(rig):
    prompt = rig.prompt(10)
    sequence = rig.adopt("a", prompt, 12)
    rig.drain()
    digests = chain([*prompt, *rig.tokens["a"]], BLOCK, b"key")
    assert sequence.digests == digests[:5]  # the last token's KV is not there
    assert [rig.pool.cached(digest) is not None for digest in digests] == [False, False, True, True, True]
    assert rig.pool.account().cached == 4
    (part,) = parts(rig.tokens["a"][-2:-1], BLOCK, b"key", digests[-1])
    assert rig.pool.drain_events().added == [*digests[2:], part.digest]


@pytest.mark.parametrize("is_adopted", [True, False])
@pytest.mark.parametrize("saves_kv", [True, False])
def test_digests_are_those_of_the_whole_token_list_also_after_preemption(make_rig, is_adopted, saves_kv):
    rig = make_rig(8, token_budget=5)
    rig.submit("a", rig.prompt(7, 1), 14)
    rig.step(), rig.step()
    sequence = (rig.adopt if is_adopted else rig.submit)("b", rig.prompt(11), 14, saves_kv=saves_kv)
    seen = 0
    while rig.engine.running or rig.engine.waiting:
        rig.step()
        tokens = [*sequence.prompt, *sequence.tokens]
        assert sequence.digests == chain(tokens, BLOCK, b"key")[: len(sequence.digests)]
        cached = [rig.pool.cached(digest) is not None for digest in chain(tokens, BLOCK, b"key")]
        seen = max(seen, sum(cached))
        assert saves_kv or not any(cached[2:])
    assert "b" in rig.preempted
    assert rig.tokens["b"] == rig.answer(rig.prompt(11), 14)
    assert seen >= (4 if saves_kv else 0)


def test_equal_blocks_of_two_sequences_are_cached_once(rig):
    for name in "ab":
        rig.adopt(name, rig.prompt(8), 10)
    rig.drain()
    assert rig.pool.account().cached == 3
    assert rig.is_empty()


# ---- Partly filled blocks --------


def test_the_end_of_an_answer_is_copied_and_the_original_never_written(rig, copies):
    first = rig.submit("a", rig.prompt(10), 6)
    rig.drain()
    known = [*rig.prompt(10), *rig.tokens["a"][:-1]]
    (part, *_) = parts(known[12:], BLOCK, b"key", first.digests[2])
    original = rig.pool.cached(part.digest)
    before = rig.arena.payload()[original].copy()
    for name, more in (("b", 1), ("c", 2)):  # both go on after the same answer, each in its own way
        prompt = (*known, *rig.prompt(3, more))
        sequence = rig.submit(name, prompt, 5)
        rig.drain()
        assert sequence.num_cached == len(known) == 15
        assert rig.tokens[name] == rig.answer(prompt, 5)
    assert [source for source, _ in copies] == [original, original]
    assert (rig.arena.payload()[original] == before).all()


def test_a_part_is_found_by_less_than_all_of_it_only_where_that_was_indexed(rig):
    rig.submit("a", rig.prompt(11), 1)
    rig.drain()
    other = (*rig.prompt(10), 30, 31)  # differs in the last token of the part that was kept
    sequence = rig.submit("b", other, 3)
    rig.drain()
    assert sequence.num_cached == 8
    assert rig.tokens["b"] == rig.answer(other, 3)


def test_the_last_block_that_is_there_may_be_the_one_that_is_copied(make_rig):
    rig = make_rig(4)
    rig.submit("a", rig.prompt(3), 1)
    rig.drain()
    rig.submit("b", rig.prompt(15), 1)  # needs every block
    rig.drain()
    assert rig.tokens["b"] == rig.answer(rig.prompt(15), 1)
    assert rig.is_empty()


def test_a_lent_part_is_copied(rig, copies):
    prompt = rig.prompt(18)
    lent = rig.lend(prompt)
    before = rig.arena.payload()[LENT.start :].copy()
    sequence = rig.submit("a", prompt, 4, lent=dict(enumerate(lent[:4])), num_lent=15)
    rig.drain()
    assert (sequence.num_cached, rig.engine.num_computed) == (15, 3)
    assert [source for source, _ in copies] == [lent[3]]
    assert rig.tokens["a"] == rig.answer(prompt, 4)
    assert (rig.arena.payload()[LENT.start :] == before).all()
