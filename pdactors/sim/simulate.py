"""`simulate`: what `bench serve` measures, of a cluster that is not there. The same requests, the same figures."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pdactors.bench.figures import by_kind, figures, seconds_of
from pdactors.bench.load import Record
from pdactors.bench.measure import PATIENCE_S
from pdactors.bench.rate_search import RateSearch
from pdactors.bench.results import ActorUse, GeneratorUse, Run, ServerResult, Try
from pdactors.bench.serve import MODES, Outcome, Traffic, summarise
from pdactors.bench.trace import read_trace, trace_requests
from pdactors.bench.workload import Request, Source, arrive, make_requests
from pdactors.config.cluster import ClusterConfig, Mode
from pdactors.config.load import load
from pdactors.engine.manifest import Progress, silent
from pdactors.errors import ConfigError
from pdactors.sim.cluster import SimCluster
from pdactors.sim.cost import CostModel, read_cost, roofline
from pdactors.sim.hardware import find_hardware
from pdactors.sim.shapes import ModelSize


@dataclass(frozen=True)
class Costs:
    """Where durations come from: a file of `calibrate`, or a data sheet and devices per engine."""

    file: Path | None = None
    hardware: str = "cpu"
    tensor_parallel: int = 1
    decode_tensor_parallel: int = 0  # of decode engines; 0: as the others

    def of(self, config: ClusterConfig, model: ModelSize) -> CostModel:
        """Return the costs for a cluster's model.

        Raises:
            ConfigError: no such hardware, or the file was measured with another model or dtype.
        """
        if self.file is None:
            return roofline(model, config.model.dtype, find_hardware(self.hardware), self.tensor_parallel)
        cost = read_cost(self.file)
        for key, theirs, ours in (("model", cost.model, model.name), ("dtype", cost.dtype, config.model.dtype)):
            if theirs != ours:
                raise ConfigError(f"{self.file}: was measured with {key} {theirs}; the cluster's is {ours}")
        return cost

    def of_decode(self, config: ClusterConfig, model: ModelSize) -> CostModel:
        """Return the costs of decode engines; raises ConfigError as `of`."""
        return replace(self, tensor_parallel=self.decode_tensor_parallel or self.tensor_parallel).of(config, model)


@dataclass(frozen=True)
class Scene:
    """A cluster to simulate, and what is known of it."""

    config: ClusterConfig
    model: ModelSize
    cost: CostModel
    decode_cost: CostModel | None = None
    knows_caches: bool = True
    wants_gaps: bool = True

    def cluster(self) -> SimCluster:
        """Return a new cluster at time 0."""
        return SimCluster(
            self.config,
            self.model,
            self.cost,
            decode_cost=self.decode_cost,
            wants_gaps=self.wants_gaps,
            knows_caches=self.knows_caches,
        )


@dataclass(frozen=True)
class Simulated:
    """One run: its records, the cluster at its end, and the rate that was offered or, in a search, held."""

    records: list[Record]
    cluster: SimCluster
    rate: float | None
    tries: list[Try]


def simulate(
    file: Path | None,
    traffic: Traffic,
    costs: Costs,
    *,
    sets: Sequence[str] = (),
    modes: Sequence[Mode] = (),
    knows_caches: bool = True,
    progress: Progress = silent,
) -> Outcome:
    """Simulate each mode of the cluster file with the requests that `bench serve` would put to it.

    Raises:
        ConfigError: the cluster file, the trace, the model or its costs are wrong.
    """
    traffic.check()
    base = load(file, sets=sets)
    model = ModelSize.find(base.model.path)
    if traffic.trace is not None:
        next(read_trace(traffic.trace))
    servers: dict[str, ServerResult] = {}
    records: dict[str, list[Record]] = {}
    cost, decode_cost = costs.of(base, model), costs.of_decode(base, model)
    for mode in modes or MODES:
        config = load(file, sets=[*sets, f"cluster.mode={mode}"])
        scene = Scene(config, model, cost, decode_cost, knows_caches=knows_caches)
        runs = []
        for number in range(traffic.rounds):
            progress(f"{mode}, round {number + 1} of {traffic.rounds}", 0, 0)
            runs.append(run_scene(scene, traffic, f"{traffic.seed} {number}"))
        servers[mode] = _result(runs, traffic)
        records[mode] = [record for run in runs for record in run.records]
    cores = sum(sum(node.engines(base.cluster.mode).values()) for node in base.node)
    names = dict.fromkeys((cost.name, decode_cost.name))
    return Outcome(summarise(base, traffic, cores, servers, " and ".join(names)), records)


def run_scene(scene: Scene, traffic: Traffic, seed: str) -> Simulated:
    """Run a cluster once, or once for each rate of a search."""
    vocabulary = range(scene.model.vocab_size)
    if traffic.trace is None:
        source: Source = partial(make_requests, traffic.mix, vocabulary)
    else:
        source = partial(trace_requests, traffic.trace, traffic.scale, vocabulary)
    if not traffic.load.find_max_rate:
        return _run(scene, traffic, source, traffic.load.rate, seed)
    search = RateSearch()
    tries: list[Try] = []
    best: Simulated | None = None
    while (rate := search.next_rate()) is not None:
        found = _run(scene, traffic, source, rate, f"{seed} {len(tries)}")
        share = figures(found.records, seconds_of(found.records), traffic.objective).slo_share
        tries.append(Try(round(rate, 4), share, share >= traffic.objective.share))
        search.add(rate, tries[-1].is_held)
        if tries[-1].is_held or not search.held:
            best = found
    assert best is not None
    return Simulated(best.records, best.cluster, round(search.held, 4), tries)


def _run(scene: Scene, traffic: Traffic, source: Source, rate: float | None, seed: str) -> Simulated:
    load = traffic.load
    cluster = scene.cluster()
    made = source(seed) if rate is None else arrive(source(seed), rate, seed)
    wanted: Iterator[Request] = itertools.islice(made, load.requests)
    if load.concurrency is not None:
        seconds = float("inf") if load.seconds is None else load.seconds
        records = cluster.run_closed(wanted, load.concurrency, patience_s=PATIENCE_S, seconds=seconds)
        return Simulated(records, cluster, rate, [])
    if load.seconds is not None:
        limit_s = load.seconds
        wanted = itertools.takewhile(lambda request: request.at_s < limit_s, wanted)
    patience_s = PATIENCE_S
    if load.find_max_rate:
        patience_s = traffic.objective.patience_s(max((k.answer_tokens[1] for k in traffic.mix), default=0))
    records = cluster.run(wanted, patience_s=patience_s)
    if not records:
        raise ConfigError(f"no request arrives within {load.seconds or 0:g} s; give more seconds, or a higher rate")
    return Simulated(records, cluster, rate, [])


def _result(runs: list[Simulated], traffic: Traffic) -> ServerResult:
    objective = traffic.objective
    parts = []
    for run in runs:
        seconds = seconds_of(run.records)
        actors = {
            name: ActorUse(
                role=engine.member.role,
                busy_share=round(engine.busy_s / seconds, 4),
                way=engine.cost.name,
                preempted=engine.engine.num_preempted,
            )
            for name, engine in run.cluster.engines.items()
        }
        parts.append(
            Run(
                rate=run.rate,
                seconds=round(seconds, 3),
                overall=figures(run.records, seconds, objective),
                kinds={kind: figures(part, seconds, objective) for kind, part in by_kind(run.records).items()},
                actors=actors,
                generator=GeneratorUse(0.0, 0.0),
                tries=run.tries,
            )
        )
    records = [record for run in runs for record in run.records]
    seconds = sum(part.seconds for part in parts)
    rates = sorted(run.rate for run in runs if run.rate is not None)
    return ServerResult(
        rounds=parts,
        overall=figures(records, seconds, objective),
        kinds={kind: figures(part, seconds, objective) for kind, part in by_kind(records).items()},
        max_rate=rates[len(rates) // 2] if traffic.load.find_max_rate else None,
    )
