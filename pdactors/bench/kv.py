"""What bringing a sequence's KV from prefill to decode costs by each way, beside the limit of that way."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol, get_args

import msgspec
import numpy as np
from msgspec import Struct

from pdactors.actors import blueprint
from pdactors.bench import wire
from pdactors.bench.codecs import CodecResult, bench_codecs
from pdactors.bench.free_ports import free_ports
from pdactors.bench.needles import SHARE, NeedlesBench, bench_needles
from pdactors.client import Client, Generation, launch
from pdactors.config.cluster import ClusterConfig
from pdactors.config.load import load
from pdactors.engine import store
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.shape import ModelShape
from pdactors.errors import ConfigError, PDError
from pdactors.kv.layout import KVLayout

LENGTHS = (64, 3000)  # tokens of the short and of the long prompt
MAX_TOKENS = 2  # one by prefill, one by decode
NUM_COPIES = 9
Part = Literal["lease", "ucx", "codecs", "prune"]
PARTS: tuple[Part, ...] = get_args(Part)


class PathResult(Struct, frozen=True):
    """One way that KV takes from prefill to decode. Keys of the dicts are prompt lengths in tokens.

    Of the lease, `gb_s` is the KV of the longest prompt over its hand-over, though hardly anything moves; its limit is
    a plain memcpy of it. Of `ucx` it is what the data port carries in blocks; its limit is a raw socket. Both limits
    are of the same run, and `ratio` is `gb_s` over the limit. `ucx namespaces` is measured without a cluster.
    """

    gb_s: float
    limit_gb_s: float
    ratio: float
    bytes_copied: dict[str, int]
    us_per_handover: dict[str, float]  # medians
    p90_us: dict[str, float]
    difference_us: float  # of the medians, longest prompt less shortest
    cpu_ratio: float | None = None  # CPU time of both ends over that of the raw socket's
    idle_cpu: float | None = None  # of a core, while nothing moves


class Reference(Struct, frozen=True):
    """A plain memcpy between warm buffers."""

    size_bytes: int
    us: float
    gb_s: float


class KVBench(Struct, frozen=True):
    """What `pdactors bench kv --json` prints."""

    model: str
    dtype: str
    block_tokens: int
    block_bytes: int
    rounds: int
    paths: dict[str, PathResult]
    memcpy: dict[str, Reference]
    codecs: dict[str, CodecResult] = {}
    prune: NeedlesBench | None = None


class Generator(Protocol):
    """What is needed of a client."""

    def generate(self, *, prompt_token_ids: Sequence[int], max_tokens: int, ignore_eos: bool) -> Generation: ...


def bench_kv(
    file: Path | None,
    *,
    sets: Sequence[str] = (),
    parts: Collection[Part] = PARTS,
    rounds: int = 30,
    seed: int = 1,
    progress: Progress = silent,
) -> KVBench:
    """Start the cluster of the file on free ports and hand over `rounds` prompts of each length, one at a time.

    Of `parts`: `lease` and `ucx` do so by that way, and `ucx` measures the wire itself, on loopback and, as root,
    between network namespaces; `codecs` measures speed and loss of each, and `prune` asks needle questions, which takes
    minutes.

    Raises:
        ConfigError: the file is wrong, has no prefill apart from decode, or no room for the long prompt.
        PDError: the cluster did not start, or did not answer as it should.
    """
    config = load(file, sets=sets)
    blueprint.check_available(config)
    _check_room(config)
    folder = store.resolve(config.model.path, fetch=True, progress=progress)
    shape = ModelShape.read(folder)
    layout = blueprint.plan_arena(config, config.node[0], shape).layout
    times: dict[str, dict[int, list[float]]] = {}
    for path in [path for path in ("lease", "ucx") if path in parts]:
        progress(f"{path}: start", 0, 0)
        with (
            launch(file, sets=[*sets, f"kv.transport={path}", *free_ports(config)]) as cluster,
            Client(cluster.zmq, token=config.security.client_token()) as client,
        ):
            times[path] = hand_over(
                client, path=path, rounds=rounds, vocab_size=shape.vocab_size, seed=seed, progress=progress
            )
    memcpy = {"block": copy_reference(layout.block_bytes), "kv": copy_reference(_kv_bytes(layout, max(LENGTHS)))}
    paths = {"lease": summarise(times["lease"], layout, memcpy["kv"].gb_s)} if "lease" in times else {}
    if "ucx" in times:
        progress("wire", 0, 0)
        paths |= _over_the_wire(layout, times["ucx"])
    codecs = {}
    if "codecs" in parts:
        codecs = bench_codecs(config.model.path, dtype=config.model.dtype, progress=progress).codecs
    needles = None
    if "prune" in parts:
        share = config.kv.prune if config.kv.prune < 1 else SHARE
        needles = bench_needles(config.model.path, dtype=config.model.dtype, share=share, seed=seed, progress=progress)
    return KVBench(
        model=config.model.path,
        dtype=config.model.dtype,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        rounds=rounds,
        paths=paths,
        memcpy=memcpy,
        codecs=codecs,
        prune=needles,
    )


def _over_the_wire(layout: KVLayout, times: Mapping[int, Sequence[float]]) -> dict[str, PathResult]:
    """Hold hand-overs by UCX against a raw socket; add the wire between two network namespaces where there can be."""
    found = {"ucx": _of_wire(wire.compare(block_bytes=layout.block_bytes), summarise(times, layout, 1.0))}
    moved = {str(length): _kv_bytes(layout, length) for length in times}
    found["ucx"] = msgspec.structs.replace(found["ucx"], bytes_copied=moved)
    if os.geteuid() == 0:
        with wire.namespaces() as sides:
            result = wire.compare(sides, block_bytes=layout.block_bytes)
        found["ucx namespaces"] = _of_wire(result, PathResult(0.0, 0.0, 0.0, {}, {}, {}, 0.0))
    return found


def _of_wire(result: wire.WireResult, handovers: PathResult) -> PathResult:
    return msgspec.structs.replace(
        handovers,
        gb_s=result.gb_s,
        limit_gb_s=result.limit_gb_s,
        ratio=result.ratio,
        cpu_ratio=result.cpu_ratio,
        idle_cpu=result.idle_cpu,
    )


def hand_over(
    client: Generator, *, path: str = "lease", rounds: int, vocab_size: int, seed: int, progress: Progress = silent
) -> dict[int, list[float]]:
    """Return the microseconds from the prefill's message to the adoption by decode, by prompt length.

    The lengths take turns, and each prompt is new, so that no cache helps. A first round is not counted.

    Raises:
        PDError: a prompt was not handed over whole, or by another path.
    """
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for done in range(rounds + 1):
        progress("hand over", done, rounds + 1)
        for length in LENGTHS:
            prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
            answer = client.generate(prompt_token_ids=prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
            if answer.path != path or answer.usage.cached_tokens:
                raise PDError(
                    f"a prompt of {length} tokens went by path {answer.path!r} with {answer.usage.cached_tokens} tokens"
                    f" cached; expected path {path!r} with none"
                )
            if done:
                times[length].append(answer.timing.migration_ms * 1000)
    return times


def summarise(times: Mapping[int, Sequence[float]], layout: KVLayout, limit_gb_s: float) -> PathResult:
    """Reduce the times of hand-overs to medians, and hold them against copying at `limit_gb_s`."""
    medians = {length: statistics.median(values) for length, values in times.items()}
    shortest, longest = min(times), max(times)
    gb_s = _gb_s(_kv_bytes(layout, longest), medians[longest])
    return PathResult(
        gb_s=round(gb_s, 2),
        limit_gb_s=limit_gb_s,
        ratio=round(gb_s / limit_gb_s, 2),
        bytes_copied={str(length): tail_bytes(layout, length) for length in times},
        us_per_handover={str(length): round(median, 1) for length, median in medians.items()},
        p90_us={str(length): round(float(np.percentile(values, 90)), 1) for length, values in times.items()},
        difference_us=round(medians[longest] - medians[shortest], 1),
    )


def tail_bytes(layout: KVLayout, num_tokens: int) -> int:
    """Return what decode copies to adopt so many tokens: the block that is partly filled."""
    return layout.block_bytes if num_tokens % layout.block_tokens else 0


def copy_reference(size_bytes: int) -> Reference:
    """Time a plain memcpy of so many bytes between warm buffers; the median of a few."""
    source, target = np.ones(size_bytes, np.uint8), np.ones(size_bytes, np.uint8)
    times = []
    for _ in range(NUM_COPIES):
        began = time.perf_counter()
        np.copyto(target, source)
        times.append((time.perf_counter() - began) * 1e6)
    us = statistics.median(times)
    return Reference(size_bytes, round(us, 1), round(_gb_s(size_bytes, us), 2))


def _check_room(config: ClusterConfig) -> None:
    needed = max(LENGTHS) + MAX_TOKENS
    if config.model.max_model_len < needed:
        raise ConfigError(f"model.max_model_len = {config.model.max_model_len}: this measurement needs {needed}")


def _kv_bytes(layout: KVLayout, num_tokens: int) -> int:
    return num_tokens * layout.token_bytes


def _gb_s(size_bytes: int, us: float) -> float:
    return size_bytes / max(us, 1e-3) / 1e3
