"""Our engine and a peer's in turns, on one core each: what `vllm_cpu.py` and `llama_cpp.py` share."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

BATCHES, CONTEXT, PROMPTS = (1, 4, 16, 32), 256, (512, 2048)
MODEL = "smollm2-135m"


class Peer(Protocol):
    """Another engine with the same model in the same precision, on one compute thread."""

    def step(self, batch: int) -> float:
        """Return the milliseconds of a decode step of `batch` sequences that have `CONTEXT` tokens each."""

    def prompt(self, tokens: int) -> float:
        """Return the milliseconds of a prompt; none of it is cached."""


def compare(peer: Peer, folder: Path, *, rounds: int, core: int) -> dict[str, Any]:
    """Run both once for nothing, then in turns; `ratio` is the median over rounds of the peer's time over ours."""
    from pdactors.bench import engine as bench
    from pdactors.engine.load import load_model

    os.sched_setaffinity(0, {core})
    model = load_model(folder, "bfloat16", threads=1, way="lean")

    def median_of(count: int, action: Callable[[], object]) -> float:
        return statistics.median(bench.time_ms(action) for _ in range(count))

    decode, prefill = [], []
    for batch in BATCHES:
        step = bench.decode_step(model, batch, CONTEXT)
        pairs = [(median_of(16, step), peer.step(batch)) for _ in range(rounds + 1)]
        decode.append({"batch": batch, "context": CONTEXT, **_summary(pairs[1:])})
    for tokens in PROMPTS:
        prompt = bench.prompt(model, tokens)
        pairs = [(median_of(1, prompt), peer.prompt(tokens)) for _ in range(rounds + 1)]
        prefill.append({"tokens": tokens, **_summary(pairs[1:])})
    return {"decode": decode, "prefill": prefill}


def _summary(pairs: list[tuple[float, float]]) -> dict[str, float]:
    ours, theirs = zip(*pairs, strict=True)
    return {
        "ms": round(statistics.median(ours), 2),
        "peer_ms": round(statistics.median(theirs), 2),
        "ratio": round(statistics.median(other / own for own, other in pairs), 2),
    }
