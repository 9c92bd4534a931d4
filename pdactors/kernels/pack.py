"""How matrices lie in memory for the kernels: padded, in tiles. Pure numpy.

A *packed* matrix is the right-hand side of a product, W[n, k] (a weight: outputs by inputs). It consists of column
tiles of 16 outputs; a tile is a run of *pair lines*, line p holding inputs 2p and 2p + 1 of its 16 outputs. As bfloat16
the two alternate (one 64-byte line, a row of an AMX tile); as float32 the 16 of 2p are followed by those of 2p + 1.

    [outputs / 16, inputs / 2, 16, 2]  bfloat16          [outputs / 16, inputs / 2, 2, 16]  float32

A *tiled* matrix is the left-hand side, rows by inputs: [rows / 16, inputs / 32, 16, 32], so that a tile of 16 rows and
32 inputs is one run. bfloat16 is held as uint16, which numpy knows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

DTYPES: dict[str, type[np.generic]] = {"bfloat16": np.uint16, "float32": np.float32}  # what a model's dtype is held as
ROWS = 16  # of a tile
DEPTH = 32  # inputs of a tile
COLUMNS = 32  # outputs that a product computes at once: two column tiles


LINE_BYTES = 64  # of the cache; a tile's row is one, and costs twice as much or more where it straddles two


def zeros(size: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return a flat array of zeros that begins at a cache line."""
    spare = LINE_BYTES // np.dtype(dtype).itemsize
    array = np.zeros(size + spare, dtype)
    begin = -array.ctypes.data % LINE_BYTES // array.itemsize
    return array[begin : begin + size]


def padded(size: int, to: int) -> int:
    """Return the next multiple of `to`."""
    return -(-size // to) * to


def packed_size(outputs: int, inputs: int) -> int:
    """Return the elements of a packed matrix."""
    return padded(outputs, COLUMNS) * padded(inputs, DEPTH)


def pack(matrix: NDArray[np.generic], into: NDArray[np.generic]) -> None:
    """Pack W `[outputs, inputs]`, uint16 or float32, into a flat array of `packed_size` zeros."""
    outputs, inputs = matrix.shape
    rows, depth = padded(outputs, COLUMNS), padded(inputs, DEPTH)
    if (rows, depth) != matrix.shape:
        wide = np.zeros((rows, depth), matrix.dtype)
        wide[:outputs, :inputs] = matrix
        matrix = wide
    tiles = matrix.reshape(rows // ROWS, ROWS, depth // 2, 2)
    order = (0, 2, 1, 3) if matrix.dtype == np.uint16 else (0, 2, 3, 1)
    view = tiles.transpose(order)
    into.reshape(view.shape)[:] = view


def unpack(packed: NDArray[np.generic], outputs: int, inputs: int) -> NDArray[np.generic]:
    """Return W `[outputs, inputs]`, the reverse of `pack`."""
    rows, depth = padded(outputs, COLUMNS), padded(inputs, DEPTH)
    if packed.dtype == np.uint16:
        view = packed.reshape(rows // ROWS, depth // 2, ROWS, 2).transpose(0, 2, 1, 3)
    else:
        view = packed.reshape(rows // ROWS, depth // 2, 2, ROWS).transpose(0, 3, 1, 2)
    return view.reshape(rows, depth)[:outputs, :inputs]


def tiled_size(rows: int, inputs: int) -> int:
    """Return the elements of a tiled matrix; products work on two row tiles at once."""
    return padded(rows, 2 * ROWS) * padded(inputs, DEPTH)
