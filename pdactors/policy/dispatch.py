"""The router's mind: what follows from what happens. Pure: stimulus in, orders out; the table is in `requests.py`.

A request that is gone is unknown, and whatever arrives for an unknown request or an old attempt is counted and dropped.
"""

from __future__ import annotations

from collections import Counter

from pdactors import errors
from pdactors.messages import (
    Adopted,
    CacheChanged,
    Cancel,
    CopyOut,
    Decode,
    Failed,
    Finished,
    Generate,
    KVHandle,
    Load,
    Member,
    Message,
    Migrate,
    Migrated,
    Pinned,
    Prefill,
    Prefilled,
    Release,
    Resume,
    Stranded,
)
from pdactors.policy import tasks
from pdactors.policy.admission import Limits, Pace, refusal
from pdactors.policy.borrowing import Borrowing
from pdactors.policy.chooser import Chooser
from pdactors.policy.fleet import FleetState
from pdactors.policy.prefix_keys import PrefixKeys
from pdactors.policy.requests import Request, RequestTable, Stage
from pdactors.policy.retries import ASK_AGAIN_S, MAX_ATTEMPTS, backoff_s
from pdactors.policy.tasks import Order
from pdactors.policy.transfer import Way
from pdactors.token_ids import TokenIds


class Dispatcher:
    """Owns the request table and the fleet's state; each stimulus returns the orders that follow from it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = RequestTable()
        self.fleet = FleetState(limits.transport, limits.data_transport)
        self.chooser = Chooser(limits, self.fleet, self.requests)
        self.borrowing = Borrowing(limits, self.fleet, self.requests)
        self.dropped: Counter[str] = Counter()
        self._num_asked = 0
        self._pace = Pace()

    # ---- The fleet --------

    def joined(self, member: Member, load: Load, now: float) -> list[Order]:
        """Take note of an engine's state or load, and use the room that it offers."""
        self.fleet.joined(member, load)
        return self._advance(now) + self._relieve(member.name)

    def lost(self, name: str, now: float) -> list[Order]:
        """Go on without an actor that is dead and fenced."""
        self.fleet.lost(name)
        orders: list[Order] = []
        for request in list(self.requests.values()):
            request.holders.discard(name)
            if name in (request.planned, *request.movers) and request.planned:
                self.requests.plan(request, "")
            if request.gateway == name:
                orders += self._end(request)
            elif self._needs(request, name):
                orders += self._retry(request, name, now)
            elif request.stage == Stage.PINNING:
                orders += self.borrowing.lost(request, name, now)
        return orders + self._advance(now)

    def migrator_ready(self, member: Member, now: float) -> list[Order]:
        """KV can be moved to and from that node."""
        if self.fleet.migrators.get(member.node) == member:
            return []
        self.fleet.migrator_ready(member)
        return self._advance(now)

    def cache_changed(self, sender: str, message: CacheChanged) -> None:
        """Take note of what the prefix cache of an engine, or of a migrator, gained and lost."""
        if self.fleet.knows(sender):
            self.fleet.index.add(sender, message.added)
            self.fleet.index.remove(sender, message.evicted)

    def is_idle(self, name: str) -> bool:
        """Whether no request needs that engine any more."""
        return all(name not in request.holders for request in self.requests.values())

    # ---- Requests --------

    def generate(self, gateway: str, ask: Generate, now: float) -> list[Order]:
        """Admit a request, or refuse it with the reason."""
        if ask.request in self.requests:
            return self._drop(ask)
        self._num_asked += 1
        keys = self._keys(ask, ask.generated)
        request = Request(ask, gateway, now, self._num_asked, keys, ask.attempt, ask.generated)
        queued, sizes = self.requests.num_unplaced, self.fleet.sequence_sizes(self.limits.block_tokens)
        refused = refusal(ask, self.limits, sizes, queued, self._pace.retry_after_s(queued, now))
        if refused is not None:
            return [Order(gateway, tasks.reject(request, refused))]
        self.requests.add(request)
        return self._advance(now)

    def resume(self, gateway: str, message: Resume, now: float) -> list[Order]:
        """Begin the next attempt after the tokens that the client has."""
        request = self.requests.get(message.request)
        is_asked = request is not None and request.stage == Stage.RESUMING and request.attempt == message.attempt
        if request is None or not is_asked or request.gateway != gateway:
            return self._drop(message)
        request.generated = message.generated
        request.keys = self._keys(request.ask, message.generated)
        self.requests.move(request, Stage.QUEUED)
        return self._advance(now)

    def cancel(self, message: Cancel, now: float) -> list[Order]:
        """Let go of a request; unknown ones were finished already."""
        request = self.requests.get(message.request)
        return self._end(request, "cancelled") + self._advance(now) if request else self._drop(message)

    def pinned(self, sender: str, message: Pinned, now: float) -> list[Order]:
        """An owner lends part of the prompt's beginning, or has nothing of it any more."""
        request = self.requests.get(message.request)
        is_expected = request is not None and request.attempt == message.attempt and request.stage == Stage.PINNING
        if request is None or not is_expected or request.pins.get(message.start) != sender:
            self._drop(message)
            is_over = request is None or request.attempt != message.attempt
            return [Order(sender, Release(message.request, message.attempt))] if is_over else []
        return self.borrowing.pinned(request, message, now)

    def prefilled(self, sender: str, message: Prefilled, now: float) -> list[Order]:
        """The prompt is computed and leased: find a decode engine for it."""
        request = self._prefilling(message)
        if request is None or sender not in self._givers(request):
            return self._unwanted(sender, message)
        request.prefilled, request.prefilled_s = message, now
        done = [] if sender == request.prefill else self._release(request, request.prefill)
        self.requests.move(request, Stage.WAITING, sender)
        return done + self._advance(now)

    def migrated(self, sender: str, message: Migrated, now: float) -> list[Order]:
        """The KV is where the engine that needs it can read it."""
        if (pulling := self._pulling(message)) is not None and sender == pulling.pull[-1]:
            return self.borrowing.migrated(pulling, message)
        request = self._migrating(message)
        if request is None or sender != request.movers[-1]:
            return self._unwanted(sender, message)
        return self._adopt(request, request.decode, message.handle, now)

    def stranded(self, sender: str, message: Stranded, now: float) -> list[Order]:
        """The KV cannot be brought over, or not be stored: compute it again, perhaps elsewhere."""
        if (pulling := self._pulling(message)) is not None and sender in pulling.pull:
            return self.borrowing.failed(pulling, now)
        request = self._migrating(message) or self._prefilling(message)
        if request is None:
            return self._drop(message)
        if sender not in (request.movers if request.stage == Stage.MIGRATING else self._givers(request)):
            return self._drop(message)
        return self._retry(request, sender, now, message.reason) + self._advance(now)

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
        if request is None or request.stage in (Stage.PINNING, Stage.WAITING, Stage.MIGRATING):
            return self._drop(message)
        self._pace.finished(now)
        return self._end(request) + self._advance(now)

    def failed(self, sender: str, message: Failed, now: float) -> list[Order]:
        """An engine cannot go on with the request."""
        request = self._current(sender, message)
        if request is None:
            return self._drop(message)
        error = errors.error_for(message.code, message.message)
        if isinstance(error, errors.WorkerLost):  # it lost what it read, or where it came from
            return self._retry(request, sender, now, message.message) + self._advance(now)
        return self._reject(request, error) + self._advance(now)

    def undelivered(self, name: str, message: Prefill | Decode | Migrate, now: float) -> list[Order]:
        """An order did not reach whom it was for, who gets no others until he is heard again: try elsewhere."""
        self.fleet.silent(name)
        request = self.requests.get(message.request)
        if request is None or request.attempt != message.attempt:
            return []
        if request.pull and name in request.pull:
            return self.borrowing.failed(request, now)
        if not self._needs(request, name):
            return []
        return self._retry(request, name, now, "it cannot be reached") + self._advance(now)

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
            elif request.stage == Stage.PINNING:
                orders += self.borrowing.overdue(request, now)
            elif request.stage == Stage.RESUMING and now >= request.resume_s:
                orders += self._ask(request, now)
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
            placed = self._place_decode(queue.first, now)
            orders += placed
            if not placed or not queue:
                sources.remove(queue)
        while self.requests.queued:
            first = self.requests.queued.first
            orders += self._place_prefill(first, now)
            if first.stage == Stage.QUEUED:
                break
        return orders

    def _place_prefill(self, request: Request, now: float) -> list[Order]:
        """Choose who computes the prompt; where others have its beginning, ask them to lend it first."""
        chosen = self.chooser.local(request) or self.chooser.prefill(request)
        if chosen is None:
            return []
        target, request.num_cached = chosen
        if (leader := self.chooser.leader(request, target)) is not None:
            self.requests.hold(request, leader)
            return []
        self._plan_decode(request, target)
        return self.borrowing.begin(request, target, now)

    def _plan_decode(self, request: Request, prefill: str) -> None:
        """Choose the decode engine early if KV has to move there: it can go while the prompt is still computed."""
        source = self.fleet.engines[prefill].place
        if not self.limits.overlaps or self.fleet.engines[prefill].member.role != "prefill":
            return
        decision = self.chooser.decode(request, source)
        if decision is not None and decision.need_migration:
            request.movers = self.fleet.movers(source, decision.target)
            request.holders.update(request.movers)
            request.planned = decision.target
            self.chooser.took_turn(decision.target)

    def _place_decode(self, request: Request, now: float) -> list[Order]:
        done, source = request.prefilled, self.fleet.place_of(request.prefill)
        if done is None or source is None:
            return []
        planned = request.planned
        self.requests.plan(request, "")  # its own place counts as free for it
        decision = self.chooser.decode(request, source, planned)
        way = self.fleet.way(source, self.fleet.engines[decision.target].place) if decision else None
        if decision is None or way is None:
            self.requests.plan(request, planned)
            return []
        self.chooser.took_turn(decision.target)
        request.way = way
        if not decision.need_migration:
            request.way = way if request.prefill in self.fleet.engines else Way("store", way.why)
            return self._adopt(request, decision.target, done.handle, now)
        request.movers = self.fleet.movers(source, decision.target)
        request.holders.update(request.movers)
        self.requests.move(request, Stage.MIGRATING, decision.target)
        return [Order(request.prefill if self.limits.prunes else request.movers[0], tasks.migrate(request, now))]

    def _adopt(self, request: Request, target: str, handle: KVHandle, now: float) -> list[Order]:
        """Have an engine go on with a sequence that it can read."""
        self.requests.move(request, Stage.ADOPTING, target)
        return [Order(target, tasks.decode(request, handle, now))]

    def _relieve(self, name: str) -> list[Order]:
        """When prompts wait for blocks that an engine lends, have a borrower copy what it reads, largest first."""
        request = self.chooser.relief(name)
        if request is None:
            return []
        request.is_copied = True
        return [Order(request.decode, CopyOut(request.ask.request, request.attempt))]

    # ---- Endings --------

    def _retry(self, request: Request, lost: str, now: float, reason: str = "it was lost") -> list[Order]:
        """Begin the next attempt, unless there were too many, after what the client has of the answer."""
        if request.attempt >= MAX_ATTEMPTS:
            return self._reject(request, errors.WorkerLost(f"{lost} in attempt {request.attempt}: {reason}"))
        orders = self._releases(request)
        self.requests.move(request, Stage.RESUMING, why=f"{lost}: {reason}")
        request.resume_s = now + backoff_s(request.attempt)
        return orders + (self._ask(request, now) if request.resume_s <= now else [])

    def _ask(self, request: Request, now: float) -> list[Order]:
        """Ask the gateway what the client has; it takes nothing of earlier attempts from then on."""
        request.resume_s = now + ASK_AGAIN_S
        return [Order(request.gateway, Resume(request.ask.request, request.attempt))]

    def _reject(self, request: Request, error: errors.PDError) -> list[Order]:
        return [Order(request.gateway, tasks.reject(request, error)), *self._end(request, error.code)]

    def _end(self, request: Request, why: str = "") -> list[Order]:
        self.requests.remove(request, why)
        return self._releases(request)

    def _releases(self, request: Request) -> list[Order]:
        return [Order(holder, Release(request.ask.request, request.attempt)) for holder in sorted(request.holders)]

    def _release(self, request: Request, name: str) -> list[Order]:
        """Have somebody let go whose part is over."""
        request.holders.discard(name)
        return [Order(name, Release(request.ask.request, request.attempt))]

    def _keys(self, ask: Generate, generated: TokenIds) -> PrefixKeys:
        return PrefixKeys([*ask.prompt, *generated], self.limits.block_tokens, self.limits.prefix_key)

    def _needs(self, request: Request, name: str) -> bool:
        """Whether the attempt is over when that actor is lost."""
        if request.stage == Stage.PREFILLING:
            return name in self._givers(request)
        is_mover = request.stage == Stage.MIGRATING and name in (request.prefill, *request.movers)
        return name == request.engine or is_mover

    def _givers(self, request: Request) -> tuple[str, ...]:
        """Return who can hand the prompt over: its engine, and the store that a prefill engine publishes to."""
        engine = self.fleet.engines.get(request.prefill)
        if not self.limits.has_store or engine is None or engine.member.role != "prefill":
            return (request.prefill,)
        return request.prefill, self.fleet.store_of(request.prefill)

    def _prefilling(self, message: Prefilled | Stranded) -> Request | None:
        request = self.requests.get(message.request)
        is_current = request is not None and request.attempt == message.attempt and request.stage == Stage.PREFILLING
        return request if is_current else None

    def _current(self, sender: str, message: Prefilled | Adopted | Finished | Failed) -> Request | None:
        request = self.requests.get(message.request)
        if request is None or request.attempt != message.attempt or sender != request.engine:
            return None
        return request

    def _unwanted(self, sender: str, message: Prefilled | Migrated) -> list[Order]:
        """Drop what offers KV, and have its sender let go of it unless the request needs him for something else."""
        self._drop(message)
        known = self.requests.get(message.request)
        is_held = known is not None and known.attempt == message.attempt and sender in known.holders
        return [] if is_held else [Order(sender, Release(message.request, message.attempt))]

    def _pulling(self, message: Migrated | Stranded) -> Request | None:
        request = self.requests.get(message.request)
        is_current = request is not None and request.attempt == message.attempt and bool(request.pull)
        return request if is_current else None

    def _migrating(self, message: Migrated | Stranded) -> Request | None:
        request = self.requests.get(message.request)
        is_current = request is not None and request.attempt == message.attempt and request.stage == Stage.MIGRATING
        return request if is_current else None

    def _drop(self, message: Message) -> list[Order]:
        self.dropped[type(message).__name__] += 1
        return []
