"""`Borrowing`: how an engine comes to read what others have of a prompt's beginning, before it computes the rest. Pure.

       +--> owners on its node lend it (Pin, Pinned) -----------------------------------------+
begin -+                                                                                      +--> Prefill
       +--> owners on another node lend it -> its migrator brings it (Migrate, Migrated) -----+
                         '--- something fails, or takes too long: what its own node has ---> (above)
"""

from __future__ import annotations

from pdactors.messages import KVHandle, Migrate, Migrated, Pin, Pinned
from pdactors.policy import tasks
from pdactors.policy.admission import Limits
from pdactors.policy.fleet import FleetState
from pdactors.policy.prefix_index import Share
from pdactors.policy.requests import Request, RequestTable, Stage
from pdactors.policy.tasks import Order

PIN_TIMEOUT_S = 1.0  # an owner that does not answer in time lends nothing
PULL_TIMEOUT_S = 5.0  # what is not here by then is computed


class Borrowing:
    """Moves requests from QUEUED to PREFILLING, through PINNING where there is something to borrow."""

    def __init__(self, limits: Limits, fleet: FleetState, requests: RequestTable) -> None:
        self._limits = limits
        self._fleet = fleet
        self._requests = requests

    def begin(self, request: Request, target: str, now: float) -> list[Order]:
        """Ask those who have most of the prompt's beginning to lend it to `target`, and compute the rest then."""
        self._requests.move(request, Stage.PINNING, target)
        pull = self._fleet.pull(request.keys, target) if self._limits.pulls else None
        if pull is None:
            return self._ask_here(request, now)
        request.pull, request.prefix_tokens = pull.movers, pull.num_tokens
        request.holders.update(pull.movers)
        return self._ask(request, pull.shares, now)

    def pinned(self, request: Request, message: Pinned, now: float) -> list[Order]:
        """An owner that was asked lends something, or has nothing of it any more."""
        del request.pins[message.start]
        if message.segment is not None:
            request.prefix.append(message.segment)
        if request.pins:
            return []
        return self._bring(request, now) if request.pull else self._start(request)

    def migrated(self, request: Request, message: Migrated) -> list[Order]:
        """What another node has is on the target's node now."""
        request.pins.clear()
        request.prefix = list(message.handle.segments)
        return self._start(request)

    def failed(self, request: Request, now: float) -> list[Order]:
        """Nothing comes from the other node: borrow what there is on the target's."""
        request.pins.clear()
        request.prefix.clear()
        return self._ask_here(request, now)

    def lost(self, request: Request, name: str, now: float) -> list[Order]:
        """Somebody who was asked is gone: go on without him."""
        asked = [start for start, owner in request.pins.items() if owner == name]
        if request.pull and (asked or name in request.pull):
            return self.failed(request, now)
        for start in asked:
            del request.pins[start]
        return self._start(request) if asked and not request.pins else []

    def overdue(self, request: Request, now: float) -> list[Order]:
        """Wait no longer for those who do not answer."""
        if now - request.pinned_s <= (PULL_TIMEOUT_S if request.pull else PIN_TIMEOUT_S):
            return []
        return self.failed(request, now) if request.pull else self._start(request)

    def _ask_here(self, request: Request, now: float) -> list[Order]:
        request.pull = ()
        find = self._fleet.whole if self._limits.has_backing else self._fleet.shares
        shares, request.prefix_tokens = find(request.keys, request.prefill)
        return self._ask(request, shares, now) if shares else self._start(request)

    def _ask(self, request: Request, shares: list[Share], now: float) -> list[Order]:
        request.pinned_s = now
        orders = []
        for share in shares:
            request.pins[share.start] = share.owner
            request.holders.add(share.owner)
            orders.append(Order(share.owner, Pin(request.ask.request, request.attempt, share.start, share.digests)))
        return orders

    def _bring(self, request: Request, now: float) -> list[Order]:
        """Have the migrators bring what the owners lend, as far as it is without a gap."""
        segments, stop = [], 0
        for segment in sorted(request.prefix, key=lambda segment: segment.start):
            if segment.start == stop:
                segments.append(segment)
                stop += len(segment.blocks)
        if not segments:
            return self.failed(request, now)
        request.prefix.clear()
        request.prefix_tokens = min(request.prefix_tokens, stop * self._limits.block_tokens)
        source, target = request.pull
        request.pins[0] = target
        node = self._fleet.node_of(source)
        handle = KVHandle(node, "", self._limits.layout, tuple(segments), stop * self._limits.block_tokens)
        digests = request.keys.chain(request.prefix_tokens)
        key = request.ask.request, request.attempt
        return [Order(source, Migrate(*key, handle, target, digests, request.ask.priority))]

    def _start(self, request: Request) -> list[Order]:
        """Everyone who was asked has answered, or is not waited for: compute the rest."""
        request.pins.clear()
        request.pull = ()
        self._requests.move(request, Stage.PREFILLING, request.prefill)
        return [Order(request.prefill, tasks.prefill(request))]
