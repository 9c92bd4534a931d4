"""How long the router's decisions take, by the size of the fleet: real time, of requests in a simulated cluster."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import numpy as np
from msgspec import Struct

from pdactors.bench.workload import CHAT, arrive, make_requests
from pdactors.config.cluster import ClusterConfig, ClusterSection, KVSection, ModelSection, NodeSection, RouterSection
from pdactors.engine.manifest import Progress, silent
from pdactors.sim.cluster import SimCluster
from pdactors.sim.cost import roofline
from pdactors.sim.hardware import HARDWARE
from pdactors.sim.shapes import ModelSize

SIZES = (10, 100, 1000)
WORKERS_PER_RACK = 10
RATE_PER_WORKER = 5.0  # requests a second: engines are about two thirds busy
NUM_REQUESTS = 4000
WARM_UP = 0.25  # of the decisions, which fill the fleet and the caches

P = ParamSpec("P")
R = TypeVar("R")


class Decisions(Struct, frozen=True):
    """What the router took for a decision: where a prompt, or a prefilled sequence, goes."""

    workers: int
    p50_us: float
    p99_us: float


def racks(workers: int, memory_bytes: int) -> ClusterConfig:
    """Return a cluster of so many engines, half of them prefill: ten nodes of one engine in each rack."""
    nodes = tuple(
        NodeSection(
            name=f"n{i}",
            host=f"h{i}",
            rack=f"r{i // WORKERS_PER_RACK}",
            prefill=int(i % 2 == 0),
            decode=int(i % 2 == 1),
        )
        for i in range(workers)
    )
    return ClusterConfig(
        cluster=ClusterSection(mode="disaggregated"),
        model=ModelSection(path="llama-3-8b", max_model_len=8192),
        kv=KVSection(memory=memory_bytes),
        router=RouterSection(max_queue=2**20),
        node=nodes,
    )


def measure(workers: int, num_requests: int = NUM_REQUESTS) -> Decisions:
    """Time the decisions for chats at a fleet that is about two thirds busy."""
    model = ModelSize.find("llama-3-8b")
    cost = roofline(model, "bfloat16", HARDWARE["a100-80g"])
    cluster = SimCluster(racks(workers, 40 << 30), model, cost, wants_gaps=False)
    spent: list[float] = []
    router = cluster.dispatcher
    router.generate = _timed(router.generate, spent)  # type: ignore[method-assign]
    router.prefilled = _timed(router.prefilled, spent)  # type: ignore[method-assign]
    made = arrive(make_requests((CHAT,), range(10_000), "decisions"), RATE_PER_WORKER * workers, "decisions")
    gc.collect()
    gc.freeze()
    try:
        cluster.run(itertools.islice(made, num_requests), patience_s=600.0)
    finally:
        gc.unfreeze()
    kept = np.array(spent[int(WARM_UP * len(spent)) :]) * 1e6
    return Decisions(workers, *(round(float(value), 1) for value in np.percentile(kept, (50, 99))))


def measure_all(num_requests: int = NUM_REQUESTS, progress: Progress = silent) -> list[Decisions]:
    """Measure fleets of 10, 100 and 1,000."""
    found = []
    for done, workers in enumerate(SIZES):
        progress("decisions", done, len(SIZES))
        found.append(measure(workers, num_requests))
    return found


def _timed(action: Callable[P, R], spent: list[float]) -> Callable[P, R]:
    @wraps(action)
    def timed(*arguments: P.args, **keywords: P.kwargs) -> R:
        began = time.perf_counter()
        result = action(*arguments, **keywords)
        spent.append(time.perf_counter() - began)
        return result

    return timed
