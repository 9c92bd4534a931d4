"""The two element types of the kernels, and how numpy sees them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray


@dataclass(frozen=True)
class Kind:
    """An element type; bfloat16 is held as uint16."""

    name: str
    dtype: type[np.generic]
    rounding: float  # relative error of one element
    attention_error: float  # relative, root mean square

    def elements(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return values as elements, rounded to nearest even."""
        values = np.ascontiguousarray(values, np.float32)
        if self.dtype is np.float32:
            return values
        return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)

    def numbers(self, elements: NDArray[Any]) -> NDArray[np.float64]:
        """Return what elements stand for."""
        if self.dtype is np.uint16:
            elements = (elements.astype(np.uint32) << 16).view(np.float32)
        return elements.astype(np.float64)

    def nans(self, *shape: int) -> NDArray[Any]:
        """Return an array of NaN: what is nobody's."""
        return np.full(shape, 0xFFFF if self.dtype is np.uint16 else np.nan, self.dtype)

    def is_nan(self, elements: NDArray[Any]) -> NDArray[np.bool_]:
        return np.isnan(self.numbers(elements))


KINDS = (Kind("bfloat16", np.uint16, 2**-8, 1e-2), Kind("float32", np.float32, 1e-6, 1e-5))


@pytest.fixture(scope="session", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param
