"""Look through the logits of a whole step once."""

from __future__ import annotations

from numba import njit

from pdactors.kernels.simd import LANES, largest, load, maximum, splat, total


@njit(nogil=True, cache=True)
def scan(logits, rows, width, count, best):
    """Find the most likely token of each row, the lowest id of equals, or -1 where a logit is not finite.

    `logits` is float32 `[rows, width]`, of which `count` columns count.
    """
    whole = count // LANES * LANES
    for row in range(rows):
        begin = row * width
        zero = splat(0.0)
        top, poison = splat(-float("inf")), zero
        for i in range(0, whole, LANES):
            value = load(logits, begin + i)
            top = maximum(top, value)
            poison = poison + value * zero  # NaN as soon as one is NaN or infinite
        most, bad = largest(top), total(poison)
        for i in range(whole, count):
            value = logits[begin + i]
            most = max(most, value)
            bad += value * 0.0
        best[row] = -1
        if bad == 0.0:
            for i in range(count):
                if logits[begin + i] == most:
                    best[row] = i
                    break
