"""What `pdactors bench serve --json` prints: one `ServeBench`."""

from __future__ import annotations

from msgspec import Struct

from pdactors.bench.figures import Figures, Objective


class Load(Struct, frozen=True):
    """How requests arrive: Poisson at `rate` a second, `concurrency` of them in flight, or a trace's own times.

    With `find_max_rate` each round looks for the highest rate at which the objective is met. A run (each try of a
    search) ends after `seconds` of arrivals or `requests`, whichever is given.
    """

    rate: float | None = None
    concurrency: int | None = None
    find_max_rate: bool = False
    seconds: float | None = None
    requests: int | None = None


class Try(Struct, frozen=True):
    """One rate of a search, and the share of requests that met the objective at it."""

    rate: float
    slo_share: float
    is_held: bool


class ActorUse(Struct, frozen=True):
    """What one actor did in a run.

    `busy_share` is CPU time over the run's, 1.0 for one core (None: it was restarted meanwhile). `use` is the engine's
    own account of its recent steps, `flops_share` (MFU) and `bandwidth_share` (MBU) by phase; `way` is how it computes.
    """

    role: str
    busy_share: float | None
    use: dict[str, dict[str, float]] = {}
    way: str = ""
    preempted: int = 0


class GeneratorUse(Struct, frozen=True):
    """Whether the generator kept up: its CPU share of one core, and how late it sent (99th percentile)."""

    busy_share: float
    late_ms_p99: float


class Run(Struct, frozen=True):
    """One round of one server. `rate` is what was offered, the highest that was held when searching; None without."""

    rate: float | None
    seconds: float
    overall: Figures
    kinds: dict[str, Figures]
    actors: dict[str, ActorUse]
    generator: GeneratorUse
    tries: list[Try] = []


class ServerResult(Struct, frozen=True):
    """One mode or one server over all rounds; `error` says why it could not be measured.

    `overall` and `kinds` pool the requests of all rounds. `max_rate` is the median of what the rounds found.
    """

    rounds: list[Run] = []
    overall: Figures | None = None
    kinds: dict[str, Figures] = {}
    max_rate: float | None = None
    error: str | None = None

    def busy_shares(self) -> dict[str, float]:
        """Return the mean busy share of each engine over the rounds, by name."""
        shares: dict[str, list[float]] = {}
        for run in self.rounds:
            for name, actor in run.actors.items():
                if actor.role in ("prefill", "decode", "worker") and actor.busy_share is not None:
                    shares.setdefault(name, []).append(actor.busy_share)
        return {name: sum(values) / len(values) for name, values in shares.items()}


class ServeBench(Struct, frozen=True):
    """The whole measurement. `servers` are by mode, or by URL; `verdict` is one or two sentences in plain words."""

    model: str
    dtype: str
    workload: str
    seed: int
    load: Load
    objective: Objective
    cores: int
    servers: dict[str, ServerResult]
    verdict: str
    simulated: str = ""  # what stood in for this machine; "" for a real run

    @property
    def place(self) -> str:
        """Where it was measured, in words."""
        return f"simulated {self.simulated}" if self.simulated else f"{self.cores} cores"
