"""What happens to sequences that grow until memory is short."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

BLOCK = 4
OWN = range(32)


def submit_all(rig, names, length=4, max_tokens=13, **options):
    """Queue sequences with a prompt each; upper case names are batch ones."""
    for name in names:
        rig.submit(name, rig.prompt(length, ord(name)), max_tokens, is_urgent=name.islower(), **options)


def right_answers(rig, names, length=4, max_tokens=13):
    return {name: rig.answer(rig.prompt(length, ord(name)), max_tokens) for name in names}


def test_the_last_admitted_is_preempted_and_the_first_never(make_rig):
    rig = make_rig(6)
    submit_all(rig, "abc")  # 4 blocks each in the end
    rig.drain()
    assert rig.preempted[0] == "c"
    assert "b" in rig.preempted
    assert "a" not in rig.preempted
    assert rig.engine.num_preempted == len(rig.preempted)
    assert rig.tokens == right_answers(rig, "abc")
    assert rig.is_empty()


def test_batch_sequences_are_preempted_before_interactive_ones(make_rig):
    rig = make_rig(6)
    submit_all(rig, "A")
    rig.step()
    submit_all(rig, "bc")
    rig.drain()
    assert rig.preempted[:2] == ["A", "c"]
    assert "b" not in rig.preempted
    assert rig.tokens == right_answers(rig, "Abc")


def test_no_more_are_preempted_than_need_be(make_rig):
    rig = make_rig(7)
    submit_all(rig, "abcd", max_tokens=5)  # each wants a second block in the same step
    for _ in range(4):
        rig.step()
    assert rig.preempted == ["d"]
    assert rig.names() == ["a", "b", "c"]


def test_nobody_is_preempted_while_memory_lasts(make_rig):
    rig = make_rig(12)
    submit_all(rig, "abc")
    rig.drain()
    assert rig.engine.num_preempted == 0


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "seed": 5}, {"saves_kv": False}, {"min_tokens": 9}])
def test_preemption_changes_no_token(make_rig, options):
    tokens = []
    for num_blocks in (32, 6):
        rig = make_rig(num_blocks, eos_ids=frozenset(range(0, 31, 7)) if "min_tokens" in options else frozenset())
        submit_all(rig, "abc", **options)
        rig.drain()
        tokens.append((rig.tokens, rig.finishes, bool(rig.preempted)))
        assert rig.is_empty()
    assert tokens[0] == (*tokens[1][:2], False)
    assert tokens[1][2]


def test_a_preempted_sequence_uses_again_what_nobody_took(make_rig):
    rig = make_rig(6)
    submit_all(rig, "a", length=7, max_tokens=6)
    submit_all(rig, "b", length=11, max_tokens=4)
    while not rig.preempted:
        rig.step()
    waiting = rig.engine.find("b", 1)
    assert (waiting.blocks, waiting.num_stored, waiting.num_reserved) == ([], 0, 0)
    assert waiting.num_tokens == 13
    rig.model.steps.clear()
    rig.drain()
    assert rig.preempted == ["b"]
    assert set(map(tuple, rig.model.steps)) == {(1,)}  # nothing is computed twice
    assert rig.engine.num_computed == 7 + 11
    assert waiting.num_cached == 0
    assert rig.tokens["b"] == rig.answer(rig.prompt(11, ord("b")), 4)


def test_a_preempted_sequence_comes_back_before_those_that_wait(make_rig):
    rig = make_rig(4, max_sequences=2)
    submit_all(rig, "abcd", max_tokens=9)
    admitted = []
    for _ in range(200):
        admitted += [s.request for s in rig.engine.admit()]
        rig.step()
        if len(rig.finishes) == 4:
            break
    assert rig.preempted
    first_times = list(dict.fromkeys(admitted))
    assert first_times == ["a", "b", "c", "d"]
    assert len(admitted) == 4 + len(rig.preempted)
    for name in rig.preempted:  # whoever was preempted came back before anybody new
        again = admitted.index(name, admitted.index(name) + 1)
        assert set(admitted[:again]) <= set(first_times[: first_times.index(name) + 1])


def test_a_prompt_that_is_preempted_gives_up_what_was_set_aside_for_it(make_rig):
    rig = make_rig(6, token_budget=2)
    submit_all(rig, "a", max_tokens=12)
    rig.step(), rig.step()
    submit_all(rig, "b", length=15, max_tokens=2)
    rig.step()
    assert rig.engine.find("b", 1).num_reserved > 0
    while not rig.preempted:
        rig.step()
    assert rig.preempted == ["b"]
    assert rig.engine.find("b", 1).is_prompt
    assert rig.engine.num_reserved == 0
    sequence = rig.engine.find("b", 1)
    rig.drain()
    assert rig.engine.num_computed == 4 + 15  # it found what it had computed itself
    assert sequence.num_cached == 0
    assert rig.tokens["b"] == rig.answer(rig.prompt(15, ord("b")), 2)


def test_a_preempted_adoption_is_adopted_again(make_rig):
    rig = make_rig(4)
    submit_all(rig, "a", max_tokens=9)
    rig.step()
    sequence = rig.adopt("b", rig.prompt(6, 7), 9)
    rig.drain()
    assert rig.preempted == ["b"]
    assert sequence.num_admitted == 2
    assert rig.tokens["b"] == rig.answer(rig.prompt(6, 7), 9)
    assert rig.is_empty()


def test_what_a_preempted_sequence_keeps_stays(make_rig):
    rig = make_rig(6)
    submit_all(rig, "a", max_tokens=9)
    rig.step()
    kept = rig.keep(rig.prompt(8, 7))
    sequence = rig.submit("b", rig.prompt(8, 7), 9, kept=dict(enumerate(kept)), adopted=True)
    rig.pool.free(kept)
    while not rig.preempted:
        rig.step()
    assert rig.preempted == ["b"]
    assert sequence.digests
    rig.engine.remove(rig.engine.find("a", 1))
    computed = rig.engine.num_computed
    rig.engine.admit()
    assert sequence.blocks[:2] == kept
    rig.drain()
    assert rig.engine.num_computed - computed <= 5
    assert rig.tokens["b"] == rig.answer(rig.prompt(8, 7), 9)
    assert rig.is_empty()


def test_a_prompt_waits_for_no_block_that_a_decoding_sequence_will_not_share(make_rig):
    rig = make_rig(10)
    submit_all(rig, "a", max_tokens=20)
    rig.step()
    submit_all(rig, "b", length=6, max_tokens=20, saves_kv=False)
    for _ in range(8):
        rig.step()
    ballast = rig.pool.allocate(rig.engine.num_unreserved)
    while not rig.preempted:
        rig.step()
    rig.pool.free(ballast)
    rig.step(), rig.step(), rig.step()
    again = rig.engine.find("b", 1)
    assert (rig.preempted, rig.names(), again.is_prompt) == (["b"], ["a", "b"], False)
    rig.pool.add_extent(OWN[16:24])
    rig.submit("c", (*again.prompt, *again.tokens), 2)
    assert [s.request for s in rig.engine.admit()] == ["c"]


def test_a_sequence_alone_is_not_preempted_but_stands_still(make_rig):
    rig = make_rig(2)
    submit_all(rig, "a")
    for _ in range(5):
        rig.step()
        assert rig.engine.is_stalled is (len(rig.tokens["a"]) == 5)
    assert rig.step() == []
    assert rig.engine.is_stalled
    assert rig.engine.blocks_lacking() == 1
    assert rig.engine.num_preempted == 0
    rig.pool.add_extent(OWN[8:10])
    assert not rig.engine.is_stalled
    assert rig.engine.blocks_lacking() == 0
    rig.drain()
    assert rig.tokens == right_answers(rig, "a")


def test_who_waits_for_memory_alone_is_stalled(make_rig):
    rig = make_rig(2)
    assert not rig.engine.is_stalled
    submit_all(rig, "a", length=12, max_tokens=1)
    rig.engine.admit()
    assert rig.engine.is_stalled
    assert rig.engine.blocks_lacking() == 1
    rig.pool.add_extent(OWN[8:10])
    rig.engine.admit()
    assert not rig.engine.is_stalled


def test_those_that_run_and_the_next_one_need_memory(make_rig):
    rig = make_rig(3)
    submit_all(rig, "abc", max_tokens=5)
    rig.step()
    assert rig.names() == ["a", "b"]  # the third would leave no block for their next steps
    assert rig.engine.blocks_lacking() == 1 + 2 + 2 - 1  # its prompt's, one for each that runs, and those they lack now


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    wanted=st.lists(
        st.tuples(st.integers(1, 14), st.integers(1, 12), st.booleans(), st.booleans(), st.booleans()),
        min_size=1,
        max_size=4,
    ),
    num_blocks=st.integers(7, 12),
    token_budget=st.integers(1, 9),
    data=st.data(),
)
def test_sequences_that_fit_one_by_one_all_end_however_short_memory_is(
    make_rig, wanted, num_blocks, token_budget, data
):
    rig = make_rig(num_blocks, max_sequences=3, token_budget=token_budget)
    answers = {}
    for i, (length, count, is_urgent, saves_kv, is_adopted) in enumerate(wanted):
        prompt = rig.prompt(length, i % 3)
        if is_adopted and count > 1:
            lent = dict(enumerate(rig.lend(prompt, i * 4)))
            rig.submit(str(i), prompt, count, is_urgent=is_urgent, saves_kv=saves_kv, lent=lent, adopted=True)
        else:
            rig.submit(str(i), prompt, count, is_urgent=is_urgent, saves_kv=saves_kv)
        answers[str(i)] = rig.answer(prompt, count)
        for _ in range(data.draw(st.integers(0, 3))):
            rig.step()
    rig.drain(limit=600)
    assert rig.tokens == answers
    assert rig.engine.num_preempted == len(rig.preempted)
    assert rig.is_empty()
