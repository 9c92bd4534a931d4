"""`WarmingModel`: serves through transformers while our kernels are being compiled, then through them."""

from __future__ import annotations

import subprocess
import sys
import threading

import numpy as np
import torch
from numpy.typing import NDArray

from pdactors.config.logging import get_logger
from pdactors.engine.batch import StepBatch
from pdactors.engine.decoder import Decoder
from pdactors.engine.model import PagedModel, Way
from pdactors.engine.shape import ModelDtype
from pdactors.engine.transformers_model import TransformersModel
from pdactors.kernels import warm
from pdactors.kv.layout import KVLayout


class WarmingModel(PagedModel):
    """Two ways to compute one model over one arena. It changes over between two steps: KV means the same to both."""

    def __init__(self, slow: TransformersModel, fast: Decoder) -> None:
        super().__init__(slow.shape, slow.dtype, slow.machine)
        self._slow: TransformersModel | None = slow
        self._fast = fast

    @property
    def _current(self) -> PagedModel:
        return self._slow or self._fast

    @property
    def way(self) -> Way:
        return self._current.way

    @property
    def reason(self) -> str:
        return self._current.reason

    def use_threads(self, count: int) -> None:
        self._fast.use_threads(count)
        if self._slow is not None:
            self._slow.use_threads(count)

    def _bind(self, payload: NDArray[np.uint8], layout: KVLayout) -> None:
        self._fast.bind(payload, layout)
        if self._slow is not None:
            self._slow.bind(payload, layout)

    def unbind(self) -> None:
        self._fast.unbind()
        if self._slow is not None:
            self._slow.unbind()

    def forward(self, batch: StepBatch) -> torch.Tensor:
        self._change_over()
        logits = self._current.forward(batch)
        self.attention_s = self._current.attention_s
        return logits

    def observe(self, batch: StepBatch) -> NDArray[np.float32]:
        self._change_over()
        return self._current.observe(batch)

    def _change_over(self) -> None:
        if self._slow is not None and warm.is_warm(self.dtype):
            self._slow.close()
            self._slow = None
            get_logger().info("kernels are compiled: going on with them", dtype=self.dtype)


def start_compiling(dtype: ModelDtype) -> None:
    """Have the kernels compiled by a process of its own, which ends with this one."""
    process = subprocess.Popen([sys.executable, "-m", "pdactors.engine.compiling", dtype], stdin=subprocess.DEVNULL)  # noqa: S603 - this interpreter
    threading.Thread(target=process.wait, daemon=True).start()
