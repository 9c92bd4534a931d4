from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdactors.policy.batching import Portion, Work, plan_step

decodes = st.builds(Work, st.just(1), st.just(False), st.booleans())
prompts = st.builds(Work, st.integers(1, 300), st.just(True), st.booleans())
mixed = st.lists(decodes | prompts, max_size=12)
budgets = st.integers(1, 200)
most = st.integers(1, 16)


def urgency_order(works):
    """Return the prompts' indices, interactive ones first, otherwise as they came."""
    found = [i for i, work in enumerate(works) if work.is_prompt]
    return [i for i in found if works[i].is_urgent] + [i for i in found if not works[i].is_urgent]


@given(mixed, budgets, most, st.booleans())
def test_a_plan_takes_each_sequence_once_and_no_more_than_it_has(works, budget, max_sequences, prompts_first):
    plan = plan_step(works, token_budget=budget, max_sequences=max_sequences, prompts_first=prompts_first)
    assert len({portion.index for portion in plan}) == len(plan) <= max_sequences
    assert all(1 <= portion.num_tokens <= works[portion.index].num_tokens for portion in plan)


@given(mixed, budgets, most, st.booleans())
def test_there_is_progress_whenever_there_is_work(works, budget, max_sequences, prompts_first):
    plan = plan_step(works, token_budget=budget, max_sequences=max_sequences, prompts_first=prompts_first)
    assert bool(plan) == bool(works)


@given(mixed, budgets)
def test_the_budget_is_exceeded_by_decodes_only(works, budget):
    plan = plan_step(works, token_budget=budget, max_sequences=len(works))
    num_decodes = sum(not work.is_prompt for work in works)
    assert sum(portion.num_tokens for portion in plan) <= max(budget, num_decodes)


@given(mixed, budgets)
def test_every_decode_is_in_and_comes_first(works, budget):
    plan = plan_step(works, token_budget=budget, max_sequences=max(1, len(works)))
    expected = [Portion(i, 1) for i, work in enumerate(works) if not work.is_prompt]
    assert plan[: len(expected)] == expected


@given(mixed, budgets, most)
def test_prompts_follow_in_order_of_urgency_and_only_the_last_is_cut(works, budget, max_sequences):
    plan = plan_step(works, token_budget=budget, max_sequences=max_sequences)
    chunks = [portion for portion in plan if works[portion.index].is_prompt]
    assert [portion.index for portion in chunks] == urgency_order(works)[: len(chunks)]
    assert all(portion.num_tokens == works[portion.index].num_tokens for portion in chunks[:-1])


@given(mixed, budgets)
def test_no_budget_is_wasted_while_a_prompt_waits(works, budget):
    plan = plan_step(works, token_budget=budget, max_sequences=max(1, len(works)))
    pending = sum(work.num_tokens for work in works)
    num_decodes = sum(not work.is_prompt for work in works)
    assert sum(portion.num_tokens for portion in plan) == min(pending, max(budget, num_decodes))


@given(mixed, budgets, most)
def test_prompts_first_runs_whole_prompts_alone(works, budget, max_sequences):
    plan = plan_step(works, token_budget=budget, max_sequences=max_sequences, prompts_first=True)
    order = urgency_order(works)
    if not order:
        assert plan == plan_step(works, token_budget=budget, max_sequences=max_sequences)
        return
    assert [portion.index for portion in plan] == order[: len(plan)]
    assert all(portion.num_tokens == works[portion.index].num_tokens for portion in plan)
    assert len(plan) == 1 or sum(portion.num_tokens for portion in plan) <= budget


@given(mixed, budgets, most)
def test_prompts_first_packs_as_many_as_fit(works, budget, max_sequences):
    plan = plan_step(works, token_budget=budget, max_sequences=max_sequences, prompts_first=True)
    rest = urgency_order(works)[len(plan) :]
    if plan and works[plan[0].index].is_prompt and rest and len(plan) < max_sequences:
        assert sum(portion.num_tokens for portion in plan) + works[rest[0]].num_tokens > budget


def test_a_mixed_step_by_hand():
    works = [Work(100, True, is_urgent=False), Work(1, False), Work(40, True), Work(1, False), Work(30, True)]
    plan = plan_step(works, token_budget=64, max_sequences=8)
    assert plan == [Portion(1, 1), Portion(3, 1), Portion(2, 40), Portion(4, 22)]


def test_a_prompt_longer_than_the_budget_runs_whole_in_colocated_mode():
    works = [Work(1, False), Work(1000, True), Work(1, True)]
    assert plan_step(works, token_budget=64, max_sequences=8, prompts_first=True) == [Portion(1, 1000)]
