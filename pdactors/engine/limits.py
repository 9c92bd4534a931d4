"""`EngineLimits`: what the cluster file and the model say of one engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLimits:
    """How much one engine takes on at once."""

    max_sequences: int
    token_budget: int
    eos_ids: frozenset[int]
    prefix_key: bytes
    prompts_first: bool = False  # mode colocated
    caches: bool = True  # full blocks can be found here; else sequences share none, so that each can be given away
