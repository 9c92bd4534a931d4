"""The reference: transformers' own greedy `generate`, in a process of its own that knows nothing of paged attention.

`python -m pdactors.bench.reference` reads a `Job` from standard input and writes an `Expected` a prompt, a line each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from typing import Any, BinaryIO

import msgspec
from msgspec import Struct

from pdactors.errors import ModelError

TIE_MARGIN = 1e-3  # logits that are nearer to each other than this are a tie: rounding may decide it either way
_MAX_ERROR_CHARS = 2000


class Job(Struct, frozen=True):
    """What to generate, with which weights."""

    folder: str
    dtype: str
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int


class Expected(Struct, frozen=True):
    """What follows a prompt, and how sure that is."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]  # at each position, the best logit less the second best
    rivals: tuple[tuple[int, ...], ...]  # at each position, the other ids whose logits tie with the best


def generate(job: Job) -> Iterator[Expected]:
    """Run the reference on all cores and yield what follows each prompt, in order.

    The process ends with the iterator.

    Raises:
        ModelError: it failed; says what it printed last.
    """
    quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "pdactors.bench.reference"]
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as log:
        request.write(msgspec.json.encode(job))
        request.seek(0)
        process = subprocess.Popen(  # noqa: S603 - this interpreter and our own module
            command, stdin=request, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **quiet}
        )
        num_done, num_prompts = 0, len(job.prompts)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield msgspec.json.decode(line, type=Expected)
                num_done += 1
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        if num_done < num_prompts:
            raise ModelError(f"the reference ended after {num_done} of {num_prompts} prompts: {_last_words(log)}")


def _last_words(log: BinaryIO) -> str:
    """Return what stands at the log's end; of a traceback, the error alone."""
    log.seek(0)
    lines = log.read().decode(errors="replace").strip().splitlines()
    frames = [number for number, line in enumerate(lines[:-1]) if line.startswith(" ")]
    return "\n".join(lines[frames[-1] + 1 if frames else 0 :])[-_MAX_ERROR_CHARS:]


def main() -> None:
    """Do the job on standard input."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever libraries print is not an answer
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=Job)
    model = _load(job)
    for prompt in job.prompts:
        answers.write(msgspec.json.encode(_continue(model, prompt, job.max_tokens)) + b"\n")
        answers.flush()


def _load(job: Job) -> Any:
    """Load the model as its makers meant it, with all of its own ends of a sequence and no other rule of generation."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    config = AutoConfig.from_pretrained(job.folder, local_files_only=True)
    text_config = config.get_text_config()
    is_capped = getattr(text_config, "attn_logit_softcapping", None) is not None  # which sdpa leaves out
    model = AutoModelForCausalLM.from_pretrained(
        job.folder,
        dtype=getattr(torch, job.dtype),
        attn_implementation="eager" if is_capped else "sdpa",
        local_files_only=True,
    ).eval()
    ends = _ids(text_config.eos_token_id) | _ids(model.generation_config.eos_token_id)
    model.generation_config = GenerationConfig(
        do_sample=False, eos_token_id=sorted(ends) or None, pad_token_id=min(ends, default=0)
    )
    return model


def _ids(value: int | list[int] | None) -> set[int]:
    found = value if isinstance(value, list) else [] if value is None else [value]
    return {token_id for token_id in found if token_id >= 0}  # some families write -1 for "none"


def _continue(model: Any, prompt: tuple[int, ...], max_tokens: int) -> Expected:
    import torch

    input_ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
    token_ids = output.sequences[0, len(prompt) :].tolist()
    margins, rivals = [], []
    for logits, token_id in zip(output.logits, token_ids, strict=True):
        best, second = logits[0].topk(2).values.tolist()
        margins.append(best - second)
        near = (logits[0] > best - TIE_MARGIN).nonzero()[:, 0].tolist()
        rivals.append(tuple(other for other in near if other != token_id))
    return Expected(tuple(token_ids), tuple(margins), tuple(rivals))


if __name__ == "__main__":
    main()
