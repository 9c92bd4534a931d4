"""What an engine lacks, and how it does without what others lend."""

from __future__ import annotations

import pytest

from pdactors.kv.prefix import chain

BLOCK = 4
OWN, LENT = range(32), range(32, 48)


def cache(rig, tokens):
    """Have the KV of `tokens` computed and left in the prefix cache."""
    rig.submit("filler", tokens, 1)
    rig.drain()
    rig.model.steps.clear()
    rig.engine.num_computed = 0


# ---- What is lacking --------


def pick(blocks, *indices):
    return {i: blocks[i] for i in indices}


HOLDINGS = {  # parts of a prompt of 22 tokens, which has 6 blocks; all of it is lent in `lent`
    "nothing": lambda rig, prompt, lent: {},
    "lent": lambda rig, prompt, lent: {"lent": pick(lent, 0, 1, 2)},
    "lent, but not the first": lambda rig, prompt, lent: {"lent": pick(lent, 1, 2, 3, 4)},
    "lent with a gap": lambda rig, prompt, lent: {"lent": pick(lent, 0, 1, 3, 4)},
    "cached": lambda rig, prompt, lent: cache(rig, prompt[:9]) or {},
    "cached, then lent": lambda rig, prompt, lent: cache(rig, prompt[:9]) or {"lent": pick(lent, 1, 2, 3)},
    "kept": lambda rig, prompt, lent: {"kept": dict(enumerate(rig.keep(prompt[:8])))},
    "adopted": lambda rig, prompt, lent: {"lent": dict(enumerate(lent)), "adopted": True},
    "adopted with a gap": lambda rig, prompt, lent: {"lent": pick(lent, 0, 2, 3, 4, 5), "adopted": True},
}


@pytest.mark.parametrize("holding", HOLDINGS)
@pytest.mark.parametrize("has_company", [True, False])
def test_exactly_what_is_lacking_lets_the_next_one_in(make_rig, holding, has_company):
    rig = make_rig(3)
    prompt = rig.prompt(22)
    options = HOLDINGS[holding](rig, prompt, rig.lend(prompt))
    if has_company:
        rig.pool.add_extent(OWN[3:4])
        rig.submit("company", rig.prompt(2, 1), 9)
        rig.step()
    rig.pool.allocate(rig.pool.num_free)
    sequence = rig.submit("a", prompt, 5, **options)
    assert rig.engine.admit() == []
    lacking = rig.engine.blocks_lacking()
    assert lacking > 0
    if lacking > 1:
        rig.pool.add_extent(OWN[8 : 8 + lacking - 1])
    assert rig.engine.admit() == []
    rig.pool.add_extent(OWN[20:21])
    assert rig.engine.blocks_lacking() == 0
    assert rig.engine.admit() == [sequence]


def test_a_prefix_that_somebody_uses_takes_no_memory_of_those_that_wait(make_rig):
    rig = make_rig(6)
    rig.submit("a", rig.prompt(13), 3)
    rig.step(), rig.step()
    rig.submit("b", (*rig.prompt(12), *rig.prompt(9, 1)), 3)
    assert rig.engine.admit() == []
    assert rig.engine.blocks_lacking() == 3 + 1 - 2
    rig.pool.add_extent(OWN[8:10])
    assert len(rig.engine.admit()) == 1


# ---- Copying out, and doing without --------


def test_copying_out_replaces_what_is_borrowed(rig, copies):
    prompt = rig.prompt(18)
    kept = rig.keep(prompt[:4])
    lent = rig.lend(prompt)
    sequence = rig.submit(
        "a", prompt, 9, kept={0: kept[0]}, lent={i: block for i, block in enumerate(lent) if i}, adopted=True
    )
    rig.pool.free(kept)
    rig.step(), rig.step()
    copies.clear()
    assert rig.engine.copy_out(sequence)
    assert copies == list(zip(lent[1:4], sequence.blocks[1:4], strict=True))
    assert sequence.blocks[0] == kept[0]
    assert set(sequence.blocks) <= set(OWN)
    assert (sequence.borrowed, sequence.lent, sequence.kept, sequence.tail_block) == (set(), {}, {}, None)
    rig.model.kv[list(LENT)] = -5
    rig.check()
    rig.drain()
    assert rig.tokens["a"] == rig.answer(prompt, 9)
    assert rig.is_empty()


def test_copies_are_found_by_the_next_prompt(rig):
    prompt = rig.prompt(18)
    sequence = rig.adopt("a", prompt, 9)
    rig.step()
    rig.engine.copy_out(sequence)
    table = list(sequence.blocks)
    rig.drain()
    assert [rig.pool.cached(digest) for digest in chain(prompt, BLOCK, b"key")] == table[:4]
    again = rig.submit("b", (*prompt, 1, 2), 2)
    rig.engine.admit()
    assert again.num_cached == 16


def test_there_is_no_copying_out_without_room(make_rig):
    rig = make_rig(4)
    sequence = rig.adopt("a", rig.prompt(18), 3)
    assert not rig.engine.copy_out(sequence)  # it does not run yet
    rig.step()
    before = list(sequence.blocks)
    assert not rig.engine.copy_out(sequence)
    assert (sequence.blocks, len(sequence.lent)) == (before, 4)
    rig.pool.add_extent(OWN[8:9])
    assert rig.engine.copy_out(sequence)
    rig.drain()
    assert rig.tokens["a"] == rig.answer(rig.prompt(18), 3)


