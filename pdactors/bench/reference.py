"""The reference: transformers' own greedy `generate`, in a process of its own that knows nothing of paged attention.

`python -m pdactors.bench.reference` reads a `Job` from standard input and writes `[prompt, Expected]`, a line each.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
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
    batch: int = 1  # prompts at once, padded on the left


class Expected(Struct, frozen=True):
    """What follows a prompt, and how sure that is."""

    token_ids: tuple[int, ...]
    margins: tuple[float, ...]  # at each position, the best logit less the second best
    rivals: tuple[tuple[int, ...], ...]  # at each position, the other ids whose logits tie with the best


def generate(job: Job) -> Iterator[tuple[int, Expected]]:
    """Run the reference on all cores and yield each prompt's number and what follows it, those of like length together.

    The process ends with the iterator.

    Raises:
        ModelError: it failed; says what it printed last.
    """
    settings = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
    settings["OMP_WAIT_POLICY"] = "PASSIVE"  # threads that spin slow each other down on a busy machine
    command = [sys.executable, "-m", "pdactors.bench.reference"]
    with tempfile.TemporaryFile() as request, tempfile.TemporaryFile() as log:
        request.write(msgspec.json.encode(job))
        request.seek(0)
        process = subprocess.Popen(  # noqa: S603 - this interpreter and our own module
            command, stdin=request, stdout=subprocess.PIPE, stderr=log, env={**os.environ, **settings}
        )
        num_done, num_prompts = 0, len(job.prompts)
        assert process.stdout is not None
        try:
            for line in process.stdout:
                yield msgspec.json.decode(line, type=tuple[int, Expected])
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
    longest_first = sorted(range(len(job.prompts)), key=lambda i: -len(job.prompts[i]))
    for begin in range(0, len(longest_first), job.batch):
        numbers = longest_first[begin : begin + job.batch]
        expected = _continue(model, [job.prompts[i] for i in numbers], job.max_tokens)
        for answer in zip(numbers, expected, strict=True):
            answers.write(msgspec.json.encode(answer) + b"\n")
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


def _continue(model: Any, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[Expected]:
    import torch

    width = max(map(len, prompts))
    input_ids = torch.full((len(prompts), width), model.generation_config.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, prompt in enumerate(prompts):
        input_ids[row, width - len(prompt) :] = torch.tensor(prompt)
        attention_mask[row, width - len(prompt) :] = 1
    with torch.inference_mode():
        output = model.generate(
            input_ids,
            attention_mask=attention_mask,
            max_new_tokens=max_tokens,
            output_logits=True,
            return_dict_in_generate=True,
        )
    ends = set(model.generation_config.eos_token_id or ())
    answers = [_until_end(tokens, ends) for tokens in output.sequences[:, width:].tolist()]
    logits = [[output.logits[step][row] for step in range(len(tokens))] for row, tokens in enumerate(answers)]
    return [_expected(*answer) for answer in zip(answers, logits, strict=True)]


def _until_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Leave out the padding after the end."""
    stop = next((i for i, token_id in enumerate(tokens) if token_id in ends), len(tokens))
    return tokens[: stop + 1]


def _expected(tokens: list[int], logits: list[Any]) -> Expected:
    margins, rivals = [], []
    for token_id, row in zip(tokens, logits, strict=True):
        best, second = row.topk(2).values.tolist()
        margins.append(best - second)
        near = (row > best - TIE_MARGIN).nonzero()[:, 0].tolist()
        rivals.append(tuple(other for other in near if other != token_id))
    return Expected(tuple(tokens), tuple(margins), tuple(rivals))


if __name__ == "__main__":
    main()
