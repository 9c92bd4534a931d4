"""Which cores the actors of this machine's nodes compute on. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from pdactors.messages import Role


@dataclass(frozen=True)
class Cores:
    """Empty means any core."""

    engines: Mapping[str, tuple[int, ...]]  # where each engine's steps run
    others: tuple[int, ...]  # where router, gateway and migrator run: beside prefill, never beside decode


def assign_cores(engines: Sequence[tuple[str, Role, int]], available: Sequence[int]) -> Cores:
    """Give each engine, of so many threads, cores of its own, in order, if there are enough for all on this machine.

    Otherwise it is left to the kernel.
    """
    if sum(threads for _, _, threads in engines) > len(available) or len(available) < 2:
        return Cores({}, ())
    rest = iter(available)
    own = {name: tuple(islice(rest, threads)) for name, _, threads in engines}
    decoding = {core for name, role, _ in engines if role == "decode" for core in own[name]}
    others = tuple(core for core in available if core not in decoding)
    return Cores(own, others if decoding else ())
