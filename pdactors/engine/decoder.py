"""`Decoder`: the lean forward pass of the Llama and Qwen families, on our own kernels. Owns its work memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

from pdactors.engine.batch import StepBatch, check_tables
from pdactors.engine.machine import TORCH_DTYPES, Machine
from pdactors.engine.model import PagedModel, Way
from pdactors.engine.observation import attention_mass
from pdactors.engine.paged import PagedStep
from pdactors.engine.shape import ModelDtype, ModelShape
from pdactors.errors import InvariantError
from pdactors.kernels import attention, cpu
from pdactors.kernels import forward as kernel
from pdactors.kernels.pack import ROWS, packed_size, padded, tiled_size, unpack, zeros
from pdactors.kernels.simd import LANES
from pdactors.kv.layout import KVLayout

_MAX_SPARE = 4096  # rows or tiles: beyond that work memory grows no more than it must


class Decoder(PagedModel):
    """Runs steps in one call of compiled code, on as many threads as it is told to use."""

    def __init__(self, shape: ModelShape, model: kernel.Model, dtype: ModelDtype, machine: Machine) -> None:
        super().__init__(shape, dtype, machine)
        self._model = model._replace(sizes=model.sizes.copy())
        self._dtype = model.weights.dtype
        self._arena: NDArray[np.generic] | None = None
        self._planes: torch.Tensor | None = None  # the same, by block, layer, K or V, and KV head
        self._num_blocks = 0
        self._sizes = self._model.sizes
        self._num_rows = self._num_tiles = 0
        self._logits = zeros(0, np.float32)
        self._clock = np.zeros(kernel.NUM_CLOCKS, np.int64)
        self._tile_shapes = cpu.tile_shapes()
        self._threads = 0
        self.use_threads(1)

    @property
    def way(self) -> Way:
        return "lean"

    @property
    def reason(self) -> str:
        return ""

    def use_threads(self, count: int) -> None:
        self._threads = max(1, count)
        head_dim = self.shape.head_dim
        self._floats = zeros(self._threads * kernel.scratch_floats(head_dim), np.float32)
        self._elements = zeros(self._threads * attention.scratch_elements(head_dim), self._dtype)
        self._barrier = np.zeros(1, np.int64)
        self._pool = ThreadPoolExecutor(self._threads - 1, "compute") if self._threads > 1 else None

    def _bind(self, payload: NDArray[np.uint8], layout: KVLayout) -> None:
        if layout.block_tokens % attention.CHUNK:
            raise InvariantError(f"the decoder reads {attention.CHUNK} tokens at once, not {layout.block_tokens}")
        self._arena = payload.reshape(-1).view(self._dtype)
        self._planes = torch.from_numpy(payload).view(TORCH_DTYPES[layout.dtype]).view(len(payload), *layout.shape)
        self._num_blocks = len(payload)
        layer_stride = layout.block_bytes // layout.itemsize // layout.num_layers
        self._sizes[[kernel.BLOCK_TOKENS, kernel.LAYER_STRIDE]] = layout.block_tokens, layer_stride
        self._sizes[kernel.BLOCK_STRIDE] = layer_stride * layout.num_layers

    def unbind(self) -> None:
        self._arena = self._planes = None

    def forward(self, batch: StepBatch) -> torch.Tensor:
        step = self._step(batch)
        return torch.from_numpy(self._run(step, self._queries))

    def observe(self, batch: StepBatch) -> NDArray[np.float32]:
        self._check_observed(batch)
        step = self._step(batch)
        layers, kv_heads, head_dim = self.shape.num_layers, self.shape.num_kv_heads, self.shape.head_dim
        count, group = len(step.rows), self.shape.num_heads // kv_heads
        tiles = -(-count * group // LANES)
        columns = layers * kv_heads * tiles * LANES
        packed = zeros(packed_size(columns, head_dim), self._dtype)
        self._run(step._replace(layer_tiles=kv_heads * tiles), packed)
        assert self._planes is not None
        queries = torch.from_numpy(np.ascontiguousarray(unpack(packed, columns, head_dim))).view(self._planes.dtype)
        queries = queries.view(layers, kv_heads, tiles * LANES, head_dim)[:, :, : count * group]
        grouped = queries.reshape(layers, kv_heads, count, group, head_dim).transpose(2, 3)
        paged = PagedStep(self._planes, int(self._sizes[kernel.BLOCK_TOKENS]), batch.spans, count)
        masses = [
            attention_mass(grouped[layer], paged.gather(layer, paged.spans[0], 0)[0], head_dim**-0.5)
            for layer in range(layers)
        ]
        return torch.stack(masses).numpy()

    def _step(self, batch: StepBatch) -> kernel.Step:
        """Put a step into arrays.

        Raises:
            InvariantError: the step or a table is wrong, or there is no arena.
        """
        if self._arena is None:
            raise InvariantError("the model is not bound to an arena")
        self._check(batch)
        block_tokens = int(self._sizes[kernel.BLOCK_TOKENS])
        checked = check_tables(batch.spans, len(batch.input_ids), self._num_blocks, block_tokens)
        spans = np.empty((len(batch.spans), kernel.NUM_SPAN_COLUMNS), np.int64)
        spans[:, kernel.START] = [span.start for span in batch.spans]
        spans[:, kernel.COUNT] = [span.num_tokens for span in batch.spans]
        spans[:, kernel.CONTEXT] = [span.context_len for span in batch.spans]
        lengths = [len(blocks) for blocks in checked.blocks]
        spans[:, kernel.TABLE] = np.cumsum(lengths) - lengths
        group = self.shape.num_heads // self.shape.num_kv_heads
        tiles = -(-spans[:, kernel.COUNT] * group // LANES)
        spans[:, kernel.TILE] = np.cumsum(tiles) - tiles
        rows = np.empty((len(batch.input_ids), kernel.NUM_ROW_COLUMNS), np.int64)
        rows[:, kernel.TOKEN] = batch.input_ids
        rows[:, kernel.POSITION] = batch.positions
        rows[:, kernel.SPAN] = np.repeat(np.arange(len(spans)), spans[:, kernel.COUNT])
        rows[:, kernel.SLOT_BLOCK], rows[:, kernel.SLOT] = np.divmod(checked.slots, block_tokens)
        self._make_room(len(rows), int(tiles.sum()), len(batch.logit_rows))
        return kernel.Step(rows, spans, np.concatenate(checked.blocks), np.array(batch.logit_rows, np.int64))

    def _run(self, step: kernel.Step, queries: NDArray[np.generic]) -> NDArray[np.float32]:
        """Compute a step; what it is made of was checked. Returns logits `[len(wanted), vocab]`."""
        began, arena = time.perf_counter(), self._arena
        self._barrier[0] = 0
        work = kernel.Work(
            self._x, self._normed, self._qkv, queries, self._attended, self._gated, self._logits, self._floats,
            self._elements, self._tile_shapes, self._clock, self._barrier,
        )  # fmt: skip
        others = []
        for thread in range(1, self._threads):
            assert self._pool is not None
            others.append(self._pool.submit(kernel.forward, self._model, work, step, arena, thread, self._threads))
        kernel.forward(self._model, work, step, arena, 0, self._threads)
        for other in others:
            other.result()
        share = self._clock[kernel.CLOCK_ATTENTION] / max(1, self._clock[kernel.CLOCK_ALL])
        self.attention_s = float(share) * (time.perf_counter() - began)
        count, width = len(step.wanted), padded(self.shape.vocab_size, LANES)
        return self._logits[: count * width].reshape(count, width)[:, : self.shape.vocab_size]

    def _make_room(self, num_rows: int, num_tiles: int, num_wanted: int) -> None:
        """Have work memory for a step of that size; it grows in doublings, and holds zeros where nothing is written."""
        hidden, inner = int(self._sizes[kernel.HIDDEN]), int(self._sizes[kernel.GATED])
        heads, kv_heads, head_dim = self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim
        if num_rows > self._num_rows:
            self._num_rows = rows = max(num_rows, min(2 * self._num_rows, _MAX_SPARE), 2 * ROWS)
            self._x = zeros(rows * hidden, np.float32)
            self._qkv = zeros(rows * (heads + 2 * kv_heads) * head_dim, np.float32)
            self._normed = zeros(tiled_size(rows, hidden), self._dtype)
            self._attended = zeros(tiled_size(rows, heads * head_dim), self._dtype)
            self._gated = zeros(tiled_size(rows, inner), self._dtype)
        if num_tiles > self._num_tiles:
            self._num_tiles = max(num_tiles, min(2 * self._num_tiles, _MAX_SPARE))
            self._queries = zeros(kv_heads * self._num_tiles * head_dim * LANES, self._dtype)
        num_logits = num_wanted * padded(self.shape.vocab_size, LANES)
        if num_logits > len(self._logits):
            self._logits = zeros(num_logits, np.float32)
