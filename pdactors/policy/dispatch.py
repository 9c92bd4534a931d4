"""The router's mind: what follows from what happens. Pure: stimulus in, orders out; the table is in `requests.py`.

A request that is gone is unknown, and whatever arrives for an unknown request or an old attempt is counted and dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

from pdactors import errors
from pdactors.kv.prefix import chain
from pdactors.messages import (
    Adopted,
    CacheChanged,
    Cancel,
    CopyOut,
    Decode,
    Failed,
    Finished,
    Generate,
    Load,
    Member,
    Message,
    Pin,
    Pinned,
    Prefill,
    Prefilled,
    Rejected,
    Release,
)
from pdactors.policy.admission import Limits, Pace, refusal
from pdactors.policy.placement import Engine, EngineView, choose_prefill, schedule_decode
from pdactors.policy.prefix_index import PrefixIndex
from pdactors.policy.requests import Assigned, Request, RequestTable, Stage

MAX_ATTEMPTS = 3
PIN_TIMEOUT_S = 1.0  # an owner that does not answer in time lends nothing
FIRST_ROLES = ("prefill", "worker")  # who computes prompts


class Order(NamedTuple):
    """Send `message` to the actor called `to`."""

    to: str
    message: Message


class Dispatcher:
    """Owns the request table and the fleet's state; each stimulus returns the orders that follow from it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = RequestTable()
        self.engines: dict[str, Engine] = {}
        self.index = PrefixIndex()
        self.dropped: Counter[str] = Counter()
        self._turn = 0
        self._num_asked = 0
        self._pace = Pace()

    # ---- The fleet --------

    def joined(self, member: Member, load: Load, now: float) -> list[Order]:
        """Take note of an engine's state or load, and use the room that it offers."""
        self.engines[member.name] = Engine(member, load)
        return self._advance(now) + self._relieve(member.name)

    def lost(self, name: str, now: float) -> list[Order]:
        """Go on without an actor that is dead and fenced."""
        self.engines.pop(name, None)
        self.index.forget(name)
        orders: list[Order] = []
        for request in list(self.requests.values()):
            request.holders.discard(name)
            if request.gateway == name:
                orders += self._end(request)
            elif name != request.engine and name != request.prefill:
                orders += self._unpinned(request, name)
            elif request.stage in (Stage.PINNING, Stage.PREFILLING, Stage.WAITING):
                orders += self._retry(request, name)
            elif request.decode == name:
                orders += self._reject(request, errors.WorkerLost(f"{name} was lost while it decoded the request"))
        return orders + self._advance(now)

    def cache_changed(self, sender: str, message: CacheChanged) -> None:
        """Take note of what an engine's prefix cache gained and lost."""
        if sender in self.engines:
            self.index.add(sender, message.added)
            self.index.remove(sender, message.evicted)

    def is_idle(self, name: str) -> bool:
        """Whether no request needs that engine any more."""
        return all(name not in request.holders for request in self.requests.values())

    # ---- Requests --------

    def generate(self, gateway: str, ask: Generate, now: float) -> list[Order]:
        """Admit a request, or refuse it with the reason."""
        if ask.request in self.requests:
            return self._drop(ask)
        self._num_asked += 1
        request = Request(ask, gateway, now, self._num_asked)
        queued, sizes = len(self.requests.queued), self._sequence_sizes()
        refused = refusal(ask, self.limits, sizes, queued, self._pace.retry_after_s(queued, now))
        if refused is not None:
            return [_rejected(request, refused)]
        block_tokens = self.limits.block_tokens
        useful = (len(ask.prompt) - 1) // block_tokens * block_tokens
        request.digests = tuple(chain(ask.prompt[:useful], block_tokens, self.limits.prefix_key))
        self.requests.add(request)
        return self._advance(now)

    def cancel(self, message: Cancel, now: float) -> list[Order]:
        """Let go of a request; unknown ones were finished already."""
        request = self.requests.get(message.request)
        return self._end(request) + self._advance(now) if request else self._drop(message)

    def pinned(self, sender: str, message: Pinned) -> list[Order]:
        """An owner lends part of the prompt's beginning, or has nothing of it any more."""
        request = self.requests.get(message.request)
        is_expected = request is not None and request.attempt == message.attempt and request.stage == Stage.PINNING
        if request is None or not is_expected or request.pins.get(message.start) != sender:
            self._drop(message)
            is_over = request is None or request.attempt != message.attempt
            return [Order(sender, Release(message.request, message.attempt))] if is_over else []
        del request.pins[message.start]
        if message.segment is not None:
            request.prefix.append(message.segment)
        return self._start(request) if not request.pins else []

    def prefilled(self, sender: str, message: Prefilled, now: float) -> list[Order]:
        """The prompt is computed and leased: find a decode engine for it."""
        request = self._current(sender, message)
        if request is None or request.stage != Stage.PREFILLING:
            self._drop(message)
            known = self.requests.get(message.request)
            is_held = known is not None and known.attempt == message.attempt and sender in known.holders
            return [] if is_held else [Order(sender, Release(message.request, message.attempt))]
        request.prefilled = message
        self.requests.move(request, Stage.WAITING)
        return self._advance(now)

    def adopted(self, sender: str, message: Adopted) -> list[Order]:
        """A decode engine runs the sequence."""
        request = self._current(sender, message)
        if request is None or request.stage != Stage.ADOPTING:
            return self._drop(message)
        self.requests.move(request, Stage.DECODING)
        return []

    def finished(self, sender: str, message: Finished, now: float) -> list[Order]:
        """The sequence ended; everyone else lets go of it."""
        request = self._current(sender, message)
        if request is None or request.stage in (Stage.PINNING, Stage.WAITING):
            return self._drop(message)
        self._pace.finished(now)
        return self._end(request) + self._advance(now)

    def failed(self, sender: str, message: Failed, now: float) -> list[Order]:
        """An engine cannot go on with the request."""
        request = self._current(sender, message)
        if request is None:
            return self._drop(message)
        return self._reject(request, errors.error_for(message.code, message.message)) + self._advance(now)

    def undelivered(self, name: str, message: Prefill | Decode, now: float) -> list[Order]:
        """An order did not reach its engine, which gets no others until it is heard again: try elsewhere."""
        if name in self.engines:
            self.engines[name].is_silent = True
        request = self.requests.get(message.request)
        if request is None or request.attempt != message.attempt or request.engine != name:
            return []
        if request.stage == Stage.PREFILLING:
            return self._retry(request, name) + self._advance(now)
        return self._reject(request, errors.WorkerLost(f"{name} cannot be reached")) + self._advance(now)

    def tick(self, now: float) -> list[Order]:
        """End what is overdue, and wait no longer for owners that do not answer."""
        orders: list[Order] = []
        for request in list(self.requests.values()):
            limit_s = request.arrived_s + self.limits.request_timeout_s
            if request.ask.deadline_s is not None:
                limit_s = min(limit_s, request.ask.deadline_s)
            if now > limit_s:
                waited = now - request.arrived_s
                orders += self._reject(
                    request, errors.RequestTimeout(f"{request.stage} when its time ran out after {waited:.1f} s")
                )
            elif request.stage == Stage.PINNING and now - request.pinned_s > PIN_TIMEOUT_S:
                request.pins.clear()
                orders += self._start(request)
        return orders + self._advance(now) if orders else []

    def check(self) -> None:
        """Hold the table against itself.

        Raises:
            InvariantError: a stage lacks what it implies, or a queue or count is wrong.
        """
        self.requests.check()

    # ---- Placement --------

    def _advance(self, now: float) -> list[Order]:
        """Place whatever can be placed now, by rank; one that finds no room speaks for those behind it."""
        orders: list[Order] = []
        sources = list(self.requests.waiting.values())
        while sources:
            queue = min(sources, key=lambda queue: queue.first.rank)
            placed = self._place_decode(queue.first)
            orders += placed
            if not placed or not queue:
                sources.remove(queue)
        while self.requests.queued:
            placed = self._place_prefill(self.requests.queued.first, now)
            if not placed:
                break
            orders += placed
        return orders

    def _place_prefill(self, request: Request, now: float) -> list[Order]:
        """Choose who computes the prompt; where others have its beginning, ask them to lend it first."""
        views = [
            replace(view, num_owned=self.index.num_known(request.digests, {view.name}))
            for view in self._views(*FIRST_ROLES)
            if view.has_capacity
        ]
        cached = {view.name: self._num_readable(request, view) * self.limits.block_tokens for view in views}
        target = choose_prefill(
            views,
            len(request.ask.prompt),
            cached=cached,
            decodes=self._views("decode"),
            can_migrate=self.limits.can_migrate,
        )
        if target is None:
            return []
        request.num_cached = cached[target]
        shares = self.index.shares(request.digests, target, self._neighbours(target))
        if not shares:
            self.requests.move(request, Stage.PREFILLING, target)
            return [Order(target, self._prefill(request))]
        self.requests.move(request, Stage.PINNING, target)
        request.pinned_s = now
        orders = []
        for share in shares:
            request.pins[share.start] = share.owner
            request.holders.add(share.owner)
            message = Pin(request.ask.request, request.attempt, share.start, share.digests)
            orders.append(Order(share.owner, message))
        return orders

    def _num_readable(self, request: Request, view: EngineView) -> int:
        """Return how many leading blocks of the prompt that engine can read, or will have computed by then."""
        under_way = self.requests.under_way.get(view.name, {}).values()
        return self.index.num_known(request.digests, {view.name, *self._neighbours(view.name)}, under_way)

    def _neighbours(self, name: str) -> set[str]:
        """Return the other engines whose blocks that engine can read in place."""
        place = self.engines[name].place
        return {
            other
            for other, engine in self.engines.items()
            if other != name and engine.place.distance(place) == 0 and engine.member.state in ("ready", "draining")
        }

    def _start(self, request: Request) -> list[Order]:
        """Everyone who was asked has answered: compute the rest."""
        self.requests.move(request, Stage.PREFILLING, request.prefill)
        return [Order(request.prefill, self._prefill(request))]

    def _prefill(self, request: Request) -> Prefill:
        ask = request.ask
        return Prefill(
            ask.request,
            request.attempt,
            ask.prompt,
            ask.sampling,
            ask.priority,
            ask.save_final_kv,
            tuple(sorted(request.prefix, key=lambda segment: segment.start)),
        )

    def _place_decode(self, request: Request) -> list[Order]:
        ask, done = request.ask, request.prefilled
        source = self.engines.get(request.prefill)
        if done is None or source is None:
            return []
        decision = schedule_decode(
            source.place,
            [replace(view, num_owned=self._num_owned(request, view.name)) for view in self._views("decode")],
            policy=self.limits.policy,
            max_distance=self.limits.max_distance,
            can_migrate=self.limits.can_migrate,
            turn=self._turn,
        )
        if decision is None:
            return []
        self._turn += 1
        self.requests.move(request, Stage.ADOPTING, decision.target)
        message = Decode(
            request=ask.request,
            attempt=request.attempt,
            prompt=ask.prompt,
            first_token=done.first_token,
            sampling=ask.sampling,
            handle=done.handle,
            sent_s=done.sent_s,
            priority=ask.priority,
            save_final_kv=ask.save_final_kv,
        )
        return [Order(decision.target, message)]

    def _num_owned(self, request: Request, name: str) -> int:
        """Return how many blocks of a prefilled sequence are that engine's own, and nobody else can lend it."""
        handle = request.prefilled.handle if request.prefilled else None
        return sum(len(segment.blocks) for segment in handle.segments if segment.owner == name) if handle else 0

    def _sequence_sizes(self) -> list[int]:
        """Return how many tokens each engine that carries sequences to their end could hold of one."""
        roles = ("decode", "worker")
        blocks = [e.load.max_blocks for e in self.engines.values() if e.member.role in roles and e.load.max_blocks]
        return [count * self.limits.block_tokens for count in blocks]

    def _views(self, *roles: str) -> list[EngineView]:
        views = []
        for name, engine in self.engines.items():
            if engine.member.role in roles and engine.member.state == "ready" and not engine.is_silent:
                given = self.requests.assigned.get(name, _NOTHING)
                room = engine.load.max_sequences
                views.append(EngineView(name, engine.place, given.num_requests, room, given.num_tokens))
        return views

    def _relieve(self, name: str) -> list[Order]:
        """When prompts wait for blocks that an engine lends, have a borrower copy what it reads, largest first."""
        load = self.engines[name].load
        if load.blocks_lacking == 0 or load.blocks.leased_out == 0:
            return []
        lent = [r for r in self.requests.values() if r.stage == Stage.DECODING and r.prefill == name]
        for request in sorted(lent, key=lambda r: -len(r.ask.prompt)):
            holder = self.engines.get(request.decode)
            size = len(request.ask.prompt) // self.limits.block_tokens
            if holder is not None and not request.is_copied and size < holder.load.blocks.free:
                request.is_copied = True
                return [Order(request.decode, CopyOut(request.ask.request, request.attempt))]
        return []

    # ---- Endings --------

    def _retry(self, request: Request, lost: str) -> list[Order]:
        """Compute the prompt again elsewhere; the gateway drops a first token that it has already."""
        if request.attempt >= MAX_ATTEMPTS:
            return self._reject(request, errors.WorkerLost(f"{lost} was lost in attempt {request.attempt}"))
        orders = self._releases(request)
        request.holders.clear()
        request.attempt += 1
        self.requests.move(request, Stage.QUEUED)
        return orders

    def _unpinned(self, request: Request, name: str) -> list[Order]:
        """An owner that was asked to lend is lost: go on without it."""
        asked = [start for start, owner in request.pins.items() if owner == name]
        for start in asked:
            del request.pins[start]
        return self._start(request) if asked and not request.pins else []

    def _reject(self, request: Request, error: errors.PDError) -> list[Order]:
        return [_rejected(request, error), *self._end(request)]

    def _end(self, request: Request) -> list[Order]:
        self.requests.remove(request)
        return self._releases(request)

    def _releases(self, request: Request) -> list[Order]:
        return [Order(holder, Release(request.ask.request, request.attempt)) for holder in sorted(request.holders)]

    def _current(self, sender: str, message: Prefilled | Adopted | Finished | Failed) -> Request | None:
        request = self.requests.get(message.request)
        if request is None or request.attempt != message.attempt or sender != request.engine:
            return None
        return request

    def _drop(self, message: Message) -> list[Order]:
        self.dropped[type(message).__name__] += 1
        return []


_NOTHING = Assigned()


def _rejected(request: Request, error: errors.PDError) -> Order:
    return Order(request.gateway, Rejected(request.ask.request, error.code, error.message, error.retry_after_s))
