from __future__ import annotations

import pytest

from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.machine import Machine
from pdactors.engine.shape import ModelShape
from pdactors.engine.step import Step, StepResult
from pdactors.engine.step_log import NUM_STEPS, SLOW_LOG_PERIOD_S, StepLog
from pdactors.messages import STEP_BOUNDS_S, PhaseUse, StepTimes

SHAPE = ModelShape(
    architecture="x",
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=5,
    hidden_size=3,
    vocab_size=100,
    max_position=64,
    eos_ids=(),
    weight_bytes=0,
    num_floats=1000,
    other_bytes=0,
)
WEIGHT_BYTES, KV_TOKEN_BYTES = 2000, 10
MACHINE = Machine(flops_per_s=1e6, bytes_per_s=1e5)
ATTENTION = 4 * 5 * 4 * 3  # FLOPs for one token and one token of its context


def make_log(threads: int = 1) -> StepLog:
    return StepLog(SHAPE, WEIGHT_BYTES, KV_TOKEN_BYTES, MACHINE, threads)


def make_step(*spans: tuple[int, int]) -> Step:
    """Return a step of spans given as new tokens and context."""
    planned, start = [], 0
    for num_tokens, context_len in spans:
        planned.append(Span(start, num_tokens, context_len, ()))
        start += num_tokens
    return Step(
        [(None, span.num_tokens) for span in planned],
        StepBatch([0] * start, [0] * start, planned, range(start)),
        [],
        [],
    )


def took(duration_s: float, attention_s: float = 0.0, sampling_s: float = 0.0) -> StepResult:
    return StepResult([], duration_s, attention_s, sampling_s)


# ---- Durations --------


def test_steps_are_sorted_by_phase_batch_and_how_long_they_took():
    log = make_log()
    for batch, duration_s in ((1, 0.001), (3, 0.0011), (4, 0.0025), (4, 41.0), (5, 0.5)):
        log.add(make_step(*[(1, 7)] * batch), took(duration_s))
    log.add(make_step((4, 4), (1, 9), (1, 9)), took(0.5))
    found = {(c.phase, c.max_batch): c for c in log.counts()}
    assert found.keys() == {("decode", 1), ("decode", 4), ("decode", 8), ("prefill", 4)}
    assert found["decode", 1].counts == (1, *[0] * len(STEP_BOUNDS_S))
    assert found["decode", 4].counts == (0, 2, *[0] * (len(STEP_BOUNDS_S) - 2), 1)
    assert found["decode", 4].seconds == 0.0011 + 0.0025 + 41.0
    assert sum(found["decode", 8].counts) == sum(found["prefill", 4].counts) == 1


# ---- Shares --------


def test_nothing_is_achieved_before_the_first_step():
    log = make_log()
    assert log.uses() == (PhaseUse(), PhaseUse())
    assert log.times() == StepTimes()


def test_the_shares_of_a_decode_step_follow_from_its_duration():
    log = make_log()
    log.add(make_step((1, 7), (1, 13)), took(0.25))
    flops = 2 * 1000 * 2 + ATTENTION * (7 + 13)
    read = WEIGHT_BYTES + KV_TOKEN_BYTES * (7 + 13)
    expected = PhaseUse(1, round(flops / 0.25 / 1e6, 4), round(read / 0.25 / 1e5, 4))
    assert log.uses() == (PhaseUse(), expected)
    assert expected == PhaseUse(1, 0.0352, 0.088)


def test_each_token_of_a_chunk_attends_to_what_is_before_it_and_to_itself():
    log = make_log()
    log.add(make_step((4, 4), (2, 9)), took(0.5))
    context = (1 + 2 + 3 + 4) + (8 + 9)
    flops = 2 * 1000 * 6 + ATTENTION * context
    read = WEIGHT_BYTES + KV_TOKEN_BYTES * (4 + 9)
    assert log.uses() == (PhaseUse(1, round(flops / 0.5 / 1e6, 4), round(read / 0.5 / 1e5, 4)), PhaseUse())


def test_a_step_with_any_part_of_a_prompt_is_a_prefill_step():
    log = make_log()
    log.add(make_step((1, 30), (2, 2)), took(1.0))
    log.add(make_step((1, 30)), took(1.0))
    assert [use.num_steps for use in log.uses()] == [1, 1]


