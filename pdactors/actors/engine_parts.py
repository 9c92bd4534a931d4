"""What an engine is made of, as its spec says."""

from __future__ import annotations

from pdactors.actors.spec import ActorSpec
from pdactors.engine.limits import EngineLimits
from pdactors.engine.model import PagedModel
from pdactors.engine.step_log import StepLog
from pdactors.kv.prefix import cache_key


def limits(spec: ActorSpec) -> EngineLimits:
    """Return how much the engine takes on at once."""
    key = cache_key(spec.model.fingerprint, spec.layout.fingerprint)
    return EngineLimits.of(spec.config, eos_ids=spec.model.eos_ids, prefix_key=key)


def step_log(spec: ActorSpec, model: PagedModel) -> StepLog:
    """Return an account of steps of this model."""
    weight_bytes = model.shape.weight_bytes_as(model.dtype)
    return StepLog(model.shape, weight_bytes, spec.layout.token_bytes, model.machine, spec.threads)
