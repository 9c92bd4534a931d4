"""`PagedModel`: a model whose KV lives in the node's arena. Its children are the ways in which one can be computed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from pdactors.engine.batch import StepBatch
from pdactors.engine.machine import Machine
from pdactors.engine.shape import ModelDtype, ModelShape
from pdactors.errors import InvariantError
from pdactors.kv.layout import KVLayout

Way = Literal["lean", "transformers"]


class PagedModel(ABC):
    """A model bound to an arena; `forward` runs one step of any mix of sequences.

    Made by `load_model`. Not thread-safe: one step at a time. Owns weights and arena view, not sequences.
    """

    def __init__(self, shape: ModelShape, dtype: ModelDtype, machine: Machine) -> None:
        self.shape = shape
        self.dtype = dtype
        self.machine = machine  # what a thread can do at best
        self.attention_s = 0.0  # of the last step

    @property
    @abstractmethod
    def way(self) -> Way:
        """How it is computed: on our own kernels, or by transformers."""

    @property
    @abstractmethod
    def reason(self) -> str:
        """Why it is not computed the lean way; "" if it is."""

    @property
    def description(self) -> str:
        """The way, and the reason for it."""
        return f"{self.way}: {self.reason}" if self.reason else self.way

    @abstractmethod
    def use_threads(self, count: int) -> None:
        """Compute with `count` threads in this process from now on."""

    def layout_for(self, block_tokens: int) -> KVLayout:
        """Return the layout that this model's KV has in blocks of `block_tokens` tokens."""
        shape = self.shape
        return KVLayout(shape.num_layers, shape.num_kv_heads, shape.head_dim, block_tokens, self.dtype)

    def bind(self, payload: NDArray[np.uint8], layout: KVLayout) -> None:
        """Use `payload`, uint8 `[num_blocks, block_bytes]`, as the arena; shares its memory.

        Raises:
            InvariantError: the layout is not this model's, or the payload does not have its shape.
        """
        if layout != self.layout_for(layout.block_tokens):
            raise InvariantError(f"an arena of {layout} cannot hold the KV of {self.layout_for(layout.block_tokens)}")
        if payload.ndim != 2 or payload.shape[1] != layout.block_bytes or payload.dtype != np.uint8:
            raise InvariantError(
                f"payload {payload.dtype}{payload.shape} does not hold blocks of {layout.block_bytes} bytes"
            )
        if not (payload.flags.c_contiguous and payload.flags.writeable):
            raise InvariantError("the arena's payload must be contiguous and writable")
        self._bind(payload, layout)

    @abstractmethod
    def _bind(self, payload: NDArray[np.uint8], layout: KVLayout) -> None: ...

    @abstractmethod
    def unbind(self) -> None:
        """Let go of the arena; idempotent."""

    @abstractmethod
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Run one step: write the new tokens' KV, return float32 logits `[len(logit_rows), vocab]`.

        They may be overwritten by the next step.

        Raises:
            InvariantError: the batch's tables, rows or positions are out of range; nothing has been written then.
        """

    @abstractmethod
    def observe(self, batch: StepBatch) -> NDArray[np.float32]:
        """Run a step of one span; return the attention that its tokens paid, float32 `[layers, kv_heads, context_len]`.

        It is summed over the tokens and over the query heads of each KV head.

        Raises:
            InvariantError: as `forward`, or there is not one span.
            ModelError: a layer sees a sliding window only.
        """

    def close(self) -> None:
        """Let go of arena and weights; idempotent."""
        self.unbind()

    def _check_observed(self, batch: StepBatch) -> None:
        if len(batch.spans) != 1:
            raise InvariantError(f"{len(batch.spans)} spans are to be observed, not one")

    def _check(self, batch: StepBatch) -> None:
        num_rows = len(batch.input_ids)
        if num_rows == 0 or len(batch.positions) != num_rows:
            raise InvariantError(f"a step of {num_rows} tokens and {len(batch.positions)} positions")
        for what, values, limit in (
            ("token id", batch.input_ids, self.shape.vocab_size),
            ("position", batch.positions, self.shape.max_position),
            ("logit row", batch.logit_rows, num_rows),
        ):
            if len(values) and not (min(values) >= 0 and max(values) < limit):
                raise InvariantError(f"a {what} of the step is outside 0 .. {limit - 1}")
