"""Who gets in: each limit from both sides."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors.errors import BadRequest, Overloaded, PromptTooLong
from pdactors.messages import Generate, Sampling
from pdactors.policy.admission import NUM_FINISHES, Limits, Pace, refusal
from pdactors.token_ids import TokenIds

LIMITS = Limits(block_tokens=4, max_model_len=64, max_queue=3, request_timeout_s=100.0, prefix_key=b"key")


def refused(prompt, answer=8, sizes=(), queued=0, retry_after_s=1.0):
    ask = Generate("r", TokenIds.of(range(prompt)), Sampling(max_tokens=answer))
    return refusal(ask, LIMITS, sizes, queued, retry_after_s)


# ---- Length --------


def test_a_prompt_must_leave_room_for_an_answer():
    assert refused(63) is None
    error = refused(64)
    assert isinstance(error, PromptTooLong)
    assert "64 tokens" in error.message
    assert "model.max_model_len 64" in error.message


@pytest.mark.parametrize("sizes", [(20,), (20, 8), (8, 20), (20, 20)])
def test_the_largest_engine_decides_what_memory_holds(sizes):
    assert refused(13, 8, sizes) is None
    error = refused(20, 1, sizes)
    assert isinstance(error, PromptTooLong)
    assert error.message == "prompt has 20 tokens; kv.memory holds 20 of a sequence"


def test_prompt_and_answer_count_together_but_for_the_last_token_which_is_never_stored():
    assert refused(13, 8, (20,)) is None
    error = refused(13, 9, (20,))
    assert isinstance(error, BadRequest)
    assert error.message.startswith("max_tokens: 9 after a prompt of 13 tokens")


@pytest.mark.parametrize("sizes", [(), (0,)])
def test_memory_that_nobody_has_told_of_yet_refuses_nothing(sizes):
    assert refused(63, 1000, sizes) is None


@given(st.integers(1, 80), st.integers(1, 80), st.lists(st.integers(0, 100), max_size=3))
def test_what_is_taken_fits_into_some_engine_whole(prompt, answer, sizes):
    size = max(sizes, default=0)
    fits = prompt < LIMITS.max_model_len and (not size or (prompt < size and prompt + answer - 1 <= size))
    assert (refused(prompt, answer, sizes) is None) == fits


# ---- The queue --------


def test_a_full_queue_refuses_and_says_when_to_come_back():
    assert refused(5, queued=2) is None
    error = refused(5, queued=3, retry_after_s=4.5)
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 4.5
    assert error.message == "3 requests are waiting (router.max_queue)"


def test_what_can_never_be_served_is_not_told_to_come_back():
    error = refused(64, queued=3, retry_after_s=4.5)
    assert isinstance(error, PromptTooLong)
    assert error.retry_after_s is None


# ---- The pace --------


def pace(*finished_at):
    made = Pace()
    for at in finished_at:
        made.finished(at)
    return made


@pytest.mark.parametrize(("finished_at", "now"), [((), 5.0), ((1.0,), 5.0), ((5.0, 5.0), 5.0)])
def test_without_a_rate_it_is_a_second(finished_at, now):
    assert pace(*finished_at).retry_after_s(7, now) == 1.0


def test_the_queue_over_the_rate():
    assert pace(1.0, 2.0, 3.0, 4.0).retry_after_s(2, 5.0) == 2.0  # 4 in 4 s


def test_it_is_never_at_once():
    assert pace(1.0, 1.1, 1.2, 1.3).retry_after_s(0, 1.4) == 0.1


def test_a_pause_makes_the_wait_longer():
    waits = [pace(1.0, 2.0).retry_after_s(4, now) for now in (3.0, 10.0, 100.0)]
    assert all(before < after for before, after in pairwise(waits))


def test_only_the_latest_finishes_count():
    made = pace(0.0, *(1000.0 + i for i in range(NUM_FINISHES)))
    assert made.retry_after_s(10, 1000.0 + NUM_FINISHES) == 10.0
