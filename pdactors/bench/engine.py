"""What a step of the engine costs, beside transformers and beside what the machine allows, in one process."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from msgspec import Struct
from transformers import AutoModelForCausalLM, DynamicCache

from pdactors.engine import store
from pdactors.engine.batch import Span, StepBatch
from pdactors.engine.load import load_model, why_not_lean
from pdactors.engine.machine import TORCH_DTYPES
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.model import PagedModel
from pdactors.engine.sampling import SampleRow, sample
from pdactors.engine.shape import ModelDtype, ModelShape
from pdactors.kernels import stream
from pdactors.kv.arena import Arena
from pdactors.messages import Sampling

BATCHES = (1, 2, 4, 8, 16, 32)
CONTEXTS = (256, 1024)
PROMPTS = (128, 512, 2048)
CHUNK_TOKENS = 512
_BLOCK_TOKENS = 32
_READ_FLOATS = 64 << 20  # 256 MiB, beyond what a cache keeps of it
_GEMM = (512, 3072, 576)  # rows, outputs, inputs
_ATTENTION_AT = (8, 1024)  # batch and context whose attention is held against reading


class DecodeCost(Struct, frozen=True):
    """One decode step, sampling included; `limit_ms` is reading the weights and the KV once."""

    batch: int
    context: int
    ms: float
    attention_ms: float
    transformers_ms: float
    limit_ms: float


class PrefillCost(Struct, frozen=True):
    """One prompt in chunks; `limit_ms` is its multiplications at the machine's GEMM rate."""

    tokens: int
    ms: float
    attention_ms: float
    transformers_ms: float
    limit_ms: float


class EngineBench(Struct, frozen=True):
    """What `pdactors bench engine --json` prints. Medians of interleaved rounds."""

    model: str
    dtype: str
    way: str
    threads: int
    rounds: int
    read_gb_s: float
    gemm_tflop_s: float
    decode: list[DecodeCost]
    prefill: list[PrefillCost]
    attention_read_ratio: float


class Limits:
    """What the machine gives `threads` threads, measured again in every round."""

    def __init__(self, threads: int, dtype: ModelDtype) -> None:
        self._memory = np.ones(_READ_FLOATS, np.float32)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads)
        rows, outputs, inputs = _GEMM
        self._a = torch.randn(rows, inputs).to(TORCH_DTYPES[dtype])
        self._b = torch.randn(outputs, inputs).to(TORCH_DTYPES[dtype])

    def read(self) -> None:
        """Read 256 MiB."""
        part = _READ_FLOATS // self._threads
        parts = [self._pool.submit(stream.read, self._memory, i * part, part) for i in range(self._threads)]
        for done in parts:
            done.result()

    def multiply(self) -> None:
        """Multiply two matrices of the sizes of a layer, with torch."""
        with torch.inference_mode():
            torch.nn.functional.linear(self._a, self._b)

    @property
    def gemm_flops(self) -> float:
        rows, outputs, inputs = _GEMM
        return 2.0 * rows * outputs * inputs


