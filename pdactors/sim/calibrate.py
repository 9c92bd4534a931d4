"""`calibrate`: measures this machine's engine, processes and transports, and makes a cost model of them."""

from __future__ import annotations

import asyncio
import itertools
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple, get_args

import msgspec
import numpy as np

from pdactors.bench.engine import chunk_step, decode_step, time_ms
from pdactors.bench.figures import itl_ms, ttft_ms
from pdactors.bench.free_ports import free_ports
from pdactors.bench.line_target import LineTarget
from pdactors.bench.load import Record, closed_loop
from pdactors.bench.wire import compare
from pdactors.bench.workload import CHAT, Kind, Request, make_requests
from pdactors.client import launch
from pdactors.config.load import load
from pdactors.engine import store
from pdactors.engine.load import load_model, why_not_lean
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.model import PagedModel
from pdactors.engine.shape import ModelShape
from pdactors.errors import ConfigError, PDError
from pdactors.kv.codec import CodecName, decode, encode, encoded_bytes
from pdactors.policy.codec_choice import CodecCost
from pdactors.sim.cost import CostModel, Crowd, Curve, StepWork
from pdactors.sim.hardware import HARDWARE, Link, Links

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (64, 1024)
PAST = 1536  # of the chunk that tells what attention costs
HANDOVER = Kind("hand-over", CHAT.prompt_tokens, (4, 4))
PROMPT = Kind("prompt", (1000, 1000), (1, 1))
STREAM = Kind("stream", CHAT.prompt_tokens, (256, 256))
BATCH = 8  # streams at one decode engine
LEAST_CONTROL_S = 1e-5
PATIENCE_S = 120.0
CODEC_BLOCKS = 16

Loop = tuple[tuple[Kind, ...], int]  # a closed loop: what is asked, in order, and how many are in flight

# Starts a cluster with such settings, and puts closed loops to it, one after the other.
Ask = Callable[[Sequence[str], Sequence[Loop]], list[list[Record]]]


@dataclass(frozen=True)
class Steps:
    """What steps cost in a process that does nothing else."""

    body: Curve
    head: Curve
    kv_token_s: float
    pair_s: float


