"""`Chooser`: which engine takes a request next, by the fleet's state and by what each was assigned. Pure."""

from __future__ import annotations

from dataclasses import replace

from pdactors.policy.admission import Limits
from pdactors.policy.fleet import FleetState
from pdactors.policy.placement import BEST_OF_FEW, DecodeDecision, EngineView, Place, choose_prefill, schedule_decode
from pdactors.policy.requests import Request, RequestTable, Stage

FIRST_ROLES = ("prefill", "worker")  # who computes prompts


class Chooser:
    """Owns nothing but the count of its decisions; whoever asks performs what follows."""

    def __init__(self, limits: Limits, fleet: FleetState, requests: RequestTable) -> None:
        self._limits = limits
        self._fleet = fleet
        self._requests = requests
        self._turn = 0

    def prefill(self, request: Request) -> tuple[str, int] | None:
        """Return who computes a prompt, and how many of its tokens are not computed there; None if all are full."""
        firsts, decodes = self._candidates(request)
        views = [
            replace(view, num_owned=self._fleet.index.num_known(request.digests, {view.name}))
            for view in firsts
            if view.has_capacity
        ]
        cached = {view.name: self._num_readable(request, view.name) for view in views}
        target = choose_prefill(
            views,
            request.num_tokens,
            cached=cached,
            decodes=decodes,
            can_migrate=self._limits.can_migrate,
        )
        return None if target is None else (target, cached[target])

    def local(self, request: Request) -> tuple[str, int] | None:
        """Return a decode engine that computes a prompt itself, and how many tokens it need not compute.

        It is worth it where so little is left that a hand-over costs more (`local_prefill_tokens`). Of those with room
        it is the one with the fewest tokens to compute, then the one that has most of the prompt itself, then the one
        with the fewest requests; None if nobody is.
        """
        limit, found = self._limits.local_prefill_tokens, []
        for view in [view for view in self._views("decode") if view.has_capacity] if limit else ():
            cached = self._num_readable(request, view.name)
            left = request.num_tokens - cached
            if left <= limit:
                own = self._fleet.index.num_known(request.digests, {view.name})
                found.append((view.pending_tokens + left, -own, view.num_requests, view.name, cached))
        return min(found)[3:] if found else None

    def leader(self, request: Request, target: str) -> Request | None:
        """Return who just computes, for the store that the target reads, what a prompt goes on with; wait for it.

        None where waiting might take longer: at least half of what the leader computes has to be of use.
        """
        if not self._limits.has_store:
            return None
        unknown = request.digests[self._fleet.index.num_known(request.digests, {self._fleet.store_of(target)}) :]
        for engine in self._neighbours(target):
            for name, digests in self._requests.under_way[engine].items():
                leader = self._requests[name]
                shared = next((i for i, digest in enumerate(unknown) if digest not in digests), len(unknown))
                is_worth_it = 2 * shared * self._limits.block_tokens >= leader.num_tokens - leader.num_cached
                if shared and is_worth_it and leader.rank <= request.rank:
                    return leader
        return None

    def decode(self, request: Request, source: Place, planned: str = "") -> DecodeDecision | None:
        """Choose a decode engine, the one that was planned if it still has room: part of the KV is there."""
        views = self._decodes(request, source, planned)
        views = [replace(view, num_owned=request.num_owned(view.name)) for view in views]
        views = [view for view in views if view.name == planned and view.has_capacity] or views
        self._turn += 1
        return schedule_decode(
            source,
            views,
            policy=self._limits.policy,
            max_distance=self._limits.max_distance,
            needs_migration=self._fleet.needs_migration,
            turn=self._turn,
        )

    def took_turn(self, name: str) -> None:
        """Note that the last choice was followed."""
        self._fleet.chosen(name, self._turn)

    def relief(self, name: str) -> Request | None:
        """Where prompts wait for blocks that an engine lends, return the largest sequence to be copied instead."""
        load = self._fleet.engines[name].load
        if load.blocks_lacking == 0 or load.blocks.leased_out == 0:
            return None
        lent = [r for r in self._requests.values() if r.stage == Stage.DECODING and r.prefill == name]
        for request in sorted(lent, key=lambda r: -r.num_tokens):
            holder = self._fleet.engines.get(request.decode)
            size = request.num_tokens // self._limits.block_tokens
            if holder is not None and not request.is_copied and size < holder.load.blocks.free:
                return request
        return None

    def _candidates(self, request: Request) -> tuple[list[EngineView], list[EngineView]]:
        """Return engines of which one is the best for a prompt, and the decode engines that they are judged by.

        A few, where KV goes anywhere and to no store; otherwise all.
        """
        decodes = [] if self._limits.can_migrate else self._views("decode")
        if decodes or self._limits.has_store:
            firsts = [self._with_stored(view) for view in self._views(*FIRST_ROLES)]
            return firsts, decodes or self._views("decode")
        standings = self._fleet.refresh(self._requests.assigned, self._requests.touched)
        engines = self._requests.beginning(request)
        firsts = standings.firsts(self._fleet.nodes_with(request.keys) | self._fleet.nodes_of(engines))
        return firsts, standings.crowds(firsts)

    def _decodes(self, request: Request, source: Place, planned: str) -> list[EngineView]:
        """Return decode engines of which one is the best for KV at a place; all where some cannot be reached."""
        if self._limits.policy in BEST_OF_FEW:
            standings = self._fleet.refresh(self._requests.assigned, self._requests.touched)
            views = standings.decodes(source, (planned, *request.owners))
            if all(self._fleet.needs_migration(source, view.place) is not None for view in views):
                return views
        return self._views("decode")

    def _num_readable(self, request: Request, name: str) -> int:
        """Return how many tokens of a prompt an engine can read, or will be able to once those before are computed."""
        names = self._neighbours(name) if self._limits.has_store else [name]
        coming = [digests for neighbour in names for digests in self._requests.coming(neighbour)]
        return self._fleet.num_readable(request.keys, name, coming)

    def _neighbours(self, name: str) -> list[str]:
        """Return the engines that compute for the same store, this one among them."""
        store = self._fleet.store_of(name)
        return [engine for engine in self._requests.under_way if self._fleet.store_of(engine) == store]

    def _with_stored(self, view: EngineView) -> EngineView:
        """Count what waits for decode in the store as if it was at the engine still, so that none runs far ahead."""
        stored = self._requests.assigned.get(self._fleet.store_of(view.name)) if self._limits.has_store else None
        return replace(view, num_requests=view.num_requests + stored.num_requests) if stored is not None else view

    def _views(self, *roles: str) -> list[EngineView]:
        return self._fleet.views(self._requests.assigned, *roles)