def test_shares_are_work_over_time_not_the_mean_of_shares():
    log = make_log()
    for seconds in (0.1, 0.9):
        log.add(make_step((1, 1)), took(seconds))
    _, decode = log.uses()
    assert decode == PhaseUse(2, round(2 * (2000 + ATTENTION) / 1.0 / 1e6, 4), round(2 * 2010 / 1.0 / 1e5, 4))


def test_more_threads_could_do_more():
    shares = []
    for threads in (1, 4):
        log = make_log(threads)
        log.add(make_step((1, 7)), took(0.01))
        shares.append(log.uses()[1])
    assert shares[1].flops_share == pytest.approx(shares[0].flops_share / 4, abs=1e-4)
    assert shares[1].bandwidth_share == pytest.approx(shares[0].bandwidth_share / 4, abs=1e-4)


def test_prefill_uses_more_of_the_arithmetic_and_decode_more_of_the_memory():
    log = make_log()
    log.add(make_step((50, 50)), took(0.15))
    log.add(make_step((1, 51)), took(0.02))
    prefill, decode = log.uses()
    assert prefill.flops_share > prefill.bandwidth_share
    assert decode.flops_share < decode.bandwidth_share


# ---- Durations --------


def test_durations_are_those_of_decode_steps_in_milliseconds():
    log = make_log()
    log.add(make_step((9, 9)), took(5.0))
    assert log.times() == StepTimes(5000.0, 5000.0, 5000.0)  # as long as there are no others
    for milliseconds in range(1, 102):
        log.add(make_step((1, 9)), took(milliseconds / 1000))
    assert log.times() == StepTimes(51.0, 51.0, 100.0)


def test_old_steps_are_forgotten():
    log = make_log()
    log.add(make_step((1, 9)), took(100.0))
    for _ in range(NUM_STEPS):
        log.add(make_step((1, 1)), took(0.5))
    assert log.times().mean == 500.0
    _, decode = log.uses()
    assert decode == PhaseUse(NUM_STEPS, round((2000 + ATTENTION) / 0.5 / 1e6, 4), round(2010 / 0.5 / 1e5, 4))


# ---- Slow steps --------


def test_a_slow_step_says_where_the_time_went():
    log = make_log()
    step, result = make_step((1, 7), (1, 13)), took(0.25, attention_s=0.125, sampling_s=0.05)
    log.add(step, result)
    assert log.slow(step, result, waited_s=0.0123, slow_ms=100, now=50.0) == {
        "ms": 250.0,
        "batch": 2,
        "kv_tokens": 20,
        "attention_ms": 125.0,
        "gemm_ms": 75.0,
        "sampling_ms": 50.0,
        "waiting_ms": 12.3,
        "flops_share": 0.0352,
        "bandwidth_share": 0.088,
    }


def test_only_decode_steps_over_the_limit_are_slow():
    log = make_log()
    assert log.slow(make_step((1, 7)), took(0.1), 0.0, slow_ms=100, now=50.0) is None
    assert log.slow(make_step((2, 7)), took(9.0), 0.0, slow_ms=100, now=50.0) is None
    assert log.slow(make_step((1, 7)), took(0.101), 0.0, slow_ms=100, now=50.0) is not None


def test_at_most_one_slow_step_a_second_is_told_of():
    log = make_log()
    told = [
        now
        for now in (0.0, 0.2, 0.999, 1.0, 1.5, 1.999, 2.0, 7.0, 7.9)
        if log.slow(make_step((1, 7)), took(0.5), 0.0, slow_ms=100, now=now)
    ]
    assert SLOW_LOG_PERIOD_S == 1.0
    assert told == [0.0, 1.0, 2.0, 7.0]


def test_steps_that_are_not_slow_do_not_hold_back_one_that_is():
    log = make_log()
    log.slow(make_step((1, 7)), took(0.01), 0.0, slow_ms=100, now=10.0)
    assert log.slow(make_step((1, 7)), took(0.5), 0.0, slow_ms=100, now=10.1) is not None


def test_the_head_multiplies_only_the_rows_whose_logits_are_wanted():
    log = make_log()
    step = make_step((4, 4))
    log.add(Step(step.portions, StepBatch([0] * 4, [0] * 4, step.batch.spans, [3]), [], []), took(0.25))
    attention = ATTENTION * 4 * 2.5
    assert log.uses()[0].flops_share == round((2 * (700 * 4 + 300) + attention) / 0.25 / 1e6, 4)
