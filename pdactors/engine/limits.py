"""`EngineLimits`: what the cluster file and the model say of one engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from pdactors.config.cluster import ClusterConfig


@dataclass(frozen=True)
class EngineLimits:
    """How much one engine takes on at once."""

    max_sequences: int
    token_budget: int
    eos_ids: frozenset[int]
    prefix_key: bytes
    prompts_first: bool = False  # mode colocated
    caches: bool = True  # full blocks can be found here; else sequences share none, so that each can be given away

    @classmethod
    def of(cls, config: ClusterConfig, *, eos_ids: Collection[int], prefix_key: bytes) -> EngineLimits:
        """Take them out of a cluster file; what the model says comes beside it."""
        return cls(
            max_sequences=config.engine.max_batch,
            token_budget=config.engine.chunk_tokens,
            eos_ids=frozenset(eos_ids),
            prefix_key=prefix_key,
            prompts_first=config.cluster.mode == "colocated",
            caches=not config.has_store,
        )
