"""Verification: every mode's greedy tokens held against transformers' own, token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path

import msgspec
from msgspec import Struct

from pdactors.actors import blueprint
from pdactors.bench import reference
from pdactors.bench.free_ports import free_ports
from pdactors.bench.prompts import make_prompts
from pdactors.bench.reference import Expected, Job
from pdactors.client import AsyncClient, Client, launch
from pdactors.config.cluster import ClusterConfig, Mode
from pdactors.config.load import load
from pdactors.config.memory import available_bytes
from pdactors.engine import store
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.shape import ModelDtype, ModelShape
from pdactors.errors import ConfigError, PDError
from pdactors.text.tokenizer import Tokenizer

MAX_PROMPT_TOKENS = 1500
BATCH = 4  # prompts that the reference runs at once
Answer = Sequence[int] | PDError  # the generated ids, or why there are none


class Difference(Struct, frozen=True):
    """Where an answer first leaves the reference. A token is None where its sequence has ended already."""

    prompt: int
    position: int | None = None
    expected: int | None = None
    got: int | None = None
    margin: float | None = None  # of the reference, between its two best logits; None past its end
    error: str | None = None  # what came instead of an answer


class ModeResult(Struct):
    """How one mode did; `error` says why it could not start."""

    equal: int = 0
    tied: int = 0
    diverged: list[Difference] = msgspec.field(default_factory=list)
    ties: list[Difference] = msgspec.field(default_factory=list)
    seconds: float = 0.0
    preempted: int = 0  # how often a sequence gave way to others, which is no difference by itself
    error: str | None = None

    @property
    def is_good(self) -> bool:
        return not self.diverged and self.error is None

    def count(self, prompt: int, expected: Expected, answer: Answer) -> None:
        """Hold an answer against the reference: equal, tied (rounding chose between equal logits) or diverged."""
        if isinstance(answer, PDError):
            self.diverged.append(Difference(prompt, error=f"{answer.code}: {answer.message}"))
            return
        pairs = enumerate(zip_longest(expected.token_ids, answer))
        position, wanted, got = next(((i, a, b) for i, (a, b) in pairs if a != b), (None, None, None))
        if position is None:
            self.equal += 1
            return
        is_past = position >= len(expected.token_ids)
        margin = None if is_past else expected.margins[position]
        difference = Difference(prompt, position, wanted, got, margin)
        if not is_past and got in expected.rivals[position]:
            self.tied += 1
            self.ties.append(difference)
        else:
            self.diverged.append(difference)


class Verification(Struct):
    """What `pdactors verify --json` prints."""

    model: str
    dtype: ModelDtype
    prompts: int
    prompt_tokens: int
    max_tokens: int
    seed: int
    reference_seconds: float
    modes: dict[Mode, ModeResult]

    @property
    def is_good(self) -> bool:
        return all(result.is_good for result in self.modes.values())


@dataclass(frozen=True)
class Questions:
    """What is asked: prompts with greedy answers of at most `max_tokens`, `concurrency` of them in flight."""

    prompts: Sequence[tuple[int, ...]]
    max_tokens: int
    concurrency: int


def verify(
    file: Path | None,
    *,
    sets: Sequence[str] = (),
    modes: Sequence[Mode] = (),
    dtype: ModelDtype = "float32",
    num_prompts: int = 32,
    max_tokens: int = 64,
    concurrency: int = 8,
    seed: int = 1,
    address: str = "",
    progress: Progress = silent,
) -> Verification:
    """Run the reference, then each mode of the cluster file (without `modes`, the file's own) on free ports.

    With `address`, the ZeroMQ address of a cluster of that file that runs already, perhaps on several machines, that
    one is asked instead. A mode that fails to start says so in its result; what is known to fail is raised before.

    Raises:
        ConfigError: the cluster file is wrong, or asks for what this version or machine does not have.
        ModelError: the model cannot be had, or transformers cannot run it.
    """
    base = load(file, sets=sets)
    plans = {
        mode: [*sets, *_overrides(base, mode, dtype, is_running=bool(address))]
        for mode in modes or (base.cluster.mode,)
    }
    configs = [load(file, sets=plan) for plan in plans.values()]
    for config in configs:
        blueprint.check_available(config)
    folder = store.resolve(base.model.path, fetch=True, progress=progress)
    for config in configs:
        _check_fit(config, ModelShape.read(folder), max_tokens)
    longest = min(MAX_PROMPT_TOKENS, base.model.max_model_len - max_tokens)
    prompts = make_prompts(Tokenizer(folder), num_prompts, max_tokens=longest, seed=seed)
    questions = Questions(prompts, max_tokens, concurrency)

    begin_s = time.monotonic()
    wanted = _Reference(folder, dtype, questions, progress)
    reference_s = time.monotonic() - begin_s
    token = base.security.client_token()
    results = {}
    for mode, plan in plans.items():
        progress(f"{mode}: start", 0, 0)
        start = partial(_start, file, plan, address)
        results[mode] = _verify_mode(start, token, wanted, questions, partial(progress, mode))
    return Verification(
        model=base.model.path,
        dtype=dtype,
        prompts=num_prompts,
        prompt_tokens=sum(map(len, prompts)),
        max_tokens=max_tokens,
        seed=seed,
        reference_seconds=round(reference_s, 1),
        modes=results,
    )


@contextmanager
def _start(file: Path | None, sets: Sequence[str], address: str) -> Iterator[str]:
    """Run a cluster, unless one runs at `address`; give its ZeroMQ address."""
    if address:
        yield address
        return
    with launch(file, sets=sets) as cluster:
        yield cluster.zmq


def _overrides(base: ClusterConfig, mode: Mode, dtype: ModelDtype, *, is_running: bool = False) -> list[str]:
    """Return the settings that differ from the file's: free ports on the same hosts, so that it may be running now."""
    return [f"cluster.mode={mode}", f"model.dtype={dtype}", *([] if is_running else free_ports(base))]


def _check_fit(config: ClusterConfig, shape: ModelShape, max_tokens: int) -> None:
    """Raise ConfigError if the model or the memory is too small for what the file and the prompts need."""
    blueprint.check_model(config, shape)
    blueprint.check_memory(config, config.node, shape, available_bytes())
    length = config.model.max_model_len
    if max_tokens >= length:
        raise ConfigError(f"model.max_model_len = {length}: answers of {max_tokens} tokens leave no room for a prompt")


class _Reference:
    """What transformers answers: at first in batches, and alone where a mode differs, lest padding be to blame."""

    def __init__(self, folder: Path, dtype: ModelDtype, questions: Questions, progress: Progress) -> None:
        self._job = Job(str(folder), dtype, tuple(questions.prompts), questions.max_tokens, BATCH)
        self._progress = progress
        self._alone: set[int] = set()
        self.expected = self._run(self._job, "reference")

    def look_again(self, prompts: Sequence[int]) -> None:
        """Answer these prompts one by one."""
        new = [prompt for prompt in prompts if prompt not in self._alone]
        if new:
            alone = msgspec.structs.replace(self._job, prompts=tuple(self._job.prompts[i] for i in new), batch=1)
            for prompt, answer in zip(new, self._run(alone, "reference, once more"), strict=True):
                self.expected[prompt] = answer
            self._alone.update(new)

    def _run(self, job: Job, what: str) -> list[Expected]:
        answers: dict[int, Expected] = {}
        self._progress(what, 0, len(job.prompts))
        for prompt, answer in reference.generate(job):
            answers[prompt] = answer
            self._progress(what, len(answers), len(job.prompts))
        return [answers[prompt] for prompt in range(len(job.prompts))]


def _verify_mode(
    start: Callable[[], AbstractContextManager[str]],
    token: str,
    wanted: _Reference,
    questions: Questions,
    progress: Callable[[int, int], None],
) -> ModeResult:
    result = ModeResult()
    try:
        with start() as address:
            begin_s = time.monotonic()
            answers = asyncio.run(ask(address, questions, token=token, progress=progress))
            result.seconds = round(time.monotonic() - begin_s, 1)
            result.preempted = count_preempted(address, token)
    except PDError as error:
        result.error = error.message
        return result
    pairs = enumerate(zip(wanted.expected, answers, strict=True))
    wanted.look_again([i for i, (one, got) in pairs if not isinstance(got, PDError) and tuple(got) != one.token_ids])
    for prompt, (expected, answer) in enumerate(zip(wanted.expected, answers, strict=True)):
        result.count(prompt, expected, answer)
    return result


def count_preempted(address: str, token: str) -> int:
    """Return how often sequences gave way to others in the cluster at `address`."""
    with Client(address, token=token) as client:
        return sum(actor["preempted"] for actor in client.status()["actors"])


async def ask(
    address: str,
    questions: Questions,
    *,
    token: str = "",
    progress: Callable[[int, int], None] = lambda _done, _of: None,
) -> list[Answer]:
    """Put the questions to the cluster at `address`; returns an answer or an error for each.

    Raises:
        ConnectionLost, Unauthorized: the cluster does not take this client.
    """
    prompts = questions.prompts
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(prompts))
    progress(0, len(prompts))

    async def work(client: AsyncClient) -> None:
        for index, prompt in waiting:
            try:
                answer = await client.generate(prompt_token_ids=prompt, max_tokens=questions.max_tokens)
                answers[index] = answer.token_ids
            except PDError as error:
                answers[index] = error
            progress(len(answers), len(prompts))

    async with AsyncClient(address, token=token) as client, asyncio.TaskGroup() as group:
        for _ in range(questions.concurrency):
            group.create_task(work(client))
    return [answers[index] for index in range(len(prompts))]
