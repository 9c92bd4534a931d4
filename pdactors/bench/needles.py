"""What pruning KV loses: needle questions, answered after the whole prompt's KV and after what pruning leaves of it.

A fact stands near the start of a prompt, prose follows, and at the end it is asked for.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
from msgspec import Struct

from pdactors.engine import store
from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.load import load_model, why_not_lean
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.model import PagedModel
from pdactors.engine.pruner import num_scratch, prune
from pdactors.engine.shape import ModelDtype, ModelShape
from pdactors.errors import ModelError
from pdactors.kernels.pack import zeros
from pdactors.text.tokenizer import Tokenizer

LENGTHS = (256, 512, 1024)  # of the prompts, in tokens
LEAST = 10  # questions that the model answers after the whole prompt, or a length says nothing
SHARE = 0.7  # of the tokens whose KV is kept, unless the file says so
_BLOCK_TOKENS = 32
_CHUNK = 512
_MAX_ANSWER = 24
_CITIES = (
    "Paris Rome Berlin Madrid London Vienna Prague Dublin Oslo Athens Lisbon Warsaw Cairo Tokyo Delhi Seoul Lima "
    "Boston Chicago Dallas Denver Miami Houston Seattle Sydney Toronto Moscow Geneva Munich Milan"
).split()


class NeedlesAt(Struct, frozen=True):
    """Prompts of one length: questions answered after all KV, after pruned KV, after both; and how long pruning is."""

    whole: int
    pruned: int
    both: int
    ratio: float | None  # `both` over `whole`
    prune_ms: float  # median


class NeedlesBench(Struct, frozen=True):
    """All lengths that were asked at. `ratio` is over those where at least `least` were answered after all KV."""

    share: float
    questions: int
    least: int
    lengths: dict[str, NeedlesAt]
    ratio: float | None  # None: at no length were there enough


@dataclass(frozen=True)
class Question:
    """A prompt and what its answer has to contain."""

    prompt: list[int]
    answer: str


def bench_needles(
    path: str,
    *,
    dtype: ModelDtype = "bfloat16",
    share: float = SHARE,
    questions: int = 30,
    seed: int = 1,
    lengths: Sequence[int] = LENGTHS,
    progress: Progress = silent,
) -> NeedlesBench:
    """Ask a model after whole and pruned KV, with prompts as long as it can take.

    Raises:
        ModelError: it cannot be loaded, or has too few positions.
    """
    folder = store.resolve(path, fetch=True, progress=progress)
    shape = ModelShape.read(folder)
    lengths = [length for length in lengths if length + _MAX_ANSWER <= shape.max_position]
    if not lengths:
        raise ModelError(f"{folder}: {shape.max_position} positions are too few for needle questions")
    is_lean = not why_not_lean(folder, shape, dtype, _BLOCK_TOKENS)
    model = load_model(folder, dtype, threads=1, way="lean" if is_lean else None)
    tokenizer = Tokenizer(folder)
    asker = Asker(model, tokenizer, max(lengths))
    found: dict[str, NeedlesAt] = {}
    for length in lengths:
        whole, pruned = [], []
        for done, question in enumerate(make_questions(tokenizer, questions, length, seed)):
            progress(f"needles at {length}", done, questions)
            answers = asker.ask(question.prompt, share)
            whole.append(question.answer in answers[0])
            pruned.append(question.answer in answers[1])
        both = sum(map(bool.__and__, whole, pruned))
        ms = round(1000 * statistics.median(asker.pruning_s[-questions:]), 1)
        found[str(length)] = NeedlesAt(sum(whole), sum(pruned), both, _ratio(both, sum(whole)), ms)
    model.close()
    counted = [at for at in found.values() if at.whole >= LEAST]
    ratio = _ratio(sum(at.both for at in counted), sum(at.whole for at in counted))
    return NeedlesBench(share, questions, LEAST, found, ratio)


def _ratio(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def make_questions(tokenizer: Tokenizer, count: int, length: int, seed: int) -> list[Question]:
    """Return questions whose prompts have at most `length` tokens, and about as many.

    The prose is taken from Python's own manual, which every Python carries.
    """
    rng = random.Random(seed)  # noqa: S311 - nothing secret
    sentences = [" ".join(part.split()) + "." for name in sorted(topics) for part in topics[name].split(".\n")]
    sentences = [sentence for sentence in sentences if 40 < len(sentence) < 200 and sentence.isascii()]
    found = []
    for number in range(count):
        city, secret = _CITIES[number % len(_CITIES)], str(rng.randrange(1000, 10000))
        first = f"The secret number of {city} is {secret}."
        last = f"What is the secret number of {city}?"
        rest: list[str] = []
        prompt = _prompt(tokenizer, first, rest, last)
        while True:
            rest.append(rng.choice(sentences))
            longer = _prompt(tokenizer, first, rest, last)
            if len(longer) > length:
                break
            prompt = longer
        found.append(Question(prompt, secret))
    return found


def _prompt(tokenizer: Tokenizer, first: str, rest: Sequence[str], last: str) -> list[int]:
    text = f"{first}\n\n{' '.join(rest)}\n\n{last}"
    if tokenizer.has_chat_template:
        return tokenizer.encode_chat([{"role": "user", "content": text}])
    return tokenizer.encode(f"{text}\nAnswer:")


class Asker:
    """A model with room for one prompt, its pruned KV and an answer after each."""

    def __init__(self, model: PagedModel, tokenizer: Tokenizer, max_tokens: int) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._layout = model.layout_for(_BLOCK_TOKENS)
        self.pruning_s: list[float] = []
        size = self._layout.num_blocks(max_tokens + _MAX_ANSWER)
        scratch = num_scratch(self._layout, max_tokens) + 1
        count = 2 * size + scratch
        self._whole, self._pruned, self._scratch = range(size), range(size, 2 * size), range(2 * size, count)
        self._arena = zeros(count * self._layout.block_bytes, np.uint8).reshape(count, -1)
        model.bind(self._arena, self._layout)

    def ask(self, prompt: Sequence[int], share: float) -> tuple[str, str]:
        """Return the greedy answers after the whole prompt's KV, and after a share of it."""
        size, first = len(prompt), 0
        for start in range(0, size, _CHUNK):
            first = self._step(prompt[start : start + _CHUNK], start, min(start + _CHUNK, size), self._whole)
        scratch = self._scratch[: num_scratch(self._layout, size)]
        blocks = self._whole[: self._layout.num_blocks(size)]
        began = time.perf_counter()
        kept = prune(self._model, self._layout, self._arena, prompt, blocks, share, scratch, self._pruned)
        self.pruning_s.append(time.perf_counter() - began)
        return self._answer(first, size, size, self._whole), self._answer(first, size, kept, self._pruned)

    def _answer(self, token: int, position: int, slot: int, table: Sequence[int]) -> str:
        tokens = [token]
        while len(tokens) < _MAX_ANSWER and tokens[-1] not in self._model.shape.eos_ids:
            done = len(tokens) - 1
            tokens.append(self._step(tokens[-1:], position + done, slot + len(tokens), table))
        return self._tokenizer.decode(tokens)

    def _step(self, tokens: Sequence[int], position: int, context_len: int, table: Sequence[int]) -> int:
        """Compute tokens from a position on; return the favourite after them."""
        count = len(tokens)
        spans = [Span(0, count, context_len, table)]
        logits = self._model.forward(StepBatch(tokens, range(position, position + count), spans, [count - 1]))
        return int(logits[0].argmax())
