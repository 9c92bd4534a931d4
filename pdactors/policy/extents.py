"""Who gets the node's KV memory: extents follow the load, and nobody is left without its minimum. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NOBODY: Mapping[int, int] = MappingProxyType({})


def guaranteed(num_extents: int, engines: int, extents_per_sequence: int) -> int:
    """Return how many extents each engine can always have: room for one longest sequence, or its even share."""
    return max(1, min(extents_per_sequence, num_extents // max(1, engines)))


def reachable(num_extents: int, engines: int, minimum: int) -> int:
    """Return how many extents one engine can own at most, while the others keep their minimum."""
    return max(0, num_extents - minimum * (engines - 1))


def grant(wanted: int, engine: int, owned: Mapping[int, int], num_free: int, minimum: int) -> int:
    """Return how many of the `num_free` extents `engine` may have now.

    `owned` counts the extents of every engine of the node, this one included. What the others lack to their
    minimum is set aside, so that no engine can starve another: without it a prefill that holds all memory would
    wait for a decode that cannot get a block.
    """
    return max(0, min(wanted, num_free - _set_aside(engine, owned, minimum)))


def shortage(wanted: int, engine: int, owned: Mapping[int, int], num_free: int, minimum: int) -> int:
    """Return how many extents more would have to be free, so that `engine` can get `wanted`."""
    return max(0, wanted + _set_aside(engine, owned, minimum) - num_free)


def reserve(num_extents: int, owners: int) -> int:
    """Return how many extents caches leave free: who needs memory does not wait until a cache has given some back."""
    return num_extents // 16 if owners > 1 else 0


def recall(
    wanted: int, engine: int, owned: Mapping[int, int], minimum: int, in_vain: Mapping[int, int] = NOBODY
) -> dict[int, int]:
    """Return how many extents to ask back from whom, so that `engine` can get `wanted`.

    Those come first who were asked `in_vain` the fewest times since they last gave something, of these the largest.
    """
    asked: dict[int, int] = {}
    for other, count in sorted(owned.items(), key=lambda item: (in_vain.get(item[0], 0), -item[1])):
        spare = count - minimum
        if other == engine or spare <= 0 or wanted <= 0:
            continue
        asked[other] = min(spare, wanted)
        wanted -= asked[other]
    return asked


def _set_aside(engine: int, owned: Mapping[int, int], minimum: int) -> int:
    return sum(max(0, minimum - count) for other, count in owned.items() if other != engine)
