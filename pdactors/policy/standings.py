"""`Standings`: few engines among which the best for a request is sure to be, kept up change by change. Pure.

The rules are those of `placement.py`; they look at every engine they are given, which takes too long with a thousand of
them. An engine that knows nothing of a prompt is judged by its load alone, so of those only the best matters, and of
decode engines only the best of each distance. A test holds that the rules choose the same from few as from all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from heapq import heappop, heappush
from typing import Generic, NamedTuple, TypeVar

from pdactors.policy.placement import MIN_SLACK, EngineView, Place

_Scope = tuple[str, ...]  # all that is within a distance of a place
_Entry = tuple[int, str]  # requests, name


class _Crowd(NamedTuple):
    """The decode engine that a prompt computed at some place would go to."""

    scope: _Scope
    view: EngineView
    distance: int


class _Rank(NamedTuple):
    """How an engine that knows nothing of a prompt compares with others of its crowding; as in `choose_prefill`."""

    pending_tokens: int
    distance: int
    crowd: int
    num_requests: int
    name: str


E = TypeVar("E", _Entry, _Rank)


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
            self._members[scope].put(view.name, (view.num_requests, view.name))

    def drop(self, name: str) -> None:
        view = self.views.pop(name, None)
        for scope in _scopes(view.place) if view is not None else ():
            self._members[scope].drop(name)

    def best(self, scope: _Scope) -> _Entry | None:
        """Return the requests and the name of the best within a scope."""
        members = self._members.get(scope)
        return members.best() if members is not None else None

    def nearest(self, place: Place) -> _Crowd | None:
        """Return the best of those that are nearest."""
        for distance, scope in enumerate(_scopes(place)):
            if (found := self.best(scope)) is not None:
                return _Crowd(scope, self.views[found[1]], distance)
        return None


class Standings:
    """Owns the order among engines that take prompts (`firsts`) and among those that decode."""

    def __init__(self) -> None:
        self._firsts: dict[str, EngineView] = {}  # with room
        self._open = _Field()  # decode engines with room
        self._full = _Field()  # and without
        self._areas: dict[_Scope, set[str]] = defaultdict(set)  # firsts within a scope
        self._crowds: dict[str, _Crowd] = {}
        self._leaning: dict[_Scope, set[str]] = defaultdict(set)  # firsts whose crowd is the best of a scope
        self._levels: dict[tuple[int, int], _Lowest[_Rank]] = {}  # slack, crowd -> who is that crowded

    def put(self, view: EngineView, *, is_first: bool) -> None:
        """Take note of an engine's load."""
        if is_first:
            self._drop_first(view.name)
            if view.has_capacity:
                self._firsts[view.name] = view
                for scope in _scopes(view.place):
                    self._areas[scope].add(view.name)
                self._rank(view.name)
            return
        self._change_decode(view.name, view)

    def drop(self, name: str) -> None:
        """An engine takes no work."""
        self._drop_first(name)
        if name in self._open.views or name in self._full.views:
            self._change_decode(name, None)

    def firsts(self, nodes: Iterable[str]) -> list[EngineView]:
        """Return engines with room, the best for a prompt among them, if only those on `nodes` know some of it."""
        if not self._levels:
            return []
        least = min(crowd for _, crowd in self._levels)
        even = [key for key in self._levels if (key[1] - least) // key[0] == 0]
        names = {min(map(self._best, even)).name}
        names.update(self._best(key).name for key in even if key[1] == least)
        for node in nodes:
            names |= self._areas.get((node, ""), set())
        return [self._firsts[name] for name in sorted(names)]

    def crowds(self, firsts: Collection[EngineView]) -> list[EngineView]:
        """Return the decode engines that those would hand over to."""
        nearest = (self._open.nearest(view.place) or self._full.nearest(view.place) for view in firsts)
        return list({crowd.view.name: crowd.view for crowd in nearest if crowd is not None}.values())

    def decodes(self, source: Place, others: Iterable[str]) -> list[EngineView]:
        """Return decode engines with room, the best for KV at `source` among them; `others` own some of it."""
        names = {best[1] for scope in _scopes(source) if (best := self._open.best(scope)) is not None}
        names.update(name for name in others if name in self._open.views)
        return [self._open.views[name] for name in sorted(names)]

    # ---- Firsts --------

    def _drop_first(self, name: str) -> None:
        view = self._firsts.pop(name, None)
        if view is not None:
            self._unrank(name)
            for scope in _scopes(view.place):
                self._areas[scope].discard(name)

    def _rank(self, name: str) -> None:
        view = self._firsts[name]
        crowd = self._open.nearest(view.place) or self._full.nearest(view.place) or _Crowd((), view, 0)
        distance = crowd.distance if crowd.view.has_capacity else 3
        key = max(MIN_SLACK, crowd.view.max_requests // 4), crowd.view.num_requests
        self._crowds[name] = crowd
        self._leaning[crowd.scope].add(name)
        rank = _Rank(view.pending_tokens, distance, crowd.view.num_requests, view.num_requests, name)
        self._levels.setdefault(key, _Lowest()).put(name, rank)

    def _unrank(self, name: str) -> None:
        crowd = self._crowds.pop(name)
        self._leaning[crowd.scope].discard(name)
        key = max(MIN_SLACK, crowd.view.max_requests // 4), crowd.view.num_requests
        self._levels[key].drop(name)
        if not self._levels[key]:
            del self._levels[key]

    def _best(self, key: tuple[int, int]) -> _Rank:
        best = self._levels[key].best()
        assert best is not None  # a level that nobody is on is gone
        return best

    # ---- Decodes --------

    def _change_decode(self, name: str, view: EngineView | None) -> None:
        known = self._open.views.get(name) or self._full.views.get(name) or view
        assert known is not None
        scopes = _scopes(known.place)
        before = [self._standing(scope) for scope in scopes]
        was_open = self._open.best(()) is not None
        stays = self._open if view is not None and view.has_capacity else self._full
        for field in (self._open, self._full):
            if view is None or field is not stays:
                field.drop(name)
        if view is not None:
            stays.put(view)
        if (self._open.best(()) is not None) != was_open or not was_open:
            stale = set(self._firsts)
        else:
            stale = set[str]()
            for scope, (had, one) in zip(scopes, before, strict=True):
                has, other = self._standing(scope)
                if had != has:
                    stale |= self._areas[scope]
                elif one != other:
                    stale |= self._leaning[scope]
        for first in stale:
            self._unrank(first)
            self._rank(first)

    def _standing(self, scope: _Scope) -> tuple[bool, tuple[int, int] | None]:
        """Return whether anybody has room within a scope, and what ranks see of the best."""
        best = self._open.best(scope)
        return best is not None, None if best is None else (best[0], self._open.views[best[1]].max_requests)