def bench_engine(
    path: str, *, dtype: ModelDtype = "bfloat16", threads: int = 1, rounds: int = 9, progress: Progress = silent
) -> EngineBench:
    """Measure decode steps and prompts of a model.

    Raises:
        ModelError: it cannot be loaded.
    """
    folder = store.resolve(path, fetch=True, progress=progress)
    is_lean = not why_not_lean(folder, ModelShape.read(folder), dtype, _BLOCK_TOKENS)
    ours = load_model(folder, dtype, threads=threads, way="lean" if is_lean else None)
    theirs = _load_reference(folder, dtype)
    torch.set_num_threads(threads)
    limits = Limits(threads, dtype)
    weight_bytes = ours.shape.weight_bytes_as(ours.dtype)
    token_bytes = ours.layout_for(_BLOCK_TOKENS).token_bytes
    decode, prefill, reads, gemms, ratio = [], [], [], [], 0.0
    for done, (context, batch) in enumerate(itertools.product(CONTEXTS, BATCHES)):
        progress("decode", done, len(CONTEXTS) * len(BATCHES))
        kv_bytes = batch * context * token_bytes
        mine = decode_step(ours, batch, context)
        found = _interleave(rounds, ours, mine, _reference_step(theirs, ours, batch, context), limits.read)
        bytes_per_ms = 4 * _READ_FLOATS / found.limit_ms
        limit_ms = round((weight_bytes + kv_bytes) / bytes_per_ms, 3)
        decode.append(DecodeCost(batch, context, found.ms, found.attention_ms, found.transformers_ms, limit_ms))
        reads.append(found.limit_ms)
        if (batch, context) == _ATTENTION_AT:
            ratio = round(kv_bytes / found.attention_ms / bytes_per_ms, 3)
    for done, tokens in enumerate(PROMPTS):
        progress("prefill", done, len(PROMPTS))
        mine = prompt(ours, tokens)
        found = _interleave(max(3, rounds // 2), ours, mine, _reference_prompt(theirs, ours, tokens), limits.multiply)
        limit_ms = round(_prefill_flops(ours, tokens) / limits.gemm_flops * found.limit_ms, 3)
        prefill.append(PrefillCost(tokens, found.ms, found.attention_ms, found.transformers_ms, limit_ms))
        gemms.append(found.limit_ms)
    return EngineBench(
        model=path,
        dtype=dtype,
        way=ours.description,
        threads=threads,
        rounds=rounds,
        read_gb_s=round(4 * _READ_FLOATS / statistics.median(reads) / 1e6, 2),
        gemm_tflop_s=round(limits.gemm_flops / statistics.median(gemms) / 1e9, 3),
        decode=decode,
        prefill=prefill,
        attention_read_ratio=ratio,
    )


@dataclass(frozen=True)
class _Medians:
    ms: float
    attention_ms: float
    transformers_ms: float
    limit_ms: float


def _interleave(
    rounds: int,
    model: PagedModel,
    ours: Callable[[], object],
    theirs: Callable[[], object],
    limit: Callable[[], object],
) -> _Medians:
    """Run each once for nothing, then in turns; return medians in milliseconds."""
    times: list[tuple[float, float, float, float]] = []
    for _ in range(rounds + 1):
        mine, attention_s = time_ms(ours), model.attention_s
        times.append((mine, attention_s * 1000, time_ms(theirs), time_ms(limit)))
    return _Medians(*(round(statistics.median(column), 3) for column in zip(*times[1:], strict=True)))


def time_ms(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return (time.perf_counter() - began) * 1000


def _bind(model: PagedModel, num_tokens: int, count: int) -> list[list[int]]:
    """Give the model an arena for `count` sequences of so many tokens, as a node's; return their tables.

    It is written once: pages that nobody wrote are all one, and reading them would cost nothing.
    """
    layout = model.layout_for(_BLOCK_TOKENS)
    per_sequence = layout.num_blocks(num_tokens)
    num_blocks = count * per_sequence
    arena = Arena.create(
        layout, num_blocks, extent_blocks=num_blocks, num_slots=1, leases_per_slot=1, max_lease_blocks=1
    )
    payload = arena.payload()
    arena.close()
    dtype = TORCH_DTYPES[model.dtype]
    kv = torch.randn(layout.block_bytes // dtype.itemsize).to(dtype)
    payload[:] = kv.view(torch.uint8).numpy()
    model.bind(payload, layout)
    blocks = np.random.default_rng(1).permutation(num_blocks)  # as they come when sequences grow side by side
    return blocks.reshape(count, per_sequence).tolist()


def decode_step(model: PagedModel, batch: int, context: int) -> Callable[[], object]:
    tables = _bind(model, context, batch)
    spans = [Span(i, 1, context, table) for i, table in enumerate(tables)]
    step = StepBatch([1] * batch, [context - 1] * batch, spans, range(batch))
    rows = [SampleRow(Sampling(max_tokens=1), 0)] * batch
    return lambda: sample(model.forward(step), rows)


def chunk_step(model: PagedModel, tokens: int, past: int) -> Callable[[], object]:
    """Return a step that computes the `tokens` tokens of a prompt after its first `past` ones."""
    (table,) = _bind(model, past + tokens, 1)
    step = StepBatch([1] * tokens, range(past, past + tokens), [Span(0, tokens, past + tokens, table)], [tokens - 1])
    rows = [SampleRow(Sampling(max_tokens=1), 0)]
    return lambda: sample(model.forward(step), rows)


def prompt(model: PagedModel, tokens: int) -> Callable[[], object]:
    (table,) = _bind(model, tokens, 1)

    def run() -> None:
        attention_s = 0.0
        for begin in range(0, tokens, CHUNK_TOKENS):
            end = min(tokens, begin + CHUNK_TOKENS)
            spans = [Span(0, end - begin, end, table)]
            model.forward(StepBatch([1] * (end - begin), range(begin, end), spans, [end - begin - 1]))
            attention_s += model.attention_s
        model.attention_s = attention_s

    return run


def _load_reference(folder: Path, dtype: ModelDtype) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=TORCH_DTYPES[dtype], local_files_only=True)
    return model.eval()


def _reference_step(theirs: Any, ours: PagedModel, batch: int, context: int) -> Callable[[], object]:
    """Return a step of transformers with its own cache, its own attention, and arg-max."""
    cache = DynamicCache()
    size = (batch, ours.shape.num_kv_heads, context - 1, ours.shape.head_dim)
    for layer in range(ours.shape.num_layers):
        cache.update(torch.randn(size).to(theirs.dtype), torch.randn(size).to(theirs.dtype), layer)
    tokens = torch.ones(batch, 1, dtype=torch.int64)

    def run() -> None:
        with torch.inference_mode():
            theirs(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)
            cache.crop(-1)

    return run


def _reference_prompt(theirs: Any, ours: PagedModel, tokens: int) -> Callable[[], object]:
    ids = torch.ones(1, tokens, dtype=torch.int64)

    def run() -> None:
        with torch.inference_mode():
            theirs(input_ids=ids, use_cache=True, logits_to_keep=1)

    return run


def _prefill_flops(model: PagedModel, tokens: int) -> float:
    """Return the multiplications of a prompt: two for each weight of a layer and token, and attention's."""
    shape = model.shape
    weights = shape.num_floats - shape.vocab_size * shape.hidden_size
    attention = 4.0 * shape.head_dim * shape.num_heads * shape.num_layers * tokens * (tokens + 1) / 2
    return 2.0 * weights * tokens + attention
