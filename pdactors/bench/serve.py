"""`bench serve`: starts each mode on the same cores, or takes running servers, and puts the same requests to all."""

from __future__ import annotations

import gc
import itertools
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from pdactors.actors import blueprint
from pdactors.bench.figures import Objective, by_kind, figures, seconds_of
from pdactors.bench.free_ports import free_ports
from pdactors.bench.line_target import LineTarget
from pdactors.bench.load import Record
from pdactors.bench.measure import Measured, Plan, Site, measure
from pdactors.bench.openai_target import OpenAITarget, check_url
from pdactors.bench.results import ActorUse, Load, Run, ServeBench, ServerResult
from pdactors.bench.trace import read_trace, trace_requests
from pdactors.bench.verdict import verdict
from pdactors.bench.workload import CHAT, WORKLOADS, Kind, make_requests
from pdactors.client import Client, launch
from pdactors.config.cluster import ClusterConfig, Mode
from pdactors.config.load import load
from pdactors.config.memory import available_bytes
from pdactors.engine import store
from pdactors.engine.load import why_not_lean
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.shape import ModelShape
from pdactors.errors import ConfigError, PDError
from pdactors.kernels import warm
from pdactors.text.tokenizer import Tokenizer

COMPILE_TIMEOUT_S = 600.0
MODES: tuple[Mode, ...] = ("colocated", "chunked", "disaggregated", "kvstore")
Open = Callable[[], AbstractContextManager[Site]]


@dataclass(frozen=True)
class Traffic:
    """What is asked and how: a workload by name or a trace, under a load, `rounds` times."""

    load: Load
    workload: str = "mixed"
    trace: Path | None = None
    scale: float = 1.0
    objective: Objective = field(default_factory=Objective)
    rounds: int = 1
    seed: int = 1
    kind: Kind | None = None  # instead of a workload by name

    @property
    def name(self) -> str:
        """What it is called in results."""
        if self.trace is None:
            return self.workload if self.kind is None else self.kind.name
        return f"{self.trace.name}, lengths divided by {self.scale:g}"

    def check(self) -> None:
        """Raise ConfigError if it would have no arrivals, or no end."""
        load = self.load
        if self.trace is None:
            if load.rate is None and load.concurrency is None and not load.find_max_rate:
                raise ConfigError("a workload needs a rate, a concurrency, or a search for the highest rate")
            if load.seconds is None and load.requests is None:
                raise ConfigError("a workload has no end of its own: give seconds or a number of requests")

    @property
    def mix(self) -> tuple[Kind, ...]:
        """The kinds that it is made of; for a trace, what to warm up with."""
        if self.kind is not None:
            return (self.kind,)
        return WORKLOADS[self.workload] if self.trace is None else (CHAT,)


@dataclass
class Outcome:
    """The measurement, and the records of every server for plots."""

    bench: ServeBench
    records: dict[str, list[Record]] = field(default_factory=dict)


def bench_serve(
    file: Path | None,
    traffic: Traffic,
    *,
    sets: Sequence[str] = (),
    modes: Sequence[Mode] = (),
    urls: Sequence[str] = (),
    model_name: str = "",
    api_key: str = "",
    progress: Progress = silent,
) -> Outcome:
    """Measure each mode of the cluster file, or the servers at `urls` and no cluster, with the same requests.

    Every round of a mode starts a cluster on free ports; rounds take turns over the servers. The vocabulary of prompts
    is that of the file's model. What fails to start says so in its result.

    Raises:
        ConfigError: the cluster file, the trace or a URL is wrong, or the requests do not fit the model.
        ModelError: the model cannot be had.
        PDError: the kernels cannot be compiled.
    """
    traffic.check()
    base = load(file, sets=sets)
    folder = store.resolve(base.model.path, fetch=True, progress=progress)
    vocabulary = _vocabulary(Tokenizer(folder))
    if traffic.trace is None:
        source = partial(make_requests, traffic.mix, vocabulary)
    else:
        next(read_trace(traffic.trace))  # so that what is no trace is known now
        source = partial(trace_requests, traffic.trace, traffic.scale, vocabulary)
    openers: dict[str, Open]
    if urls:
        openers = {check_url(url): partial(_open_url, url, model_name, api_key) for url in urls}
    else:
        openers = _clusters(file, base, folder, sets, modes or MODES, traffic)
        _compile(base, folder, progress)
    plan = Plan(
        source, partial(make_requests, traffic.mix, vocabulary), len(traffic.mix), traffic.load, traffic.objective
    )
    servers, records = _measure_all(openers, plan, traffic, progress)
    bench = ServeBench(
        model=base.model.path,
        dtype=base.model.dtype,
        workload=traffic.name,
        seed=traffic.seed,
        load=traffic.load,
        objective=traffic.objective,
        cores=len(os.sched_getaffinity(0)),
        servers=servers,
        verdict=verdict(servers),
    )
    return Outcome(bench, records)


# ---- Servers --------


