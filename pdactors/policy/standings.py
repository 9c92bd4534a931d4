"""`Standings`: few engines among which the best for a request is sure to be, kept up change by change. Pure.

The rules are those of `placement.py`; they look at every engine they are given, which takes too long with a thousand of
them. An engine that knows nothing of a prompt is judged by its load alone, so of those only the best matters, and of
decode engines only the best of each distance. Those that would hand over to the same decode engine make a group: their
order is the same whatever that one has to do, so a change of it moves only the best of them. A test holds that the
rules choose the same from few as from all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from pdactors.policy.placement import MIN_SLACK, EngineView, Place

_Scope = tuple[str, ...]  # all that is within a distance of a place
_Entry = tuple[int, int, str]  # requests, last turn, name
_First = tuple[int, int, str]  # pending tokens, requests, name


class _Level(NamedTuple):
    """How crowded it is where a prompt would be decoded."""

    slack: int
    crowd: int


class _Rank(NamedTuple):
    """How an engine that knows nothing of a prompt compares with others of its crowding; as in `choose_prefill`."""

    pending_tokens: int
    distance: int
    crowd: int
    num_requests: int
    name: str


E = TypeVar("E", _Entry, _First, _Rank)


def _scopes(place: Place) -> tuple[_Scope, _Scope, _Scope, _Scope]:
    """Return the scopes of a place by distance, the nearest first."""
    return (place.node, place.device, ""), (place.node, ""), (place.rack,), ()


class _Lowest(Generic[E]):
    """Entries by name, which is the last part of each, and the lowest of them, found without a look at all."""

    def __init__(self) -> None:
        self._entries: dict[str, E] = {}
        self._heap: list[E] = []  # what is no entry any more is dropped when it comes up

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, name: str, entry: E) -> None:
        if self._entries.get(name) == entry:
            return
        self._entries[name] = entry
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = sorted(self._entries.values())
        else:
            heappush(self._heap, entry)

    def drop(self, name: str) -> None:
        self._entries.pop(name, None)

    def best(self) -> E | None:
        heap = self._heap
        while heap and self._entries.get(heap[0][-1]) != heap[0]:
            heappop(heap)
        return heap[0] if heap else None


class _Field:
    """Engines by scope; the best of each has the fewest requests."""

    def __init__(self) -> None:
        self._members: dict[_Scope, _Lowest[_Entry]] = defaultdict(_Lowest)
        self.views: dict[str, EngineView] = {}

    def put(self, view: EngineView) -> None:
        self.views[view.name] = view
        for scope in _scopes(view.place):
            self._members[scope].put(view.name, (view.num_requests, view.last_turn, view.name))

    def drop(self, name: str) -> None:
        view = self.views.pop(name, None)
        for scope in _scopes(view.place) if view is not None else ():
            self._members[scope].drop(name)

    def best(self, scope: _Scope) -> EngineView | None:
        """Return the best within a scope."""
        members = self._members.get(scope)
        best = members.best() if members is not None else None
        return self.views[best[-1]] if best is not None else None

    def nearest(self, place: Place) -> _Scope | None:
        """Return the narrowest scope of a place that anybody is in."""
        return next((scope for scope in _scopes(place) if self.best(scope) is not None), None)


class Standings:
    """Owns the order among engines that take prompts (`firsts`) and among those that decode."""

    def __init__(self) -> None:
        self._firsts: dict[str, EngineView] = {}  # with room
        self._open = _Field()  # decode engines with room
        self._full = _Field()  # and without
        self._areas: dict[_Scope, set[str]] = defaultdict(set)  # firsts within a scope
        self._group_of: dict[str, _Scope] = {}  # first -> the scope whose best decode engine it would hand over to
        self._groups: dict[_Scope, _Lowest[_First]] = defaultdict(_Lowest)
        self._ranks: dict[_Scope, tuple[_Level, _Rank]] = {}  # where the best of each group stands
        self._levels: dict[_Level, _Lowest[_Rank]] = defaultdict(_Lowest)

    def put(self, view: EngineView, *, is_first: bool) -> None:
        """Take note of an engine's load."""
        if not is_first:
            self._change_decode(view.name, view)
            return
        former = self._firsts.get(view.name)
        if not view.has_capacity or (former is not None and former.place != view.place):
            self._drop_first(view.name)
        if view.has_capacity:
            self._firsts[view.name] = view
            for scope in _scopes(view.place):
                self._areas[scope].add(view.name)
            self._enter(view)

    def drop(self, name: str) -> None:
        """An engine takes no work."""
        self._drop_first(name)
        if name in self._open.views or name in self._full.views:
            self._change_decode(name, None)

    def firsts(self, nodes: Iterable[str]) -> list[EngineView]:
        """Return engines with room, the best for a prompt among them, if only those on `nodes` know some of it."""
        if not self._levels:
            return []
        least = min(level.crowd for level in self._levels)
        even = [level for level in self._levels if (level.crowd - least) // level.slack == 0]
        names = {min(map(self._best, even)).name}
        names.update(self._best(level).name for level in even if level.crowd == least)
        for node in nodes:
            names |= self._areas.get((node, ""), set())
        return [self._firsts[name] for name in sorted(names)]

    def crowds(self, firsts: Collection[EngineView]) -> list[EngineView]:
        """Return the decode engines that those would hand over to."""
        nearby = self._nearby
        scopes = (nearby.nearest(view.place) for view in firsts)
        crowds = (nearby.best(scope) for scope in scopes if scope is not None)
        return list({crowd.name: crowd for crowd in crowds if crowd is not None}.values())

    def decodes(self, source: Place, others: Iterable[str]) -> list[EngineView]:
        """Return decode engines with room, the best for KV at `source` among them; `others` own some of it."""
        names = {best.name for scope in _scopes(source) if (best := self._open.best(scope)) is not None}
        names.update(name for name in others if name in self._open.views)
        return [self._open.views[name] for name in sorted(names)]

    # ---- Firsts --------

    def _drop_first(self, name: str) -> None:
        view = self._firsts.pop(name, None)
        if view is not None:
            self._leave(name)
            for scope in _scopes(view.place):
                self._areas[scope].discard(name)

    def _enter(self, view: EngineView) -> None:
        """Put a first into its group, or change its place there."""
        scope = self._group_of.get(view.name)
        if scope is None:
            scope = self._nearby.nearest(view.place)
            if scope is None:  # there are no decode engines: each makes a group of its own
                scope = (view.name,) * 4
            self._group_of[view.name] = scope
        self._groups[scope].put(view.name, (view.pending_tokens, view.num_requests, view.name))
        self._rank(scope)

    def _leave(self, name: str) -> None:
        scope = self._group_of.pop(name)
        self._groups[scope].drop(name)
        self._rank(scope)

    def _rank(self, scope: _Scope) -> None:
        """Have the best of a group stand where it belongs now."""
        former, now = self._ranks.pop(scope, None), self._standing(scope)
        if former is not None and former != now:
            level = self._levels[former[0]]
            level.drop(former[1].name)
            if not level:
                del self._levels[former[0]]
        if now is None:
            del self._groups[scope]
            return
        self._ranks[scope] = now
        self._levels[now[0]].put(now[1].name, now[1])

    def _standing(self, scope: _Scope) -> tuple[_Level, _Rank] | None:
        """Return where the best of a group belongs; None if the group is empty."""
        best = self._groups[scope].best()
        if best is None:
            return None
        pending_tokens, num_requests, name = best
        crowd = self._nearby.best(scope) or self._firsts[name]
        distance = max(0, 3 - len(scope)) if crowd.has_capacity else 3
        level = _Level(max(MIN_SLACK, crowd.max_requests // 4), crowd.num_requests)
        return level, _Rank(pending_tokens, distance, crowd.num_requests, num_requests, name)

    def _best(self, level: _Level) -> _Rank:
        best = self._levels[level].best()
        assert best is not None  # a level that nobody is on is gone
        return best

    # ---- Decodes --------

    @property
    def _nearby(self) -> _Field:
        """The decode engines that prompts would go to: those with room, if there are any."""
        return self._open if self._open.views else self._full

    def _change_decode(self, name: str, view: EngineView | None) -> None:
        known = self._open.views.get(name) or self._full.views.get(name) or view
        assert known is not None
        nearby = self._nearby
        scopes = [scope for scope in _scopes(known.place) if self._areas.get(scope)]  # where anybody looks
        before = [nearby.best(scope) for scope in scopes]
        stays = self._open if view is not None and view.has_capacity else self._full
        for field in (self._open, self._full):
            if view is None or field is not stays:
                field.drop(name)
        if view is not None:
            stays.put(view)
        if self._nearby is not nearby:
            return self._regroup(self._firsts)
        for scope, former in zip(scopes, before, strict=True):
            best = nearby.best(scope)
            if (former is None) != (best is None):
                self._regroup(self._areas[scope])
            elif former is not best and scope in self._groups:
                self._rank(scope)
        return None

    def _regroup(self, names: Iterable[str]) -> None:
        """Look for the groups of some firsts anew."""
        for name in list(names):
            self._leave(name)
            self._enter(self._firsts[name])
