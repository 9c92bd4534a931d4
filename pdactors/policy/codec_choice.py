"""Which codec KV takes over a link when the file says `auto`. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from pdactors.kv.codec import CodecName

_LEAST_GAIN = 0.2  # of the time without a codec: for less, nothing is worth losing
_BY_LOSS: tuple[CodecName, ...] = ("int8", "int4")


@dataclass(frozen=True, slots=True)
class CodecCost:
    """What a codec was measured to do: a frame's size over its block's, and bytes of blocks per second."""

    ratio: float
    quantise_bytes_s: float
    dequantise_bytes_s: float


def choose_codec(
    size_bytes: int, *, link_bytes_s: float | None, costs: Mapping[CodecName, CodecCost], left_s: float | None = None
) -> Literal["none"] | CodecName:
    """Choose for `size_bytes` of blocks that are to be there in `left_s` seconds (None: whenever).

    int8 is taken where it saves a fifth of the time. Beyond that, the least lossy form that is in time; if none is, the
    fastest. A slower link, more bytes or less time never lead to a larger form. A link that was not measured
    (`link_bytes_s` None) and a codec that was not take nothing: the answer is "none" if nothing is known.
    """
    if link_bytes_s is None or size_bytes <= 0:
        return "none"
    seconds: dict[Literal["none"] | CodecName, float] = {"none": size_bytes / max(link_bytes_s, 1.0)}
    for name in _BY_LOSS:
        if name in costs:
            seconds[name] = _seconds(size_bytes, max(link_bytes_s, 1.0), costs[name])
    if seconds.get("int8", math.inf) <= (1 - _LEAST_GAIN) * seconds["none"]:
        del seconds["none"]
    in_time = [name for name, needed in seconds.items() if left_s is None or needed <= left_s]
    return in_time[0] if in_time else min(seconds, key=lambda name: seconds[name])


def _seconds(size_bytes: int, link_bytes_s: float, cost: CodecCost) -> float:
    """Return the time for all of it; that the three parts overlap is not counted on."""
    return size_bytes * (cost.ratio / link_bytes_s + 1 / cost.quantise_bytes_s + 1 / cost.dequantise_bytes_s)
