"""`PagedModel`: a transformers model whose KV lives in the node's arena. Owns weights and arena view, not sequences."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM

from pdactors.engine.machine import Machine, measure
from pdactors.engine.paged import ATTENTION_NAME, PagedStep, StepBatch, register
from pdactors.engine.probe import compare_with_eager, inspect_attention
from pdactors.engine.shape import ModelDtype, ModelShape
from pdactors.errors import InvariantError, ModelError
from pdactors.kv.layout import KVLayout

_DTYPES: dict[ModelDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
# What transformers raises for folders and architectures that it cannot load.
_LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError)


class PagedModel:
    """A model bound to an arena; `forward` runs one step of any mix of sequences.

    Made by `load_model`. Not thread-safe: one step at a time.
    """

    def __init__(self, model: Any, shape: ModelShape, dtype: ModelDtype, machine: Machine) -> None:
        self.shape = shape
        self.dtype = dtype
        self._model: Any = model
        self.machine = machine  # what a thread can do at best
        self.attention_s = 0.0  # of the last step
        self._arena: torch.Tensor | None = None
        # A model without logits_to_keep computes the logits of every row.
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def use_threads(self, count: int) -> None:
        """Compute with `count` threads in this process from now on."""
        torch.set_num_threads(count)

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
        self._arena = torch.from_numpy(payload).view(_DTYPES[layout.dtype]).view(len(payload), *layout.shape)

    def unbind(self) -> None:
        """Let go of the arena; idempotent."""
        self._arena = None

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Run one step: write the new tokens' KV, return float32 logits `[len(logit_rows), vocab]`.

        Raises:
            InvariantError: the batch's tables, rows or positions are out of range; nothing has been written then.
        """
        if self._arena is None:
            raise InvariantError("the model is not bound to an arena")
        self._check(batch)
        with torch.inference_mode():
            paged = PagedStep(self._arena, batch.spans, len(batch.input_ids))
            rows = torch.tensor(batch.logit_rows, dtype=torch.int64)
            keep = {"logits_to_keep": rows} if self._keeps_rows else {}
            logits: torch.Tensor = self._model(
                input_ids=torch.tensor([batch.input_ids], dtype=torch.int64),
                position_ids=torch.tensor([batch.positions], dtype=torch.int64),
                use_cache=False,
                paged=paged,
                **keep,
            ).logits[0]
            self.attention_s = paged.attention_s
            return (logits if self._keeps_rows else logits[rows]).to(torch.float32)

    def close(self) -> None:
        """Let go of arena and weights; idempotent."""
        self.unbind()
        self._model = None

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


def load_model(folder: Path, dtype: ModelDtype, *, threads: int, seq_check: bool = True) -> PagedModel:
    """Load a local folder in Hugging Face format for paged attention and prove that it can be served so.

    `threads` sets torch's compute threads of this process; 0 leaves them. `seq_check=False` leaves out the comparison
    with eager attention, never the inspection of the attention calls.

    Raises:
        ModelError: the folder cannot be read, or the architecture cannot be served; says why.
    """
    if threads:
        torch.set_num_threads(threads)
    shape = ModelShape.read(folder)
    _refuse_unsupported(folder)
    register()
    model = _load_weights(folder, _DTYPES[dtype])
    inspect_attention(model, shape)
    paged = PagedModel(model, shape, dtype, measure(dtype))
    if seq_check:
        compare_with_eager(paged, _eager_forward(model))
    return paged


def _refuse_unsupported(folder: Path) -> None:
    """Refuse by config what need not be loaded to be refused."""
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        text = config.get_text_config(decoder=True)
    except _LOAD_ERRORS as error:
        raise ModelError(f"{folder}: transformers cannot read this model's config: {error}") from error
    name = config.model_type
    if config.is_encoder_decoder:
        raise ModelError(f"{folder}: {name} is an encoder-decoder; pdactors serves decoder-only models")
    other = sorted(set(getattr(text, "layer_types", None) or ()) - _ATTENTION_LAYERS)
    if other:
        raise ModelError(f"{folder}: {name} has layers of type {', '.join(other)}, which keep no pageable KV")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{folder}: transformers has no causal language model for {name}")


def _load_weights(folder: Path, dtype: torch.dtype) -> Any:
    transformers.utils.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, info = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=ATTENTION_NAME,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
            )
    except _LOAD_ERRORS as error:
        raise ModelError(f"{folder}: transformers cannot load this model with paged attention: {error!r}") from error
    absent = sorted(info["missing_keys"])
    if absent:  # transformers fills them with random numbers
        raise ModelError(f"{folder}: the weights files lack {len(absent)} tensors: {', '.join(absent[:3])} ...")
    return model.eval().requires_grad_(False)


def _eager_forward(model: Any) -> Callable[[list[int]], torch.Tensor]:
    """Return a function that runs a whole sequence through the same weights with transformers' eager attention."""

    def forward(tokens: list[int]) -> torch.Tensor:
        model.set_attn_implementation("eager")
        try:
            with torch.inference_mode():
                logits: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
                return logits.to(torch.float32)
        finally:
            model.set_attn_implementation(ATTENTION_NAME)

    return forward
