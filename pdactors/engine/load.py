"""Loads a model in the fastest way that it can be computed."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from pdactors.engine.decoder import Decoder
from pdactors.engine.machine import measure
from pdactors.engine.manifest import Progress, silent
from pdactors.engine.model import PagedModel, Way
from pdactors.engine.shape import ModelDtype, ModelShape
from pdactors.engine.transformers_model import load_with_transformers, read_config
from pdactors.engine.warming import WarmingModel, start_compiling
from pdactors.engine.weights import objection, read_weights
from pdactors.errors import ModelError
from pdactors.kernels import warm
from pdactors.kernels.attention import CHUNK


def load_model(
    folder: Path,
    dtype: ModelDtype,
    *,
    threads: int = 0,
    block_tokens: int = CHUNK,
    way: Way | None = None,
    seq_check: bool = True,
    progress: Progress = silent,
) -> PagedModel:
    """Load a local folder in Hugging Face format: for our own kernels if it can be, else for transformers.

    `threads` sets the compute threads of this process; 0 leaves torch's. `block_tokens` is that of the arena to come.
    While our kernels are not compiled yet, transformers serves. `way` insists on one. `seq_check=False` leaves out a
    comparison of transformers' model with its eager attention. While kernels are compiled that shows its own progress.

    Raises:
        ModelError: the folder cannot be read, or the architecture cannot be served; says why.
    """
    if threads:
        torch.set_num_threads(threads)
    warm.compile_scan()
    shape = ModelShape.read(folder)
    reason = "it was asked for" if way == "transformers" else why_not_lean(folder, shape, dtype, block_tokens)
    if reason and way != "lean":
        progress("load the weights, compare with transformers' attention", 0, 0)
        return load_with_transformers(folder, shape, dtype, reason=reason, seq_check=seq_check)
    if reason:
        raise ModelError(f"{folder}: {reason}: our kernels cannot compute that")
    if way is None and not warm.is_warm(dtype):
        start_compiling(dtype)
        slow = load_with_transformers(folder, shape, dtype, reason="our kernels are being compiled", seq_check=False)
        return WarmingModel(slow, _decoder(folder, shape, dtype, threads))
    warm.compile_all(dtype)
    return _decoder(folder, shape, dtype, threads, progress)


def _decoder(folder: Path, shape: ModelShape, dtype: ModelDtype, threads: int, progress: Progress = silent) -> Decoder:
    model = Decoder(shape, read_weights(folder, shape, dtype, read_config(folder), progress), dtype, measure(dtype))
    model.use_threads(threads)
    return model


def why_not_lean(folder: Path, shape: ModelShape, dtype: ModelDtype, block_tokens: int) -> str:
    """Say what keeps a model from our kernels; "" if nothing does."""
    if block_tokens % CHUNK:
        return f"blocks of {block_tokens} tokens, no multiple of {CHUNK}"
    config = json.loads((folder / "config.json").read_bytes())
    return objection(config, shape, dtype) or ""
