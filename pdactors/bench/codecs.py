"""What the KV codecs cost and lose: speed beside memcpy, and what the model says after KV that went through one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pydoc_data.topics import topics

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray

from pdactors.engine import store
from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.load import load_model, why_not_lean
from pdactors.engine.machine import TORCH_DTYPES
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.model import PagedModel
from pdactors.engine.shape import ModelDtype, ModelShape
from pdactors.errors import ModelError
from pdactors.kernels.pack import zeros
from pdactors.kv.codec import CodecName, decode, encode, encoded_bytes, prepare
from pdactors.kv.layout import KVLayout
from pdactors.text.tokenizer import Tokenizer

CODECS: tuple[CodecName, ...] = ("int8", "int4")
_PROMPT, _SCORED = 512, 512  # tokens of a text whose KV is moved, and tokens after them
_BLOCK_TOKENS = 32
_NUM_BLOCKS = 32  # that speed is measured over


class Loss(Struct, frozen=True):
    """How the model's next tokens change: share of positions with the same favourite, and mean KL in nats."""

    top1: float
    kl: float


class CodecResult(Struct, frozen=True):
    """A codec beside bfloat16 (or what the KV's dtype is): size over size, bytes of blocks per second, and the loss.

    For `none` the loss is the noise floor: a prompt prefilled in two halves by transformers, as right as ours but
    rounded elsewhere, instead of by our kernels.
    """

    ratio: float
    quantise_gb_s: float | None
    dequantise_gb_s: float | None
    top1: float
    kl: float


class CodecsBench(Struct, frozen=True):
    """All of it, and `own_halves`: the loss when our kernels prefill in two halves, which is to be none at all."""

    codecs: dict[str, CodecResult]
    memcpy_gb_s: float
    positions: int
    own_halves: Loss


