"""The router's mind: what follows from what happens. Pure: stimulus in, orders out; the table is in `requests.py`.

A request that is gone is unknown, and whatever arrives for an unknown request or an old attempt is counted and dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from pdactors import errors
from pdactors.messages import (
    Adopted,
    Cancel,
    Decode,
    Failed,
    Finished,
    Generate,
    Load,
    Member,
    Message,
    Prefill,
    Prefilled,
    Rejected,
    Release,
)
from pdactors.policy.placement import EngineView, Place, PlacementPolicy, choose_prefill, schedule_decode
from pdactors.policy.requests import Assigned, Request, RequestTable, Stage

MAX_ATTEMPTS = 3


class Order(NamedTuple):
    """Send `message` to the actor called `to`."""

    to: str
    message: Message


@dataclass
class Engine:
    """An engine of the fleet as the router knows it."""

    member: Member
    load: Load = field(default_factory=Load)
    device: str = "cpu"

    @property
    def place(self) -> Place:
        return Place(self.member.node, self.member.rack, self.device)


@dataclass(frozen=True)
class Limits:
    """What of the cluster file the dispatcher needs."""

    block_tokens: int
    max_model_len: int
    max_queue: int
    request_timeout_s: float
    policy: PlacementPolicy = "locality"
    max_distance: int = 2
    can_migrate: bool = False


class Dispatcher:
    """Owns the request table and the fleet's state; each stimulus returns the orders that follow from it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = RequestTable()
        self.engines: dict[str, Engine] = {}
        self.dropped: Counter[str] = Counter()
        self._turn = 0
        self._num_asked = 0
        self._finished_at: list[float] = []

    # ---- The fleet --------

    def joined(self, member: Member, load: Load, now: float) -> list[Order]:
        """Take note of an engine's state or load, and use the room that it offers."""
        self.engines[member.name] = Engine(member, load)
        return self._advance(now)

    def lost(self, name: str, now: float) -> list[Order]:
        """Go on without an actor that is dead and fenced."""
        self.engines.pop(name, None)
        orders: list[Order] = []
        for request in list(self.requests.values()):
            request.holders.discard(name)
            if request.gateway == name:
                orders += self._end(request)
            elif request.stage in (Stage.PREFILLING, Stage.WAITING) and request.prefill == name:
                orders += self._retry(request, name)
            elif request.stage in (Stage.ADOPTING, Stage.DECODING) and request.decode == name:
                orders += self._reject(request, errors.WorkerLost(f"{name} was lost while it decoded the request"))
        return orders + self._advance(now)

    # ---- Requests --------

    def generate(self, gateway: str, ask: Generate, now: float) -> list[Order]:
        """Admit a request, or refuse it with the reason."""
        if ask.request in self.requests:
            return self._drop(ask)
        self._num_asked += 1
        request = Request(ask, gateway, now, self._num_asked)
        refusal = self._refusal(ask, now)
        if refusal is not None:
            return [_rejected(request, refusal)]
        self.requests.add(request)
        return self._advance(now)

    def cancel(self, message: Cancel, now: float) -> list[Order]:
        """Let go of a request; unknown ones were finished already."""
        request = self.requests.get(message.request)
        return self._end(request) + self._advance(now) if request else self._drop(message)

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
        if request is None or request.stage == Stage.WAITING:
            return self._drop(message)
        request.holders.discard(sender)
        self._finished_at = [*self._finished_at[-63:], now]
        return self._end(request) + self._advance(now)

    def failed(self, sender: str, message: Failed, now: float) -> list[Order]:
        """An engine cannot go on with the request."""
        request = self._current(sender, message)
        if request is None:
            return self._drop(message)
        return self._reject(request, errors.error_for(message.code, message.message)) + self._advance(now)

    def tick(self, now: float) -> list[Order]:
        """End what is overdue."""
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
            placed = self._place_prefill(self.requests.queued.first)
            if not placed:
                break
            orders += placed
        return orders

    def _place_prefill(self, request: Request) -> list[Order]:
        ask = request.ask
        target = choose_prefill(self._views("prefill"), len(ask.prompt), decodes=self._views("decode"))
        if target is None:
            return []
        self.requests.move(request, Stage.PREFILLING, target)
        message = Prefill(ask.request, request.attempt, ask.prompt, ask.sampling, ask.priority, ask.save_final_kv)
        return [Order(target, message)]

    def _place_decode(self, request: Request) -> list[Order]:
        ask, done = request.ask, request.prefilled
        source = self.engines.get(request.prefill)
        if done is None or source is None:
            return []
        decision = schedule_decode(
            source.place,
            self._views("decode"),
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

    def _views(self, role: str) -> list[EngineView]:
        views = []
        for name, engine in self.engines.items():
            if engine.member.role == role and engine.member.state == "ready":
                given = self.requests.assigned.get(name, _NOTHING)
                room = engine.load.max_sequences
                views.append(EngineView(name, engine.place, given.num_requests, room, given.num_tokens))
        return views

    # ---- Endings --------

    def _retry(self, request: Request, lost: str) -> list[Order]:
        """Compute the prompt again elsewhere; the gateway drops a first token that it has already.

        Nobody waits for a successor to load a model: with no other prefill the client hears of it at once.
        """
        if request.attempt >= MAX_ATTEMPTS:
            return self._reject(request, errors.WorkerLost(f"{lost} was lost in attempt {request.attempt}"))
        if not self._views("prefill"):
            return self._reject(request, errors.WorkerLost(f"{lost} was lost with the prompt, and it was the only one"))
        request.attempt += 1
        self.requests.move(request, Stage.QUEUED)
        return []

    def _refusal(self, ask: Generate, now: float) -> errors.PDError | None:
        """Say why a new request cannot be taken; None when it can."""
        limits = self.limits
        if len(ask.prompt) >= limits.max_model_len:
            return errors.PromptTooLong(
                f"prompt has {len(ask.prompt)} tokens; model.max_model_len {limits.max_model_len} leaves no room"
            )
        too_big = self._never_fits(len(ask.prompt), ask.sampling.max_tokens)
        if too_big is not None:
            return too_big
        queued = len(self.requests.queued)
        if queued >= limits.max_queue:
            wait_s = self._retry_after_s(queued, now)
            return errors.Overloaded(f"{queued} requests are waiting (router.max_queue)", retry_after_s=wait_s)
        return None

    def _never_fits(self, prompt_tokens: int, max_tokens: int) -> errors.PDError | None:
        for role, tokens in (
            ("prefill", prompt_tokens),
            ("decode", prompt_tokens % self.limits.block_tokens + max_tokens),
        ):
            sizes = [e.load.max_blocks for e in self.engines.values() if e.member.role == role and e.load.max_blocks]
            limit = max(sizes, default=0) * self.limits.block_tokens
            if not limit or tokens <= limit:
                continue
            if role == "prefill":
                return errors.PromptTooLong(f"prompt has {tokens} tokens; kv.memory holds {limit} of one prompt")
            return errors.BadRequest(
                f"max_tokens: {max_tokens} tokens do not fit; kv.memory holds {limit} for an answer"
            )
        return None

    def _retry_after_s(self, queued: int, now: float) -> float:
        if len(self._finished_at) < 2 or now <= self._finished_at[0]:
            return 1.0
        rate = len(self._finished_at) / (now - self._finished_at[0])
        return round(max(0.1, queued / rate), 1)

    def _reject(self, request: Request, error: errors.PDError) -> list[Order]:
        return [_rejected(request, error), *self._end(request)]

    def _end(self, request: Request) -> list[Order]:
        self.requests.remove(request)
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
