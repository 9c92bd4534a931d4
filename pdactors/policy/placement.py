"""Which engine takes a request. Pure: fleet in, decision out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

MIN_SLACK = 4  # requests by which engines may differ and still count as equally busy

PlacementPolicy = Literal["locality", "least_loaded", "round_robin"]
BEST_OF_FEW = {"locality", "least_loaded"}  # policies to which `Standings` need not show every engine


@dataclass(frozen=True)
class Place:
    """Where an engine or its KV is."""

    node: str
    rack: str
    device: str = "cpu"

    def distance(self, other: Place) -> int:
        """Return 0 for the same device, 1 the same node, 2 the same rack, 3 anything else."""
        if self.node == other.node:
            return 0 if self.device == other.device else 1
        return 2 if self.rack == other.rack else 3


@dataclass(frozen=True)
class EngineView:
    """What placement knows of one engine: its own count of what it assigned, not only the last heartbeat."""

    name: str
    place: Place
    num_requests: int
    max_requests: int
    pending_tokens: int = 0  # prompt tokens assigned and not computed yet
    num_owned: int = 0  # blocks of the sequence in question that it has itself
    last_turn: int = 0  # when it was chosen last, as decode engine: equals take turns

    @property
    def has_capacity(self) -> bool:
        return self.num_requests < self.max_requests


@dataclass(frozen=True)
class DecodeDecision:
    """Where a prefilled sequence decodes, and whether its KV has to move there first."""

    target: str
    need_migration: bool
    distance: int


# Chooses one of the engines with room, which come by name: (where the KV is, engines, max_distance, turn).
Policy: TypeAlias = Callable[[Place, Sequence[EngineView], int, int], EngineView]


def choose_prefill(
    engines: Sequence[EngineView],
    prompt_tokens: int,
    *,
    cached: Mapping[str, int] | None = None,
    decodes: Sequence[EngineView] = (),
    can_migrate: bool = True,
) -> str | None:
    """Return the engine with the fewest tokens to compute before this prompt's first token; None if all are full.

    `cached` says how many of the prompt's tokens each engine can read without computing them, or will have computed
    before. They count twice: computing them again elsewhere takes time from others, and memory. Ties go to the engine
    that is nearest to a decode engine with room, then to the one that has most of the prompt itself, then to where
    fewer requests will be decoded beside it, then to the one with fewer requests.

    That holds among engines that are about as busy. Where far more requests would be decoded beside it, a prompt goes
    elsewhere, whatever is cached. And without `can_migrate` no prompt goes to a node where no decode engine could read
    it, or to one where none has room while another has.
    """
    cached = cached or {}
    if decodes and not can_migrate:
        engines = [e for e in engines if any(e.place.distance(decode.place) == 0 for decode in decodes)]
    crowds = {engine.name: _crowd(engine, decodes) for engine in engines if engine.has_capacity}
    least = min((crowd.num_requests for crowd in crowds.values()), default=0)

    def cost(engine: EngineView) -> tuple[bool, int, int, int, int, int, int, str]:
        crowd = crowds[engine.name]
        distance = engine.place.distance(crowd.place) if crowd.has_capacity else 3
        is_stuck = bool(decodes) and not can_migrate and distance > 0
        excess = (crowd.num_requests - least) // max(MIN_SLACK, crowd.max_requests // 4)
        tokens = engine.pending_tokens + prompt_tokens - 2 * cached.get(engine.name, 0)
        own = -engine.num_owned
        return is_stuck, excess, tokens, distance, own, crowd.num_requests, engine.num_requests, engine.name

    return min((engine for engine in engines if engine.has_capacity), key=cost, default=_NOBODY).name or None


def _crowd(engine: EngineView, decodes: Sequence[EngineView]) -> EngineView:
    """Return the engine that would decode what `engine` computes: the nearest with room, of equals the least loaded.

    Where there are no decode engines it is the engine itself.
    """
    near = [decode for decode in decodes if decode.has_capacity] or decodes or [engine]
    return min(near, key=lambda other: (engine.place.distance(other.place), other.num_requests))


def schedule_decode(
    source: Place,
    engines: Sequence[EngineView],
    *,
    policy: PlacementPolicy = "locality",
    max_distance: int = 2,
    needs_migration: Callable[[Place, Place], bool | None],
    turn: int = 0,
) -> DecodeDecision | None:
    """Choose, as `policy` does, the engine that decodes a sequence whose KV is at `source`; None if nobody has room.

    `needs_migration` says whether KV has to move from one place to another; None: it cannot get there. `turn` counts
    the decisions.
    """
    moves = {e.name: needs_migration(source, e.place) for e in engines}
    candidates = sorted((e for e in engines if e.has_capacity and moves[e.name] is not None), key=lambda e: e.name)
    if not candidates:
        return None
    chosen = POLICIES[policy](source, candidates, max_distance, turn)
    return DecodeDecision(chosen.name, bool(moves[chosen.name]), source.distance(chosen.place))


def _locality(source: Place, engines: Sequence[EngineView], max_distance: int, turn: int) -> EngineView:
    """The nearest up to `max_distance`, of equals the one that owns most of the sequence, then the least loaded.

    Equals take turns. Where there is none that near, the least loaded one.
    """
    near = [e for e in engines if source.distance(e.place) <= max_distance]
    if not near:
        return _least_loaded(source, engines, max_distance, turn)
    return min(near, key=lambda e: (source.distance(e.place), -e.num_owned, e.num_requests, e.last_turn))


def _least_loaded(source: Place, engines: Sequence[EngineView], _max_distance: int, _turn: int) -> EngineView:
    """The least loaded, wherever it is; of equals the nearest, and those that are as near take turns."""
    return min(engines, key=lambda e: (e.num_requests, source.distance(e.place), e.last_turn))


def _round_robin(_source: Place, engines: Sequence[EngineView], _max_distance: int, turn: int) -> EngineView:
    """Each in turn."""
    return engines[turn % len(engines)]


POLICIES: dict[str, Policy] = {"locality": _locality, "least_loaded": _least_loaded, "round_robin": _round_robin}

_NOBODY = EngineView("", Place("", ""), 0, 0)
