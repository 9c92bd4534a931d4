"""Reads memory as fast as one thread can: the limit that decoding is held against."""

from __future__ import annotations

from numba import njit

from pdactors.kernels.simd import LANES, load, prefetch, splat, total

STREAMS = 4  # regions that are read side by side
_AHEAD = 512  # elements, 2 KiB


@njit(nogil=True, cache=True)
def read(array, begin, size):
    """Return the sum of `size` elements of a float32 array from `begin` on; `size` is a multiple of 64 * STREAMS."""
    part = size // STREAMS
    a, b, c, d = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for i in range(begin, begin + part, LANES):
        prefetch(array, i + _AHEAD)
        prefetch(array, i + part + _AHEAD)
        prefetch(array, i + 2 * part + _AHEAD)
        prefetch(array, i + 3 * part + _AHEAD)
        a = a + load(array, i)
        b = b + load(array, i + part)
        c = c + load(array, i + 2 * part)
        d = d + load(array, i + 3 * part)
    return total((a + b) + (c + d))
