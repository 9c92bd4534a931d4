"""Sequences whose KV a prefill engine left in blocks of its own."""

from __future__ import annotations

import pytest

BLOCK = 4
OWN, LENT = range(32), range(32, 48)


@pytest.mark.parametrize(("length", "num_own"), [(10, 1), (11, 1), (12, 0), (3, 1), (4, 0)])
def test_adoption_takes_a_block_for_the_tail_and_borrows_the_rest(rig, length, num_own):
    sequence = rig.adopt("a", rig.prompt(length), 8)
    assert rig.engine.admit() == [sequence]
    full = length // BLOCK
    assert sequence.blocks[:full] == list(LENT[:full])
    assert len(sequence.own_blocks) == num_own
    assert rig.pool.account().used == num_own
    assert rig.engine.num_reserved == 1 - num_own  # its next token needs a block of its own
    assert set(sequence.own_blocks) <= set(OWN)
    assert sequence.num_stored == length
    assert sequence.num_pending == 1


def test_adoption_copies_the_tail_and_nothing_else(rig):
    rig.model.kv[:16] = -7
    sequence = rig.adopt("a", rig.prompt(10), 8)
    rig.engine.admit()
    (own,) = sequence.own_blocks
    assert (rig.model.kv[own] == rig.model.kv[LENT[2]]).all()
    assert (rig.model.kv[[block for block in range(16) if block != own]] == -7).all()


def test_a_block_that_is_set_aside_is_not_lacking(make_rig):
    rig = make_rig(1)
    rig.adopt("a", rig.prompt(12), 5)
    rig.step()
    assert not rig.engine.is_stalled
    assert rig.engine.blocks_lacking() == 0
    rig.drain()
    assert rig.tokens["a"] == rig.answer(rig.prompt(12), 5)


@pytest.mark.parametrize("length", [1, 4, 7, 12, 14])
def test_an_adopted_sequence_goes_on_and_leaves_what_is_lent_untouched(rig, length):
    prompt = rig.prompt(length)
    rig.adopt("a", prompt, 9)
    before = rig.arena.payload()[LENT.start :].copy()
    rig.drain()
    assert rig.tokens["a"] == rig.answer(prompt, 9)
    assert (rig.arena.payload()[LENT.start :] == before).all()
    assert rig.is_empty()


def test_two_sequences_may_adopt_the_same_blocks(rig):
    for name in "ab":
        rig.adopt(name, rig.prompt(10), 6)
    rig.drain()
    assert rig.tokens["a"] == rig.tokens["b"] == rig.answer(rig.prompt(10), 6)


def test_borrowed_blocks_need_no_room(make_rig):
    rig = make_rig(2)
    rig.adopt("a", rig.prompt(30), 7)  # the tail's 2 tokens and 6 more: 2 blocks
    assert len(rig.engine.admit()) == 1
    rig.drain()
    assert rig.tokens["a"] == rig.answer(rig.prompt(30), 7)


def test_an_adopted_sequence_waits_for_room_without_a_block(make_rig):
    rig = make_rig(2)
    rig.submit("a", rig.prompt(5), 9)
    rig.step()
    sequence = rig.adopt("b", rig.prompt(6, 1), 20)
    assert rig.engine.admit() == []
    assert (sequence.blocks, sequence.borrowed, rig.engine.num_reserved) == ([], set(), 0)
    assert rig.engine.find("b", 1) is sequence