def calibrate(
    file: Path | None, *, sets: Sequence[str] = (), rounds: int = 3, progress: Progress = silent
) -> CostModel:
    """Measure what the engines of a cluster file's first node cost on this machine; takes a few minutes.

    Steps are timed in this process, then two small clusters are started: two workers tell what a step takes besides and
    how they slow each other, a prefill and a decode engine what a message and a sequence take.

    Raises:
        ConfigError: the cluster file is wrong, or has several nodes.
        PDError: a cluster does not start, or fails a request.
    """
    config = load(file, sets=sets)
    if len(config.node) > 1:
        raise ConfigError("calibrate needs a file with one [[node]]: it measures the engines of one machine")
    folder = store.resolve(config.model.path, fetch=True, progress=progress)
    shape = ModelShape.read(folder)
    block_tokens = config.kv.block_tokens
    is_lean = not why_not_lean(folder, shape, config.model.dtype, block_tokens)
    node = config.node[0]
    num_engines = sum(node.engines(config.cluster.mode).values())
    threads = node.threads or max(1, (os.cpu_count() or 1) // num_engines)
    model = load_model(folder, config.model.dtype, threads=threads, way="lean" if is_lean else None)
    steps = measure_steps(model, rounds, progress)
    codecs = measure_codecs(model, block_tokens)
    links = measure_links(model.layout_for(block_tokens).block_bytes, progress)
    model.close()
    bare = CostModel(
        name=f"this machine, {model.description}",
        model=Path(config.model.path).name,  # as `ModelSize.find` names it
        dtype=config.model.dtype,
        body=steps.body,
        head=steps.head,
        kv_token_s=steps.kv_token_s,
        pair_s=steps.pair_s,
        sequence_s=0.0,
        step_s=0.0,
        links=links,
        control_s=0.0,
        codecs=codecs,
    )
    fixed = (*sets, *free_ports(config), f"node.0.threads={threads}")
    ask = _Asker(file, fixed, config.security.client_token(), shape.vocab_size, progress)
    return fit_processes(bare, put_loads(ask, rounds))


# ---- Steps --------


def measure_steps(model: PagedModel, rounds: int, progress: Progress = silent) -> Steps:
    """Time decode steps and chunks of prompts, and split them into what the formula of `cost` has."""
    actions: dict[tuple[str, int, int], Callable[[], object]] = {}
    seconds: dict[tuple[str, int, int], float] = {}
    wanted = [("chunk", rows, 0) for rows in ROWS] + [("chunk", ROWS[-1], PAST)]
    wanted += [("decode", batch, context) for batch in BATCHES for context in CONTEXTS]
    for done, (kind, count, context) in enumerate(wanted):
        progress("steps", done, len(wanted))
        make = chunk_step if kind == "chunk" else decode_step
        action = actions[kind, count, context] = make(model, count, context)
        action()
        seconds[kind, count, context] = statistics.median(time_ms(action) for _ in range(rounds)) / 1000
        model.unbind()
    return fit_steps(seconds)


def fit_steps(seconds: dict[tuple[str, int, int], float]) -> Steps:
    """Split measured steps: the slope over the context, the slope over pairs, and what is left over rows and logits."""
    low, high = CONTEXTS
    gains = [
        (batch * (high - low), seconds["decode", batch, high] - seconds["decode", batch, low]) for batch in BATCHES
    ]
    kv_token_s = max(0.0, sum(x * y for x, y in gains) / sum(x * x for x, _ in gains))
    last = ROWS[-1]
    pair_s = max(0.0, (seconds["chunk", last, PAST] - seconds["chunk", last, 0]) / (last * PAST))
    body = [(float(rows), seconds["chunk", rows, 0] - pair_s * rows * (rows + 1) / 2) for rows in ROWS]
    body = _rising(body)
    curve = Curve(tuple(body))
    head = [(1.0, 0.0)]
    for batch in BATCHES[1:]:
        left = statistics.mean(seconds["decode", batch, c] - kv_token_s * batch * c for c in CONTEXTS)
        head.append((float(batch), max(0.0, left - curve.at(batch))))
    return Steps(curve, Curve(tuple(_rising(head))), kv_token_s, pair_s)


def _rising(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """More never takes less: what noise says otherwise is levelled."""
    levels = np.maximum.accumulate([seconds for _, seconds in points])
    return [(count, round(float(level), 9)) for (count, _), level in zip(points, levels, strict=True)]


def measure_codecs(model: PagedModel, block_tokens: int) -> dict[CodecName, CodecCost]:
    """Time the codecs on blocks of the model."""
    layout = model.layout_for(block_tokens)
    costs: dict[CodecName, CodecCost] = {}
    for name in get_args(CodecName):
        blocks = np.ones((CODEC_BLOCKS, layout.block_bytes), np.uint8)
        frames = np.ones((CODEC_BLOCKS, encoded_bytes(name, layout)), np.uint8)
        actions = partial(encode, name, layout, blocks, frames), partial(decode, name, layout, frames, blocks)
        for action in actions:
            action()  # compiles
        speeds = [1000 * blocks.nbytes / min(time_ms(action) for _ in range(5)) for action in actions]
        costs[name] = CodecCost(encoded_bytes(name, layout) / layout.block_bytes, *speeds)
    return costs


def measure_links(block_bytes: int, progress: Progress = silent) -> Links:
    """Measure UCX between two processes here; where it cannot be had, the CPU's data sheet stands."""
    progress("transport", 0, 0)
    try:
        rate = compare(block_bytes=block_bytes, num_transfers=30, rounds=1).gb_s * 1e9
    except PDError:
        return HARDWARE["cpu"].links
    link = Link(rate, 2e-4)
    return Links(link, link, link, 10 * rate)


# ---- Processes --------


class Loads(NamedTuple):
    """Closed loops that were put to small clusters: the records of each. Two at once have a worker each."""

    alone: list[Record]
    prompts: list[Record]
    pair: list[Record]
    prompt_pair: list[Record]
    handover: list[Record]  # from a prefill to a decode engine
    streams: list[Record]  # at one decode engine
    beside: list[list[Record]]  # the same, while the prefill engine has prompts; loop by loop, each has its own time


def requests_of(kinds: Sequence[Kind], seed: str, vocabulary: Sequence[int]) -> list[Request]:
    """Make the requests of a closed loop."""
    made = {kind: make_requests((kind,), vocabulary, f"{seed} {kind.name}") for kind in kinds}
    return [next(made[kind]) for kind in kinds]


def put_loads(ask: Ask, rounds: int) -> Loads:
    """Ask two workers, then a prefill and a decode engine, in turns: a machine's neighbours are not always as busy."""
    workers = "cluster.mode=chunked", "node.0.workers=2"
    separated = "cluster.mode=disaggregated", "node.0.prefill=1", "node.0.decode=1"
    together: list[Loop] = [((CHAT,) * 2, 1), ((PROMPT,) * 2, 1), ((CHAT,) * 6, 2), ((PROMPT,) * 4, 2)]
    apart: list[Loop] = [
        ((HANDOVER,) * 6, 1),
        ((STREAM,) * BATCH, BATCH),
        ((STREAM,) * BATCH + (PROMPT,) * 6, BATCH + 1),
    ]
    found: list[list[list[Record]]] = []
    for sets, wanted in ((workers, together), (separated, apart)):
        records = ask(sets, wanted * rounds)
        found += [records[i :: len(wanted)] for i in range(len(wanted))]
    flat = [[record for loop in each for record in loop] for each in found]
    return Loads(flat[0], flat[1], flat[2], flat[3], flat[4], flat[5], found[6])


def fit_processes(bare: CostModel, loads: Loads) -> CostModel:
    """Say what those records mean for the costs that a bare step does not show."""
    alone = loads.alone
    left = []
    for records, batch in ((alone, 1), (loads.streams, BATCH)):
        context = statistics.mean(record.prompt_tokens + record.num_tokens / 2 for record in records)
        work = StepWork(batch, batch, round(batch * context), 0.0, batch)
        left.append(_gap_s(records) - bare.step(work))
    sequence_s = max(0.0, (left[1] - left[0]) / (BATCH - 1))
    step_s = max(0.0, left[0] - sequence_s)
    control_s = max(LEAST_CONTROL_S, (_first_gap_s(loads.handover) - _gap_s(loads.handover)) / 2)
    engine = msgspec.structs.replace(bare, sequence_s=sequence_s, step_s=step_s, control_s=control_s)
    known_s = [engine.step(_prompt(record.prompt_tokens)) + 3 * control_s for record in alone]
    request_s = statistics.median(ttft_ms(r) / 1000 - known for r, known in zip(alone, known_s, strict=True))
    gaps_s, prompts_s = _beside(loads.beside)
    crowd = Crowd(
        decode_by_decode=_excess(_gaps_s(loads.pair), _gaps_s(alone)),
        decode_by_prompt=_excess(gaps_s, _gaps_s(loads.streams)),
        prompt_by_decode=_excess(prompts_s, _ttfts_s(loads.prompts)),
        prompt_by_prompt=_excess(_ttfts_s(loads.prompt_pair), _ttfts_s(loads.prompts)),
    )
    return msgspec.structs.replace(engine, request_s=max(0.0, request_s), crowd=crowd)


@dataclass(frozen=True)
class _Asker:
    """Starts a cluster and puts closed loops of requests to it, one after the other."""

    file: Path | None
    sets: tuple[str, ...]
    token: str
    vocab_size: int
    progress: Progress

    def __call__(self, sets: Sequence[str], wanted: Sequence[Loop]) -> list[list[Record]]:
        what = sets[0].rpartition("=")[2]
        self.progress(f"{what}: start", 0, len(wanted))
        with launch(self.file, sets=[*self.sets, *sets]) as cluster:
            asyncio.run(self._put(cluster.tcp, ((CHAT,) * 4, 4), "warm"))
            found = []
            for done, loop in enumerate(wanted):
                self.progress(f"{what}: {loop[1]} at once", done, len(wanted))
                found.append(asyncio.run(self._put(cluster.tcp, loop, str(done))))
            return found

    async def _put(self, address: str, loop: Loop, seed: str) -> list[Record]:
        kinds, in_flight = loop
        asked = requests_of(kinds, f"calibrate {seed}", range(self.vocab_size // 2, self.vocab_size))
        async with LineTarget.connect(address, token=self.token) as target:
            records = await closed_loop(target, asked, in_flight, patience_s=PATIENCE_S)
        if failed := [record for record in records if record.error is not None]:
            raise PDError(f"a request of the calibration failed: {failed[0].reason}")
        return records


def _prompt(tokens: int) -> StepWork:
    return StepWork(tokens, 1, 0, tokens * (tokens + 1) / 2, 1)


def _gap_s(records: Sequence[Record]) -> float:
    """The median gap between tokens."""
    return statistics.median(_gaps_s(records))


def _gaps_s(records: Sequence[Record]) -> list[float]:
    """The gaps between tokens, without each first, which is the hand-over's."""
    return [gap / 1000 for record in records for gap in itl_ms(record)[1:]]


def _first_gap_s(records: Sequence[Record]) -> float:
    return statistics.median(itl_ms(record)[0] for record in records) / 1000


def _ttfts_s(records: Sequence[Record]) -> list[float]:
    return [ttft_ms(record) / 1000 for record in records]


def _excess(beside_s: Sequence[float], alone_s: Sequence[float]) -> float:
    """How much longer something takes on the average; nothing was seen, nothing is said."""
    if not beside_s or not alone_s:
        return 0.0
    return round(max(0.0, statistics.mean(beside_s) / statistics.mean(alone_s) - 1), 4)


def _beside(loops: Iterable[Sequence[Record]]) -> tuple[list[float], list[float]]:
    """Return the gaps between tokens while prompts were computed, and how long those took while all streams ran."""
    gaps_s: list[float] = []
    prompts_s: list[float] = []
    for records in loops:
        streams = [record for record in records if record.kind == STREAM.name]
        from_s, until_s = max(r.stamps[1] for r in streams), min(r.stamps[-1] for r in streams)
        inside = [r for r in records if r.kind == PROMPT.name and from_s <= r.begin_s and r.stamps[0] <= until_s]
        prompts_s += _ttfts_s(inside)
        for stream, prompt in itertools.product(streams, inside):
            stamps = [stamp for stamp in stream.stamps if prompt.begin_s <= stamp <= prompt.stamps[0]]
            gaps_s += [later - sooner for sooner, later in itertools.pairwise(stamps)]
    return gaps_s, prompts_s
