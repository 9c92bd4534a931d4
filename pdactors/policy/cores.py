"""Which cores a node's actors compute on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdactors.messages import Role


@dataclass(frozen=True)
class Cores:
    """Empty means any core."""

    engines: Mapping[str, tuple[int, ...]]  # where each engine's steps run
    others: tuple[int, ...]  # where router, gateway and migrator run: beside prefill, never beside decode


def assign_cores(engines: Sequence[tuple[str, Role]], threads: int, available: Sequence[int]) -> Cores:
    """Give each engine cores of its own, in order, if there are enough for all; else leave it to the kernel."""
    if threads * len(engines) > len(available) or len(available) < 2:
        return Cores({}, ())
    own = {name: tuple(available[i * threads : (i + 1) * threads]) for i, (name, _) in enumerate(engines)}
    decoding = {core for name, role in engines if role == "decode" for core in own[name]}
    others = tuple(core for core in available if core not in decoding)
    return Cores(own, others if decoding else ())
