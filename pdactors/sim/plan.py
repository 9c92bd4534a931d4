"""`plan`: the cheapest cluster that holds a rate within an objective, by simulating those that could."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from pdactors.bench.figures import Figures, Objective, figures, seconds_of, tpot_ms, ttft_ms
from pdactors.bench.load import Record
from pdactors.bench.rate_search import RateSearch
from pdactors.bench.workload import Kind, arrive, make_requests
from pdactors.config.cluster import (
    ClusterConfig,
    ClusterSection,
    EngineSection,
    KVSection,
    Mode,
    ModelSection,
    NodeSection,
    RouterSection,
)
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.shape import ModelDtype
from pdactors.errors import ConfigError
from pdactors.sim.cluster import SimCluster
from pdactors.sim.cost import CostModel, StepWork, roofline
from pdactors.sim.hardware import Hardware
from pdactors.sim.shapes import ModelSize

DEVICES_PER_HOST = 8
MEMORY_SHARE = 0.9  # of a device, for weights, activations and KV
ACTIVATION_BYTES = 2e9  # a device
MIN_SECONDS, MAX_REQUESTS, MIN_REQUESTS = 60.0, 3000, 200
CHUNKS = (512, 2048, 8192)
BATCHES = (32, 128, 256)
HIGHER = (1.25, 1.5, 2.0, 3.0)  # times the rate, to see what gives first
MAX_QUEUE = 2**20


class Cluster(Struct, frozen=True):
    """One cluster that was considered. In modes that do not separate, `prefill` counts workers and `decode` is 0."""

    mode: Mode
    tensor_parallel: int
    prefill: int
    decode: int
    chunk_tokens: int
    max_batch: int

    @property
    def num_engines(self) -> int:
        return self.prefill + self.decode

    @property
    def num_devices(self) -> int:
        return self.num_engines * self.tensor_parallel

    @property
    def words(self) -> str:
        """What it is, in words."""
        engines = f"{self.prefill} prefill + {self.decode} decode" if self.decode else f"{self.prefill} workers"
        width = f" of {self.tensor_parallel} devices" if self.tensor_parallel > 1 else ""
        return f"{self.mode}, {engines}{width}, chunks of {self.chunk_tokens}, batches of {self.max_batch}"


class Candidate(Struct, frozen=True):
    """A cluster and what came of it at a rate: `limit` says in words what keeps it from more."""

    cluster: Cluster
    devices: int
    price: float
    figures: Figures
    busy: dict[str, float]  # mean share of each role's engines
    limit: str
    is_held: bool


class Ratio(Struct, frozen=True):
    """The highest rate that so many prefill and decode engines hold."""

    prefill: int
    decode: int
    max_rate: float
    per_device: float


class PlanResult(Struct, frozen=True):
    """`best` is the cheapest that holds the rate, None if none does; `others` the cheapest of each other mode."""

    model: str
    hardware: str
    workload: str
    rate: float
    objective: Objective
    best: Candidate | None
    others: list[Candidate]
    tried: int
    ratios: list[Ratio]


# What sets kvstore apart is what it keeps for others, and a plan's prompts have nothing in common.
MODES: tuple[Mode, ...] = ("colocated", "chunked", "disaggregated")


@dataclass
class Planner:
    """What is asked for. Simulations are kept, so that nothing is run twice."""

    model: ModelSize
    dtype: ModelDtype
    hardware: Hardware
    mix: tuple[Kind, ...]
    workload: str
    rate: float
    objective: Objective
    max_devices: int = 64
    widths: tuple[int, ...] = ()  # devices of an engine; empty: those that the model fits on
    modes: tuple[Mode, ...] = MODES
    max_model_len: int = 0
    seed: int = 1
    num_tried: int = 0
    _found: dict[tuple[Cluster, float], Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        longest = max(kind.most_tokens for kind in self.mix)
        self.max_model_len = self.max_model_len or longest
        if longest > self.model.max_position:
            raise ConfigError(f"{self.model.name} has {self.model.max_position} positions; requests take {longest}")
        fitting = tuple(width for width in (1, 2, 4, 8) if self._fits(width))
        self.widths = tuple(width for width in self.widths or fitting if self._fits(width))
        if not self.widths:
            raise ConfigError(f"{self.model.name} does not fit on {self.hardware.name}, or its KV does not")

    def plan(self, progress: Progress = silent) -> PlanResult:
        """Search. Returns the cheapest of each mode, cheapest first; of equals the one with the highest goodput."""
        found = [self._cheapest(mode, progress) for mode in self.modes]
        held = sorted((candidate for candidate in found if candidate is not None), key=_worth)
        held = [replace(candidate, limit=self.limit(candidate.cluster)) for candidate in held]
        best = held[0] if held else None
        separated = next((c.cluster for c in held if c.cluster.decode), None)
        ratios = self.ratios(separated, progress) if separated is not None else []
        name = f"{self.model.name} {self.dtype}"
        return PlanResult(
            name, self.hardware.name, self.workload, self.rate, self.objective, best, held[1:], self.num_tried, ratios
        )

    def ratios(self, like: Cluster, progress: Progress = silent) -> list[Ratio]:
        """Return the highest rate of every ratio of prefill to decode with as many engines as a cluster has."""
        found = []
        for prefill in range(1, like.num_engines):
            progress("ratios", prefill, like.num_engines - 1)
            cluster = replace(like, prefill=prefill, decode=like.num_engines - prefill)
            rate = self.max_rate(cluster)
            found.append(Ratio(prefill, cluster.decode, rate, round(rate / cluster.num_devices, 4)))
        return found

    def max_rate(self, cluster: Cluster) -> float:
        """Return the highest rate that a cluster holds; 0.0 if none that is tried."""
        search = RateSearch(start=self.rate)
        while (rate := search.next_rate()) is not None:
            search.add(rate, self.at_rate(cluster, rate).is_held)
        return round(search.held, 3)

    def limit(self, cluster: Cluster) -> str:
        """Say what keeps a cluster from a higher rate: what is missed at the first one that it does not hold."""
        for factor in HIGHER:
            found = self.at_rate(cluster, self.rate * factor)
            if not found.is_held:
                return f"at {self.rate * factor:g}/s {found.limit}"
        return f"holds {self.rate * factor:g}/s, too"

    def try_out(self, cluster: Cluster) -> Candidate:
        """Simulate a cluster at the rate that is asked for."""
        return self.at_rate(cluster, self.rate)

    def at_rate(self, cluster: Cluster, rate: float) -> Candidate:
        """Simulate a cluster at a rate."""
        known = self._found.get((cluster, rate))
        if known is not None:
            return known
        self.num_tried += 1
        simulated = SimCluster(self.config(cluster), self.model, self._cost(cluster.tensor_parallel), wants_gaps=False)
        made = arrive(make_requests(self.mix, range(self.model.vocab_size), f"{self.seed} 0"), rate, f"{self.seed} 0")
        answer = max(kind.answer_tokens[1] for kind in self.mix)
        seconds = MIN_SECONDS + 3 * answer * self.objective.tpot_ms / 1000
        wanted = max(MIN_REQUESTS, min(MAX_REQUESTS, round(rate * seconds)))
        lost = _Misses(self.objective, wanted)
        records = simulated.run(
            itertools.islice(made, wanted), patience_s=self.objective.patience_s(answer), is_enough=lost.is_lost
        )
        result = figures(records, seconds_of(records), self.objective)
        busy: dict[str, list[float]] = {}
        for engine in simulated.engines.values():
            busy.setdefault(engine.member.role, []).append(engine.busy_s / max(seconds_of(records), 1e-9))
        shares = {role: round(sum(values) / len(values), 3) for role, values in busy.items()}
        candidate = Candidate(
            cluster=cluster,
            devices=cluster.num_devices,
            price=round(cluster.num_devices * self.hardware.price, 4),
            figures=result,
            busy=shares,
            limit=_limit(records, self.objective, simulated, shares),
            is_held=result.slo_share >= self.objective.share,
        )
        self._found[cluster, rate] = candidate
        return candidate

    def config(self, cluster: Cluster) -> ClusterConfig:
        """Return the cluster file of a cluster: a node for each engine, hosts of 8 devices, one rack."""
        per_host = max(1, DEVICES_PER_HOST // cluster.tensor_parallel)
        nodes = tuple(
            NodeSection(
                name=f"n{i}",
                host=f"h{i // per_host}",
                prefill=int(i < cluster.prefill),
                decode=int(i >= cluster.prefill),
            )
            for i in range(cluster.num_engines)
        )
        return ClusterConfig(
            cluster=ClusterSection(mode=cluster.mode),
            model=ModelSection(path=self.model.name, dtype=self.dtype, max_model_len=self.max_model_len),
            engine=EngineSection(max_batch=cluster.max_batch, chunk_tokens=cluster.chunk_tokens),
            kv=KVSection(memory=int(self._kv_bytes(cluster.tensor_parallel))),
            router=RouterSection(max_queue=MAX_QUEUE, request_timeout_s=604_800.0),
            node=nodes,
        )

    # ---- The search --------

    def _cheapest(self, mode: Mode, progress: Progress) -> Candidate | None:
        """Add engines of each width until the rate is held; then see whether another chunk or batch needs fewer."""
        best: Candidate | None = None
        for width in self.widths:
            most = self.max_devices // width if best is None else best.devices // width
            for count in range(self._fewest(mode, width), most + 1):
                progress(f"{mode}, {count} engines of {width}", 0, 0)
                found = self._held(self._clusters(mode, width, count, CHUNKS[1:2], BATCHES[1:2]))
                if found:
                    fewer = self._held(self._clusters(mode, width, count - 1, CHUNKS, BATCHES)) if count > 1 else []
                    found = fewer or found + self._held(self._clusters(mode, width, count, CHUNKS, BATCHES))
                    best = min([*found, *([best] if best else [])], key=_worth)
                    break
        return best

    def _held(self, clusters: Iterator[Cluster]) -> list[Candidate]:
        return [candidate for candidate in map(self.try_out, clusters) if candidate.is_held]

    def _clusters(
        self, mode: Mode, width: int, count: int, chunks: Sequence[int], batches: Sequence[int]
    ) -> Iterator[Cluster]:
        """Yield the clusters of so many engines, with the ratios that come near the work's own."""
        if mode != "disaggregated":
            sizes = chunks if mode == "chunked" else chunks[:1]  # whole prompts, whatever the budget
            yield from (Cluster(mode, width, count, 0, *sizes) for sizes in itertools.product(sizes, batches))
            return
        for batch in batches:
            prompts, decodes = self._demand(width, batch)
            even = round(count * prompts / (prompts + decodes))
            for prefill in sorted({min(max(1, even + more), count - 1) for more in (-1, 0, 1)} - {0}):
                yield Cluster(mode, width, prefill, count - prefill, chunks[-1], batch)

    def _fewest(self, mode: Mode, width: int) -> int:
        """Return the engines that the work takes at least, if they were never idle."""
        prompts, decodes = self._demand(width, max(BATCHES))
        if mode == "disaggregated":
            return max(2, math.ceil(prompts) + math.ceil(decodes))
        return max(1, math.ceil(prompts + decodes))

    def _demand(self, width: int, batch: int) -> tuple[float, float]:
        """Return how many engines prompts and decodes keep busy, without waits and with full batches."""
        cost = self._cost(width)
        prompts = decodes = 0.0
        for kind in self.mix:
            tokens, answer = sum(kind.prompt_tokens) / 2, sum(kind.answer_tokens) / 2
            alone = cost.body.at(tokens) - cost.step(StepWork(0, 0, 0, 0.0, 0))
            prompts += max(0.0, min(alone, _per_token(cost, CHUNKS[-1]) * tokens)) + cost.pair_s * tokens**2 / 2
            context = tokens + answer / 2
            decodes += answer * cost.step(StepWork(batch, batch, int(batch * context), 0.0, batch)) / batch
        return self.rate * prompts / len(self.mix), self.rate * decodes / len(self.mix)

    # ---- What fits --------

    def _kv_bytes(self, width: int) -> float:
        devices = width * (MEMORY_SHARE * self.hardware.memory_bytes - ACTIVATION_BYTES)
        return devices - self.model.weight_bytes(self.dtype)

    def _fits(self, width: int) -> bool:
        token_bytes = 2 * self.model.num_layers * self.model.num_kv_heads * self.model.head_dim * 2
        return self.model.num_heads % width == 0 and self._kv_bytes(width) > 2 * self.max_model_len * token_bytes

    def _cost(self, width: int) -> CostModel:
        return _cost(self.model, self.dtype, self.hardware, width)


