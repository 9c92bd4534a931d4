"""What handing a sequence's KV from prefill to decode costs, beside what copying it would."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec import Struct

from pdactors.actors import blueprint
from pdactors.bench.free_ports import free_ports
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


class PathResult(Struct, frozen=True):
    """One way that KV takes from prefill to decode. Keys of the dicts are prompt lengths in tokens.

    `gb_s` is the KV of the longest prompt over its hand-over, whether or not anything moved; `limit_gb_s` is what a
    plain memcpy of it reached in the same run, and `ratio` the first over the second.
    """

    gb_s: float
    limit_gb_s: float
    ratio: float
    bytes_copied: dict[str, int]
    us_per_handover: dict[str, float]  # medians
    p90_us: dict[str, float]
    difference_us: float  # of the medians, longest prompt less shortest


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


class Generator(Protocol):
    """What is needed of a client."""

    def generate(self, *, prompt_token_ids: Sequence[int], max_tokens: int, ignore_eos: bool) -> Generation: ...


def bench_kv(
    file: Path | None, *, sets: Sequence[str] = (), rounds: int = 30, seed: int = 1, progress: Progress = silent
) -> KVBench:
    """Start the cluster of the file on free ports and hand over `rounds` prompts of each length, one at a time.

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
    progress("start", 0, 0)
    with (
        launch(file, sets=[*sets, *free_ports(config)]) as cluster,
        Client(cluster.zmq, token=config.security.client_token()) as client,
    ):
        times = hand_over(client, rounds=rounds, vocab_size=shape.vocab_size, seed=seed, progress=progress)
    memcpy = {"block": copy_reference(layout.block_bytes), "kv": copy_reference(_kv_bytes(layout, max(LENGTHS)))}
    return KVBench(
        model=config.model.path,
        dtype=config.model.dtype,
        block_tokens=layout.block_tokens,
        block_bytes=layout.block_bytes,
        rounds=rounds,
        paths={"lease": summarise(times, layout, memcpy["kv"].gb_s)},
        memcpy=memcpy,
    )


def hand_over(
    client: Generator, *, rounds: int, vocab_size: int, seed: int, progress: Progress = silent
) -> dict[int, list[float]]:
    """Return the microseconds from the prefill's message to the adoption by decode, by prompt length.

    The lengths take turns, and each prompt is new, so that no cache helps. A first round is not counted.

    Raises:
        PDError: a prompt was not handed over whole, or by another path than the lease.
    """
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    times: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for done in range(rounds + 1):
        progress("hand over", done, rounds + 1)
        for length in LENGTHS:
            prompt = tuple(rng.randrange(vocab_size) for _ in range(length))
            answer = client.generate(prompt_token_ids=prompt, max_tokens=MAX_TOKENS, ignore_eos=True)
            if answer.path != "lease" or answer.usage.cached_tokens:
                raise PDError(
                    f"a prompt of {length} tokens went by path {answer.path!r} with {answer.usage.cached_tokens} tokens"
                    f" cached; expected path 'lease' with none"
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
