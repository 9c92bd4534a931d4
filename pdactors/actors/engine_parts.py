"""What an engine is made of, as its spec says."""

from __future__ import annotations

from collections.abc import Callable

from pdactors.actors.extent_keeper import ExtentKeeper
from pdactors.actors.spec import ActorSpec
from pdactors.engine.limits import EngineLimits
from pdactors.engine.model import PagedModel
from pdactors.engine.step_log import StepLog
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.prefix import cache_key
from pdactors.messages import Message


def limits(spec: ActorSpec) -> EngineLimits:
    """Return how much the engine takes on at once."""
    config = spec.config
    return EngineLimits(
        max_sequences=config.engine.max_batch,
        token_budget=config.engine.chunk_tokens,
        eos_ids=frozenset(spec.model.eos_ids),
        prefix_key=cache_key(spec.model.fingerprint, spec.layout.fingerprint),
        prompts_first=config.cluster.mode == "colocated",
        caches=not config.has_store,
    )


def step_log(spec: ActorSpec, model: PagedModel) -> StepLog:
    """Return an account of steps of this model."""
    weight_bytes = model.shape.weight_bytes_as(model.dtype)
    return StepLog(model.shape, weight_bytes, spec.layout.token_bytes, model.machine, spec.threads)


def extents(spec: ActorSpec, arena: Arena, pool: BlockPool, tell: Callable[[Message], bool]) -> ExtentKeeper:
    """Return the keeper of the engine's memory; `tell` reaches the node's migrator."""
    least = spec.layout.num_blocks(spec.model.max_model_len)
    return ExtentKeeper(arena, pool, spec.slot, spec.num_owners, least, tell)
