"""What one engine step computes: the one planner behind every mode. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Work:
    """What one sequence still has to compute: 1 token while it decodes, more while its prompt is not done."""

    num_tokens: int
    is_prompt: bool
    is_urgent: bool = True  # interactive before batch


@dataclass(frozen=True)
class Portion:
    """`num_tokens` of the sequence at `index` of the list that was planned over."""

    index: int
    num_tokens: int


def plan_step(
    works: Sequence[Work], *, token_budget: int, max_sequences: int, prompts_first: bool = False
) -> list[Portion]:
    """Choose what the next step computes.

    Decoding sequences come first, then prompt chunks in the order given (interactive before batch) until
    `token_budget` tokens or `max_sequences` sequences are planned; a prompt is cut to what the budget leaves.
    With `prompts_first` (mode `colocated`) waiting prompts run alone and whole, however long, before any decode;
    several share a step while they fit the budget.
    """
    prompts = [i for i, work in enumerate(works) if work.is_prompt]
    prompts.sort(key=lambda i: not works[i].is_urgent)
    if prompts_first and prompts:
        return _whole_prompts(works, prompts, token_budget, max_sequences)
    plan = [Portion(i, work.num_tokens) for i, work in enumerate(works) if not work.is_prompt][:max_sequences]
    left = token_budget - sum(portion.num_tokens for portion in plan)
    for i in prompts:
        if left <= 0 or len(plan) >= max_sequences:
            break
        plan.append(Portion(i, min(works[i].num_tokens, left)))
        left -= plan[-1].num_tokens
    return plan


def _whole_prompts(
    works: Sequence[Work], prompts: Sequence[int], token_budget: int, max_sequences: int
) -> list[Portion]:
    plan: list[Portion] = []
    left = token_budget
    for i in prompts[:max_sequences]:
        if plan and works[i].num_tokens > left:
            break
        plan.append(Portion(i, works[i].num_tokens))
        left -= works[i].num_tokens
    return plan
