"""`TransformersModel`: any causal model of transformers whose attention passes through its attention interface."""

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

from pdactors.engine.batch import StepBatch
from pdactors.engine.machine import TORCH_DTYPES, measure
from pdactors.engine.model import PagedModel, Way
from pdactors.engine.paged import ATTENTION_NAME, PagedStep, register
from pdactors.engine.probe import compare_with_eager, inspect_attention
from pdactors.engine.shape import ModelDtype, ModelShape
from pdactors.errors import InvariantError, ModelError
from pdactors.kv.layout import KVLayout

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "attention"}
# What transformers raises for folders and architectures that it cannot load.
LOAD_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError)


class TransformersModel(PagedModel):
    """A model that transformers computes, but for its attention."""

    def __init__(self, model: Any, shape: ModelShape, dtype: ModelDtype, reason: str) -> None:
        super().__init__(shape, dtype, measure(dtype))
        self._model: Any = model
        self._reason = reason
        self._arena: torch.Tensor | None = None
        self._block_tokens = 0
        # A model without logits_to_keep computes the logits of every row.
        self._keeps_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    @property
    def way(self) -> Way:
        return "transformers"

    @property
    def reason(self) -> str:
        return self._reason

    def use_threads(self, count: int) -> None:
        torch.set_num_threads(count)

    def _bind(self, payload: NDArray[np.uint8], layout: KVLayout) -> None:
        self._arena = torch.from_numpy(payload).view(TORCH_DTYPES[layout.dtype]).view(len(payload), *layout.shape)
        self._block_tokens = layout.block_tokens

    def unbind(self) -> None:
        self._arena = None

    def forward(self, batch: StepBatch) -> torch.Tensor:
        return self._run(batch, self._step(batch))

    def observe(self, batch: StepBatch) -> NDArray[np.float32]:
        self._check_observed(batch)
        paged = self._step(batch)
        paged.masses = {}
        self._run(batch, paged)
        masses = [paged.masses[layer] for layer in range(self.shape.num_layers)]
        return torch.stack(masses).numpy()

    def _step(self, batch: StepBatch) -> PagedStep:
        if self._arena is None:
            raise InvariantError("the model is not bound to an arena")
        self._check(batch)
        return PagedStep(self._arena, self._block_tokens, batch.spans, len(batch.input_ids))

    def _run(self, batch: StepBatch, paged: PagedStep) -> torch.Tensor:
        with torch.inference_mode():
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
        super().close()
        self._model = None


def load_with_transformers(
    folder: Path, shape: ModelShape, dtype: ModelDtype, *, reason: str = "", seq_check: bool = True
) -> TransformersModel:
    """Load a model for paged attention and prove that it can be served so; `reason` says why it comes this way.

    `seq_check=False` leaves out the comparison with eager attention, never the inspection of the attention calls.

    Raises:
        ModelError: the folder cannot be read, or the architecture cannot be served; says why.
    """
    _refuse_unsupported(folder)
    register()
    model = _load_weights(folder, TORCH_DTYPES[dtype])
    inspect_attention(model, shape)
    paged = TransformersModel(model, shape, dtype, reason)
    if seq_check:
        compare_with_eager(paged, _eager_forward(model))
    return paged


def read_config(folder: Path) -> Any:
    """Return transformers' configuration of a model.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except LOAD_ERRORS as error:
        raise ModelError(f"{folder}: transformers cannot read this model's config: {error}") from error


def _refuse_unsupported(folder: Path) -> None:
    """Refuse by config what need not be loaded to be refused."""
    config = read_config(folder)
    try:
        text = config.get_text_config(decoder=True)
    except LOAD_ERRORS as error:
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
    except LOAD_ERRORS as error:
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
