from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdactors.kernels.pack import pack, packed_size, padded, tiled_size, unpack
from pdactors.kernels.product import tiled

few = settings(max_examples=25, deadline=None)
sizes = st.integers(1, 100)


def numbered(kind: Any, *shape: int) -> Any:
    return np.arange(1, np.prod(shape) + 1).reshape(shape).astype(kind.dtype)


@few
@given(outputs=sizes, inputs=sizes)
def test_unpacking_gives_what_was_packed(kind: Any, outputs: int, inputs: int) -> None:
    matrix = numbered(kind, outputs, inputs)
    packed = np.zeros(packed_size(outputs, inputs), kind.dtype)
    pack(matrix, packed)
    assert np.array_equal(unpack(packed, outputs, inputs), matrix)


@few
@given(outputs=sizes, inputs=sizes)
def test_padding_is_zero(kind: Any, outputs: int, inputs: int) -> None:
    packed = kind.nans(packed_size(outputs, inputs))
    pack(numbered(kind, outputs, inputs), packed)
    wide = unpack(packed, padded(outputs, 32), padded(inputs, 32)).copy()
    wide[:outputs, :inputs] = 0
    assert not wide.any()


@few
@given(outputs=sizes, inputs=sizes, data=st.data())
def test_a_pair_line_holds_two_inputs_of_sixteen_outputs(kind: Any, outputs: int, inputs: int, data: Any) -> None:
    matrix = numbered(kind, outputs, inputs)
    packed = np.zeros(packed_size(outputs, inputs), kind.dtype)
    pack(matrix, packed)
    n, k = data.draw(st.integers(0, outputs - 1)), data.draw(st.integers(0, inputs - 1))
    line = (n // 16 * (padded(inputs, 32) // 2) + k // 2) * 32
    inside = 2 * (n % 16) + k % 2 if kind.dtype is np.uint16 else k % 2 * 16 + n % 16
    assert packed[line + inside] == matrix[n, k]


@given(outputs=sizes, inputs=sizes, size=st.integers(0, 1000), to=st.integers(1, 64))
def test_sizes_are_the_next_multiples(outputs: int, inputs: int, size: int, to: int) -> None:
    assert padded(size, to) % to == 0
    assert size <= padded(size, to) < size + to
    assert packed_size(outputs, inputs) == tiled_size(outputs, inputs) == padded(outputs, 32) * padded(inputs, 32)


@pytest.mark.parametrize(("rows", "inputs"), [(1, 32), (40, 96)])
def test_tiled_places_are_all_different_and_fill_whole_tiles(rows: int, inputs: int) -> None:
    places = [tiled(row, column, inputs) for row in range(padded(rows, 16)) for column in range(inputs)]
    assert sorted(places) == list(range(padded(rows, 16) * inputs))
    assert tiled(1, 0, inputs) == 32
    assert tiled(0, 1, inputs) == 1
