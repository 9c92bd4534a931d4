"""What tracing and the figures of steps cost decode: steps with and without them take turns in one process.

    .venv/bin/python benchmarks/tracing.py [--steps 60]

Prints, for several batches, the median step with neither, the difference of the paired medians, and what the notes take
when they are timed alone, which noise cannot hide.
"""

from __future__ import annotations

import argparse
import statistics
import time

from pdactors.actors.engine_accounts import note_step
from pdactors.engine import store
from pdactors.engine.load import load_model
from pdactors.engine.runner import Engine, EngineLimits
from pdactors.engine.sequence import Sequence
from pdactors.engine.step_log import StepLog
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.messages import Sampling
from pdactors.observe.trail import Trail

BATCHES = (1, 8, 32)
PROMPT_TOKENS, BLOCK_TOKENS, EXTENT_BLOCKS = 256, 32, 16


def engine_of(model: object, arena: Arena, batch: int, steps: int) -> Engine:
    """Make an engine whose sequences all decode."""
    pool = BlockPool()
    for extent in range(arena.num_extents):
        pool.add_extent(arena.blocks_of_extent(extent))
    limits = EngineLimits(batch, 1024, frozenset(), prefix_key=b"bench")
    engine = Engine(model, arena, pool, limits)
    for i in range(batch):
        prompt = [1000 + 31 * i + n for n in range(PROMPT_TOKENS)]
        engine.submit(Sequence(f"{i:016x}", 1, prompt, Sampling(max_tokens=4 * steps, ignore_eos=True)))
    while engine.waiting or any(sequence.is_prompt for sequence in engine.running):
        engine.admit()
        step = engine.plan()
        engine.commit(step, engine.run(step))
    return engine


def measure(model: object, batch: int, steps: int) -> None:
    layout = model.layout_for(BLOCK_TOKENS)
    num_blocks = batch * layout.num_blocks(PROMPT_TOKENS + 2 * steps + 8) + EXTENT_BLOCKS
    with Arena.create(
        layout, num_blocks, extent_blocks=EXTENT_BLOCKS, num_slots=1, leases_per_slot=1, max_lease_blocks=8
    ) as arena:
        model.bind(arena.payload(), layout)
        engine = engine_of(model, arena, batch, steps)
        shape = model.shape
        log = StepLog(shape, shape.weight_bytes_as(model.dtype), layout.token_bytes, model.machine, 1)
        trail = Trail(256, 16_384)
        times: dict[bool, list[float]] = {False: [], True: []}
        notes = []
        for number in range(2 * steps):
            is_noted = bool(number % 2)
            began = time.perf_counter()
            step = engine.plan()
            result = engine.run(step)
            ran = time.perf_counter()
            if is_noted:
                log.add(step, result)
                note_step(trail, step, began, ran)
                notes.append(time.perf_counter() - ran)
            engine.commit(step, result)
            times[is_noted].append(time.perf_counter() - began)
    without, noted = (statistics.median(times[is_noted]) for is_noted in (False, True))
    difference = statistics.median(b - a for a, b in zip(times[False], times[True], strict=True))
    note = statistics.median(notes)
    print(
        f"batch {batch}: step {1000 * without:.2f} ms without, {1000 * noted:.2f} ms with, paired difference "
        f"{difference / without:+.2%}; the notes alone {1e6 * note:.0f} us, {note / without:.3%} of a step"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    model = load_model(store.resolve("smollm2-135m", fetch=True), "bfloat16", threads=1)
    for batch in BATCHES:
        measure(model, batch, options.steps)


if __name__ == "__main__":
    main()
