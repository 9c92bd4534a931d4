"""Sequences whose prompt left tokens out: those that follow keep their positions, in slots that come before."""

from __future__ import annotations

import pytest

from pdactors.engine.sequence import Sequence
from pdactors.messages import KVHandle, Lease, Sampling, Segment

BLOCK = 4
LAYOUT_PROMPT = 25


def adopt(rig, kept, name="a", max_tokens=9, seed=0):
    """Queue a sequence of whose prompt only the last `kept` tokens are lent."""
    prompt = rig.prompt(LAYOUT_PROMPT, seed)
    lent = rig.lend(prompt[-kept:], first_block=ord(name) % 2 * 8)
    segment = Segment("n0/migrator", Lease(0, 1), 0, lent)
    num_pruned = len(prompt) - kept
    handle = KVHandle("n0", "n0/migrator", "layout", (segment,), kept, num_pruned=num_pruned)
    sequence = Sequence(name, 1, prompt, Sampling(max_tokens=max_tokens), handle=handle, num_pruned=num_pruned)
    sequence.lent = dict(enumerate(lent))
    sequence.segments = [segment]
    sequence.set_tail_apart(kept, BLOCK)
    sequence.tokens = rig.answer(prompt, 1)
    rig.tokens[name] = list(sequence.tokens)
    rig.engine.submit(sequence)
    return sequence


def pruned_answer(rig, kept, count, seed=0):
    """Return what the model says, to whom the last `kept` tokens are all of the prompt, after the right first token."""
    prompt = rig.prompt(LAYOUT_PROMPT, seed)
    first = rig.answer(prompt, 1)
    return first + rig.answer((*prompt[-kept:], *first), count - 1)


@pytest.mark.parametrize("kept", [1, 3, 4, 8, 10, 24])
def test_it_goes_on_at_its_positions_behind_what_was_kept(rig, kept):
    sequence = adopt(rig, kept)
    before = rig.arena.payload()[32:].copy()
    step = rig.plan()
    assert list(step.batch.positions) == [LAYOUT_PROMPT]
    assert step.batch.spans[0].context_len == kept + 1
    assert len(sequence.blocks) == kept // BLOCK + 1
    rig.engine.commit(step, rig.engine.run(step))
    rig.tokens["a"] = list(sequence.tokens)
    rig.drain()
    assert rig.tokens["a"] == pruned_answer(rig, kept, 9)
    assert (rig.arena.payload()[32:] == before).all()
    assert rig.is_empty()
    assert rig.pool.account().cached == 0  # nobody else may find it


def test_it_takes_the_room_of_what_it_has(make_rig):
    rig = make_rig(3)
    adopt(rig, 10, max_tokens=11)  # slots 10 to 19, in blocks 2, 3 and 4
    rig.drain()
    assert rig.tokens["a"] == pruned_answer(rig, 10, 11)
    assert rig.engine.num_preempted == 0


def test_a_preempted_one_reads_what_was_kept_again(make_rig):
    rig = make_rig(5)
    adopt(rig, 10, "a", max_tokens=14)
    late = adopt(rig, 7, "b", max_tokens=14, seed=1)
    rig.drain()
    assert rig.preempted[:1] == ["b"]
    assert late.num_pruned == LAYOUT_PROMPT - 7
    assert rig.tokens == {"a": pruned_answer(rig, 10, 14), "b": pruned_answer(rig, 7, 14, 1)}


@pytest.mark.parametrize("kept", [8, 10])
def test_one_that_gives_its_leases_back_is_computed_in_full(rig, kept):
    sequence = adopt(rig, kept)
    rig.engine.strip(sequence)
    rig.drain()
    assert sequence.num_pruned == 0
    assert rig.tokens["a"] == rig.answer(rig.prompt(LAYOUT_PROMPT), 9)
    assert rig.is_empty()


def test_what_it_borrows_is_not_copied_out(rig):
    sequence = adopt(rig, 10)
    rig.step()
    assert not rig.engine.copy_out(sequence)
    rig.drain()
    assert rig.tokens["a"] == pruned_answer(rig, 10, 9)