def bench_codecs(
    path: str, *, dtype: ModelDtype = "bfloat16", positions: int = 5120, rounds: int = 9, progress: Progress = silent
) -> CodecsBench:
    """Measure a model's KV through each codec, over at least so many positions of English prose.

    Raises:
        ModelError: it cannot be loaded.
    """
    folder = store.resolve(path, fetch=True, progress=progress)
    is_lean = not why_not_lean(folder, ModelShape.read(folder), dtype, _BLOCK_TOKENS)
    ours = load_model(folder, dtype, threads=1, way="lean" if is_lean else None)
    theirs = load_model(folder, dtype, way="transformers", seq_check=False)
    layout = ours.layout_for(_BLOCK_TOKENS)
    speeds = measure_speeds(layout, rounds)
    texts = make_texts(Tokenizer(folder), -(-positions // _SCORED))
    losses = _losses(ours, theirs, layout, texts, progress)
    found = {"none": CodecResult(1.0, None, None, losses["none"].top1, losses["none"].kl)}
    for codec in CODECS:
        ratio = round(encoded_bytes(codec, layout) / layout.block_bytes, 4)
        speed = speeds[codec]
        loss = losses[codec]
        found[codec] = CodecResult(ratio, speed.quantise_gb_s, speed.dequantise_gb_s, loss.top1, loss.kl)
    return CodecsBench(found, speeds["int8"].memcpy_gb_s, len(texts) * _SCORED, losses["own halves"])


# ---- Speed --------


@dataclass(frozen=True)
class Speed:
    """Bytes of blocks per second, medians of interleaved rounds."""

    quantise_gb_s: float
    dequantise_gb_s: float
    memcpy_gb_s: float


def measure_speeds(layout: KVLayout, rounds: int) -> dict[CodecName, Speed]:
    """Time each codec over blocks that no cache holds, in turns with a memcpy of them."""
    numbers = torch.randn(
        _NUM_BLOCKS, layout.block_bytes // layout.itemsize, generator=torch.Generator().manual_seed(1)
    )
    source = numbers.to(TORCH_DTYPES[layout.dtype]).view(torch.uint8).numpy()
    target = np.ones_like(source)
    found = {}
    for codec in CODECS:
        prepare(codec, layout)
        frames = np.ones((_NUM_BLOCKS, encoded_bytes(codec, layout)), np.uint8)
        found[codec] = Speed(*_turns(codec, layout, source, frames, target, rounds))
    return found


def _turns(
    codec: CodecName,
    layout: KVLayout,
    source: NDArray[np.uint8],
    frames: NDArray[np.uint8],
    target: NDArray[np.uint8],
    rounds: int,
) -> list[float]:
    actions: tuple[Callable[[], None], ...] = (
        lambda: encode(codec, layout, source, frames),
        lambda: decode(codec, layout, frames, target),
        lambda: np.copyto(target, source),
    )
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(rounds):
        for action, taken in zip(actions, times, strict=True):
            began = time.perf_counter()
            action()
            taken.append(time.perf_counter() - began)
    return [round(source.nbytes / statistics.median(taken) / 1e9, 2) for taken in times]


# ---- Loss --------


def make_texts(tokenizer: Tokenizer, count: int) -> list[list[int]]:
    """Return the tokens of `count` different texts: pieces of Python's own manual, which every Python carries.

    Raises:
        ModelError: the tokenizer makes too few tokens of it.
    """
    size = _PROMPT + _SCORED
    tokens: list[int] = []
    for name in sorted(topics):
        tokens += tokenizer.encode(topics[name])
        if len(tokens) >= count * size:
            return [tokens[i * size : (i + 1) * size] for i in range(count)]
    raise ModelError(f"the tokenizer makes only {len(tokens)} tokens of Python's manual: {count * size} are needed")


@dataclass
class _Tally:
    same: int = 0
    kl: float = 0.0
    positions: int = 0

    def add(self, expected: torch.Tensor, found: torch.Tensor) -> None:
        """Compare log-probabilities `[positions, vocab]`."""
        self.same += int((expected.argmax(-1) == found.argmax(-1)).sum())
        self.kl += float((expected.exp() * (expected - found)).sum(dtype=torch.float64))
        self.positions += len(expected)

    @property
    def loss(self) -> Loss:
        return Loss(round(self.same / self.positions, 4), round(self.kl / self.positions, 7))


def _losses(
    ours: PagedModel, theirs: PagedModel, layout: KVLayout, texts: Sequence[Sequence[int]], progress: Progress
) -> dict[str, Loss]:
    """Score each text's second half after its first half's KV came there in different ways."""
    size = layout.num_blocks(_PROMPT + _SCORED)
    arena = zeros(size * layout.block_bytes, np.uint8).reshape(size, -1)
    ours.bind(arena, layout)
    theirs.bind(arena, layout)
    prompt = arena[: _PROMPT // _BLOCK_TOKENS]
    half = _PROMPT // 2
    halves = {"own halves": ours, "none": theirs}
    tallies = {name: _Tally() for name in (*halves, *CODECS)}
    for done, text in enumerate(texts):
        progress("codecs", done, len(texts))
        _prefill(ours, text, 0, _PROMPT)
        exact = prompt.copy()
        expected = _prefill(ours, text, _PROMPT, len(text))
        for name, model in halves.items():
            _prefill(model, text, 0, half)
            _prefill(model, text, half, _PROMPT)
            tallies[name].add(expected, _prefill(ours, text, _PROMPT, len(text)))
        for codec in CODECS:
            _pass(codec, layout, exact, prompt)
            tallies[codec].add(expected, _prefill(ours, text, _PROMPT, len(text)))
    ours.unbind()
    theirs.close()
    return {name: tally.loss for name, tally in tallies.items()}


def _pass(codec: CodecName, layout: KVLayout, blocks: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    frames = np.empty((len(blocks), encoded_bytes(codec, layout)), np.uint8)
    encode(codec, layout, blocks, frames)
    decode(codec, layout, frames, target)


def _prefill(model: PagedModel, text: Sequence[int], begin: int, end: int) -> torch.Tensor:
    """Compute tokens `begin .. end` of a text, which lies at the arena's start; return log-probabilities after each."""
    table = range(-(-len(text) // _BLOCK_TOKENS))
    spans = [Span(0, end - begin, end, table)]
    logits = model.forward(StepBatch(text[begin:end], range(begin, end), spans, range(end - begin)))
    return torch.log_softmax(logits.float(), -1)
