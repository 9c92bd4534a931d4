from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors.engine.sequence import Sequence
from pdactors.messages import Lease, Sampling, Segment
from pdactors.token_ids import TokenIds


def make(prompt=(5, 6, 7), **fields):
    return Sequence("r", 2, prompt, Sampling(), **fields)


@pytest.mark.parametrize("kind", [tuple, TokenIds.of])
@given(
    prompt=st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6),
    tokens=st.lists(st.integers(0, 2**31 - 1), max_size=6),
    data=st.data(),
)
def test_token_ids_run_over_prompt_and_answer(kind, prompt, tokens, data):
    sequence = make(kind(prompt), tokens=tokens)
    known = prompt + tokens
    start = data.draw(st.integers(0, len(known)))
    stop = data.draw(st.integers(start, len(known)))
    assert sequence.token_ids(start, stop) == known[start:stop]
    assert sequence.num_tokens == len(known)


def test_a_new_sequence_has_its_prompt_to_compute():
    sequence = make()
    assert (sequence.num_tokens, sequence.num_pending, sequence.is_prompt) == (3, 3, True)


def test_a_prompt_without_its_last_token_is_still_a_prompt():
    assert make(num_stored=2).is_prompt


def test_a_sequence_that_decodes_has_one_token_to_compute():
    sequence = make(tokens=[9], num_stored=3)
    assert (sequence.num_tokens, sequence.num_pending, sequence.is_prompt) == (4, 1, False)


def test_known_tokens_that_are_not_stored_are_computed_like_a_prompt():
    sequence = make(tokens=[9, 9], num_stored=3)
    assert (sequence.num_pending, sequence.is_prompt) == (2, True)


def test_borrowed_blocks_are_not_its_own():
    assert make(blocks=[4, 5, 6, 7], borrowed={7, 5}).own_blocks == [4, 6]
    assert make(blocks=[4, 5]).own_blocks == [4, 5]


def test_its_leases_are_those_of_its_segments_each_once():
    one, other = Lease(0, 5), Lease(3, 5)
    segments = [Segment("a", one, 0, (4,)), Segment("b", other, 1, (5, 6)), Segment("a", one, 3, (7,))]
    assert make(segments=segments).leases == {one, other}
    assert make().leases == set()


def test_two_sequences_share_none_of_what_they_hold():
    one, other = make(), make()
    for name in ("tokens", "blocks", "borrowed", "lent", "kept", "segments", "digests"):
        assert getattr(one, name) is not getattr(other, name)


def test_it_is_named_by_request_and_attempt():
    assert make().key == ("r", 2)


def test_two_sequences_are_never_equal():
    assert make() != make()


def test_its_table_is_described_run_by_run_under_whoever_lends_it():
    theirs, ours = Lease(7, 1), Lease(8, 1)
    sequence = make()
    sequence.segments = [Segment("d", theirs, 0, (100, 101, 102, 103))]
    sequence.blocks = [100, 101, 7, 103, 8]
    sequence.borrowed = {100, 101, 103}
    assert sequence.table_segments("p", ours) == (
        Segment("d", theirs, 0, (100, 101)),
        Segment("p", ours, 2, (7,)),
        Segment("d", theirs, 3, (103,)),
        Segment("p", ours, 4, (8,)),
    )


@pytest.mark.parametrize(
    ("borrowed", "announced", "stored", "runs"),
    [
        (set(), 0, 15, [(0, (10, 11, 12))]),
        ({10}, 0, 12, [(1, (11, 12))]),
        ({11}, 0, 16, [(0, (10,)), (2, (12, 13))]),
        ({11, 13}, 1, 16, [(2, (12,))]),
        ({10, 11, 12, 13}, 0, 16, []),
        (set(), 2, 11, []),
    ],
)
def test_what_is_not_announced_lies_in_runs_around_what_is_borrowed(borrowed, announced, stored, runs):
    sequence = make(blocks=[10, 11, 12, 13], borrowed=borrowed, num_announced=announced, num_stored=stored, ship_to="m")
    assert sequence.unannounced(4) == runs


def test_nothing_is_announced_for_nobody_or_once_the_prompt_is_complete():
    assert make(blocks=[1, 2], num_stored=8).unannounced(4) == []
    assert make(blocks=[1, 2], num_stored=8, ship_to="m", tokens=[7]).unannounced(4) == []
    assert make(blocks=[1, 2], num_stored=8, ship_to="m", tokens=[7], num_given=1).unannounced(4) == [(0, (1, 2))]