def test_copies_take_nothing_that_is_set_aside(make_rig):
    rig = make_rig(9)
    sequence = rig.adopt("a", rig.prompt(18), 3)
    rig.submit("b", rig.prompt(20, 1), 1)  # 5 blocks, 2 of them in the first step
    rig.step()
    assert (rig.pool.num_available, rig.engine.num_unreserved) == (6, 3)
    assert not rig.engine.copy_out(sequence)
    rig.drain()
    assert rig.tokens == {"a": rig.answer(rig.prompt(18), 3), "b": rig.answer(rig.prompt(20, 1), 1)}


def test_a_sequence_that_copied_out_can_be_preempted(make_rig):
    rig = make_rig(10)
    rig.submit("a", rig.prompt(4, 1), 20)
    rig.step()
    sequence = rig.adopt("b", rig.prompt(18), 14)
    rig.step()
    assert rig.engine.copy_out(sequence)
    rig.model.kv[list(LENT)] = -5
    rig.drain()
    assert rig.preempted
    assert rig.tokens["b"] == rig.answer(rig.prompt(18), 14)


def test_copies_survive_a_preemption_right_after(make_rig):
    rig = make_rig(10)
    rig.submit("a", rig.prompt(8, 1), 9)
    sequence = rig.adopt("b", rig.prompt(18), 9)
    rig.step(), rig.step()  # now the next token of each needs a block
    assert rig.engine.copy_out(sequence)
    ballast = rig.pool.allocate(rig.engine.num_unreserved)
    assert rig.plan() is not None
    assert rig.preempted == ["b"]
    rig.engine.remove(rig.engine.find("a", 1))
    rig.pool.free(ballast)
    rig.model.steps.clear()
    rig.drain()
    assert rig.tokens["b"] == rig.answer(rig.prompt(18), 9)
    assert rig.model.steps[0] == [21 - 16]  # the copies were found; "a" took the block behind them


def test_a_stalled_engine_has_those_that_wait_give_way_first(make_rig):
    rig = make_rig(3, max_sequences=1)
    running = rig.adopt("a", rig.prompt(18), 20)
    for sequence in (running, *(rig.adopt(name, rig.prompt(8, 1), 3) for name in "bc")):
        sequence.segments.append(sequence.handle.segments[0])
    plain = rig.submit("d", rig.prompt(8, 1), 3)
    rig.engine.admit()
    assert rig.engine.give_way() is None
    while not rig.engine.is_stalled:
        rig.step()
    gave_way = []
    for _ in range(2):
        gave_way.append(rig.engine.give_way())
        gave_way[-1].segments.clear()
        assert gave_way[-1].lent == {}
    assert [s.request for s in gave_way] == ["c", "b"]
    assert (rig.names(), len(rig.engine.waiting), plain.segments) == (["a"], 3, [])


def test_a_stalled_sequence_gives_way_itself_when_nobody_waits(make_rig):
    rig = make_rig(3)
    sequence = rig.adopt("a", rig.prompt(18), 8)
    sequence.segments.append(sequence.handle.segments[0])
    held = rig.pool.allocate(2)
    while rig.step():
        pass
    assert rig.engine.is_stalled
    assert rig.engine.give_way() is sequence
    sequence.segments.clear()
    assert (rig.names(), rig.engine.num_preempted) == ([], 1)
    assert rig.pool.account().used == 2
    assert rig.engine.admit() == []
    assert rig.engine.give_way() is None
    rig.model.kv[list(LENT)] = -5
    rig.pool.free(held)
    rig.pool.add_extent(OWN[8:12])
    rig.drain()
    assert rig.tokens["a"] == rig.answer(rig.prompt(18), 8)
    assert rig.is_empty()


def test_a_waiting_sequence_can_do_without_what_is_lent(make_rig):
    rig = make_rig(6)
    prompt = rig.prompt(18)
    kept = rig.keep(prompt[:4])
    held = rig.pool.allocate(5)
    lent = rig.lend(prompt)
    sequence = rig.submit("a", prompt, 3, kept={0: kept[0]}, lent=dict(enumerate(lent)), adopted=True)
    rig.pool.free(kept)
    assert rig.engine.admit() == []
    rig.engine.strip(sequence)
    assert rig.pool.account().used == len(held)  # what it kept is free for others
    rig.model.kv[list(LENT)] = -5
    rig.pool.free(held)
    rig.drain()
    assert rig.tokens["a"] == rig.answer(prompt, 3)
    assert rig.engine.num_computed == 19
    assert rig.is_empty()


def test_a_stripped_sequence_still_finds_what_is_cached(rig):
    prompt = rig.prompt(18)
    cache(rig, prompt[:13])
    sequence = rig.submit("a", prompt, 3, lent=dict(enumerate(rig.lend(prompt))), adopted=True)
    rig.engine.strip(sequence)
    rig.engine.admit()
    assert sequence.num_stored == 12
    rig.drain()
    assert rig.tokens["a"] == rig.answer(prompt, 3)
