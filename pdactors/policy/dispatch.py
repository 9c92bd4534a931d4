"""The router's mind: the request table and what to do when something happens. Pure: stimulus in, orders out.

    QUEUED --place--> PREFILLING --prefilled--> WAITING --decode has room--> ADOPTING --adopted--> DECODING
       ^                  |                        |
       +---prefill lost---+------------------------+      any stage: finished, failed, cancelled, timed out -> gone

A request that is gone is unknown, and whatever arrives for an unknown request or an old attempt is counted and dropped.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
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

MAX_ATTEMPTS = 3


class Order(NamedTuple):
    """Send `message` to the actor called `to`."""

    to: str
    message: Message


class Stage(StrEnum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    WAITING = "waiting"
    ADOPTING = "adopting"
    DECODING = "decoding"


_LEGAL = {
    Stage.QUEUED: {Stage.PREFILLING},
    Stage.PREFILLING: {Stage.WAITING, Stage.QUEUED},
    Stage.WAITING: {Stage.ADOPTING, Stage.QUEUED},
    Stage.ADOPTING: {Stage.DECODING},
    Stage.DECODING: set[Stage](),
}


@dataclass
class Request:
    """One request in flight. `holders` are the engines that may hold something for it."""

    ask: Generate
    gateway: str
    arrived_s: float
    attempt: int = 1
    stage: Stage = Stage.QUEUED
    prefill: str = ""
    decode: str = ""
    prefilled: Prefilled | None = None
    holders: set[str] = field(default_factory=set)

    def move(self, stage: Stage) -> None:
        """Change the stage.

        Raises:
            InvariantError: the automaton above has no such arrow.
        """
        if stage not in _LEGAL[self.stage]:
            raise errors.InvariantError(f"request {self.ask.request}: {self.stage} -> {stage} is not a legal move")
        self.stage = stage


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
        self.requests: dict[str, Request] = {}  # in order of arrival
        self.engines: dict[str, Engine] = {}
        self.dropped: Counter[str] = Counter()
        self._turn = 0
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
        request = Request(ask, gateway, now)
        refusal = self._refusal(request, now)
        if refusal is not None:
            return [_rejected(request, refusal)]
        self.requests[ask.request] = request
        return self._advance(now)

    def cancel(self, message: Cancel, now: float) -> list[Order]:
        """Let go of a request; unknown ones were finished already."""
        request = self.requests.get(message.request)
        return self._end(request) + self._advance(now) if request else self._drop(message)

    def prefilled(self, sender: str, message: Prefilled, now: float) -> list[Order]:
        """The prompt is computed and leased: find a decode engine for it."""
        request = self._current(sender, message)
        if request is None or request.stage != Stage.PREFILLING:
            return [*self._drop(message), Order(sender, Release(message.request, message.attempt))]
        request.prefilled = message
        request.move(Stage.WAITING)
        return self._advance(now)

    def adopted(self, sender: str, message: Adopted) -> list[Order]:
        """A decode engine runs the sequence."""
        request = self._current(sender, message)
        if request is None or request.stage != Stage.ADOPTING:
            return self._drop(message)
        request.move(Stage.DECODING)
        return []

    def finished(self, sender: str, message: Finished, now: float) -> list[Order]:
        """The sequence ended; everyone else lets go of it."""
        request = self._current(sender, message)
        if request is None:
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
            InvariantError: a stage lacks what it implies.
        """
        for name, request in self.requests.items():
            if name != request.ask.request:
                raise errors.InvariantError(f"request {request.ask.request} is filed under {name}")
            if request.stage in (Stage.WAITING, Stage.ADOPTING, Stage.DECODING) and request.prefilled is None:
                raise errors.InvariantError(f"request {name} is {request.stage} without a prefill")
            if request.stage in (Stage.ADOPTING, Stage.DECODING) and not request.decode:
                raise errors.InvariantError(f"request {name} is {request.stage} nowhere")

    # ---- Placement --------

    def _advance(self, now: float) -> list[Order]:
        """Place whatever can be placed now, oldest first, interactive before batch."""
        orders: list[Order] = []
        full: set[Stage] = set()  # one that finds no room speaks for those behind it
        open_requests = [r for r in self.requests.values() if r.stage in (Stage.QUEUED, Stage.WAITING)]
        open_requests.sort(key=lambda r: r.ask.priority != "interactive")
        for request in open_requests:
            stage = request.stage
            if stage in full:
                continue
            placed = self._place_prefill(request) if stage == Stage.QUEUED else self._place_decode(request)
            orders += placed
            if not placed:
                full.add(stage)
        return orders

    def _place_prefill(self, request: Request) -> list[Order]:
        ask = request.ask
        target = choose_prefill(self._views("prefill"), len(ask.prompt), decodes=self._views("decode"))
        if target is None:
            return []
        request.prefill = target
        request.holders.add(target)
        request.move(Stage.PREFILLING)
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
        request.decode = decision.target
        request.holders.add(decision.target)
        request.move(Stage.ADOPTING)
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
        stages = (Stage.PREFILLING,) if role == "prefill" else (Stage.ADOPTING, Stage.DECODING)
        requests: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for request in self.requests.values():
            if request.stage in stages:
                name = self._engine_of(request)
                requests[name] += 1
                tokens[name] += len(request.ask.prompt)
        return [
            EngineView(name, engine.place, requests[name], engine.load.max_sequences, tokens[name])
            for name, engine in self.engines.items()
            if engine.member.role == role and engine.member.state == "ready"
        ]

    # ---- Endings --------

    def _retry(self, request: Request, lost: str) -> list[Order]:
        """Compute the prompt again elsewhere; the gateway drops a first token that it has already."""
        if request.attempt >= MAX_ATTEMPTS:
            return self._reject(request, errors.WorkerLost(f"{lost} was lost in attempt {request.attempt}"))
        request.attempt += 1
        request.prefill, request.prefilled = "", None
        request.move(Stage.QUEUED)
        return []

    def _refusal(self, request: Request, now: float) -> errors.PDError | None:
        """Say why a new request cannot be taken; None when it can."""
        ask, limits = request.ask, self.limits
        if len(ask.prompt) >= limits.max_model_len:
            return errors.PromptTooLong(
                f"prompt has {len(ask.prompt)} tokens; model.max_model_len {limits.max_model_len} leaves no room"
            )
        too_big = self._never_fits(len(ask.prompt), ask.sampling.max_tokens)
        if too_big is not None:
            return too_big
        queued = sum(r.stage == Stage.QUEUED for r in self.requests.values())
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
        del self.requests[request.ask.request]
        return [Order(holder, Release(request.ask.request, request.attempt)) for holder in sorted(request.holders)]

    def _engine_of(self, request: Request) -> str:
        return request.prefill if request.stage == Stage.PREFILLING else request.decode

    def _current(self, sender: str, message: Prefilled | Adopted | Finished | Failed) -> Request | None:
        request = self.requests.get(message.request)
        if request is None or request.attempt != message.attempt or sender not in request.holders:
            return None
        return request

    def _drop(self, message: Message) -> list[Order]:
        self.dropped[type(message).__name__] += 1
        return []


def _rejected(request: Request, error: errors.PDError) -> Order:
    return Order(request.gateway, Rejected(request.ask.request, error.code, error.message, error.retry_after_s))