@dataclass
class _Misses:
    """Counts what missed the objective, so that a run ends once it cannot be held any more."""

    objective: Objective
    wanted: int
    count: int = 0

    def is_lost(self, record: Record) -> bool:
        self.count += not self.objective.is_met_by(record)
        return self.count > 2 * (1 - self.objective.share) * self.wanted


@cache
def _cost(model: ModelSize, dtype: ModelDtype, hardware: Hardware, width: int) -> CostModel:
    return roofline(model, dtype, hardware, width)


def _per_token(cost: CostModel, rows: int) -> float:
    return cost.body.at(rows) / rows


def _worth(candidate: Candidate) -> tuple[float, float]:
    return candidate.price, -candidate.figures.goodput_s


def _limit(records: list[Record], objective: Objective, cluster: SimCluster, busy: dict[str, float]) -> str:
    """Say what keeps a cluster from more: what was missed, and who was busy or short of memory."""
    late = sum(record.error is not None or ttft_ms(record) > objective.ttft_ms for record in records)
    slow = sum((tpot_ms(record) or 0.0) > objective.tpot_ms for record in records if record.error is None)
    preempted = sum(engine.engine.num_preempted for engine in cluster.engines.values())
    missed = f"{late / len(records):.1%} miss the TTFT and {slow / len(records):.1%} the TPOT"
    role = max(busy, key=lambda name: busy[name])
    why = f"{role} engines are busy for {busy[role]:.0%} of the time"
    if preempted:
        why += f", and {preempted} sequences were preempted for want of KV memory"
    return f"{missed}; {why}"