def _clusters(
    file: Path | None, base: ClusterConfig, folder: Path, sets: Sequence[str], modes: Sequence[Mode], traffic: Traffic
) -> dict[str, Open]:
    """Return how to start each mode, once it is known that this version, the machine and the requests allow it."""
    longest = 0 if traffic.trace is not None else max(kind.most_tokens for kind in traffic.mix)
    if longest > base.model.max_model_len:
        raise ConfigError(
            f"model.max_model_len = {base.model.max_model_len}: requests of workload {traffic.name} take {longest}"
        )
    openers: dict[str, Open] = {}
    for mode in modes:
        tcp = base.listen.tcp or "127.0.0.1:7070"  # free_ports keeps only its host
        settings = [*sets, f"cluster.mode={mode}", f"listen.tcp={tcp}"]
        config = load(file, sets=settings)
        blueprint.check_available(config)
        blueprint.check_model(config, ModelShape.read(folder))
        blueprint.check_memory(config, config.node, ModelShape.read(folder), available_bytes())
        settings += free_ports(config)
        openers[mode] = partial(_start, file, settings, config.security.client_token())
    return openers


@contextmanager
def _start(file: Path | None, sets: Sequence[str], token: str) -> Iterator[Site]:
    with launch(file, sets=sets) as cluster:

        def accounts() -> dict[str, dict[str, object]]:
            with Client(cluster.zmq, token=token) as client:
                return {actor["name"]: actor for actor in client.status()["actors"]}

        pids = {actor.name: actor.pid for actor in cluster.ready.actors}
        yield Site(partial(LineTarget.connect, cluster.tcp, token=token), pids, accounts)


def _open_url(url: str, model_name: str, api_key: str) -> AbstractContextManager[Site]:
    return nullcontext(Site(partial(OpenAITarget.connect, url, model=model_name, api_key=api_key)))


def _compile(config: ClusterConfig, folder: Path, progress: Progress) -> None:
    """Have the kernels compiled before anything is measured; without them every mode would run as transformers."""
    dtype = config.model.dtype
    if warm.is_warm(dtype) or why_not_lean(folder, ModelShape.read(folder), dtype, config.kv.block_tokens):
        return
    progress("compile kernels", 0, 0)
    command = [sys.executable, "-m", "pdactors.kernels.warm", dtype]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=COMPILE_TIMEOUT_S, check=True)  # noqa: S603 - ours
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise PDError(f"the kernels could not be compiled: {error}") from error


def _vocabulary(tokenizer: Tokenizer) -> list[int]:
    return [token for token in range(tokenizer.vocab_size) if token not in tokenizer.special_ids]


# ---- Rounds --------


def _measure_all(
    openers: Mapping[str, Open], plan: Plan, traffic: Traffic, progress: Progress
) -> tuple[dict[str, ServerResult], dict[str, list[Record]]]:
    """Run the rounds in turns. A server that fails is not tried again."""
    runs: dict[str, list[Run]] = {name: [] for name in openers}
    records: dict[str, list[Record]] = {name: [] for name in openers}
    errors: dict[str, str] = {}
    for number, (name, opener) in itertools.product(range(traffic.rounds), openers.items()):
        if name in errors:
            continue
        what = f"{name}, round {number + 1} of {traffic.rounds}"
        progress(f"{what}: start", 0, 0)
        try:
            with opener() as site:
                found = _measure(site, plan, f"{traffic.seed} {number}", partial(progress, what))
                runs[name].append(_run(found, site, traffic.objective))
                records[name] += found.records
        except ConfigError:
            raise  # every server's
        except PDError as error:
            errors[name] = error.message
    results = {name: _result(runs[name], records[name], errors.get(name), traffic) for name in openers}
    return results, records


def _measure(site: Site, plan: Plan, seed: str, progress: Callable[[int, int], None]) -> Measured:
    """Measure with the garbage collector kept from what is here already, so that it does not stop the generator."""
    gc.collect()
    gc.freeze()
    try:
        return measure(site, plan, seed, progress)
    finally:
        gc.unfreeze()


def _run(found: Measured, site: Site, objective: Objective) -> Run:
    """Reduce what was measured, and ask the actors what they say of themselves."""
    accounts = site.accounts()
    actors = {
        name: ActorUse(
            role=account["role"],
            busy_share=found.busy.get(name) if account["pid"] == site.pids.get(name) else None,
            use=account["use"],
            way=account["way"],
            preempted=account["preempted"],
        )
        for name, account in accounts.items()
    }
    seconds = seconds_of(found.records)
    return Run(
        rate=found.rate,
        seconds=round(seconds, 3),
        overall=figures(found.records, seconds, objective),
        kinds={kind: figures(part, seconds, objective) for kind, part in by_kind(found.records).items()},
        actors=actors,
        generator=found.generator,
        tries=found.tries,
    )


def _result(runs: list[Run], records: list[Record], error: str | None, traffic: Traffic) -> ServerResult:
    """Pool the rounds of a server."""
    if not runs:
        return ServerResult(error=error)
    seconds = sum(run.seconds for run in runs)
    rates = [run.rate for run in runs if run.rate is not None]
    return ServerResult(
        rounds=runs,
        overall=figures(records, seconds, traffic.objective),
        kinds={kind: figures(part, seconds, traffic.objective) for kind, part in by_kind(records).items()},
        max_rate=statistics.median(rates) if traffic.load.find_max_rate else None,
        error=error,
    )
