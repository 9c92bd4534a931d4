"""The router's request table: every request in flight, found by id, by stage and by engine. Pure.

QUEUED --place--> PREFILLING --prefilled--> WAITING --decode has room--> ADOPTING --adopted--> DECODING
 |  ^               ^                        |                              ^
 |  |               |                        +--elsewhere--> MIGRATING -----+
 +--|--> PINNING ---+  others lend the prompt's beginning
 +--|--> HELD, while another request computes the prompt's beginning for the store, and back to QUEUED
    |
    +-- the gateway says what the client has -- RESUMING <-- who has it is lost -- any other

any: finished, failed, cancelled, timed out -> gone
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pdactors.errors import InvariantError
from pdactors.messages import Generate, Prefilled, Segment
from pdactors.policy.prefix_keys import PrefixKeys
from pdactors.policy.transfer import NO_WAY, Way
from pdactors.token_ids import NO_TOKENS, TokenIds

MAX_MOVES = 100_000  # that are kept for someone to drain


class Stage(StrEnum):
    QUEUED = "queued"
    HELD = "held"
    PINNING = "pinning"
    PREFILLING = "prefilling"
    WAITING = "waiting"
    MIGRATING = "migrating"
    ADOPTING = "adopting"
    DECODING = "decoding"
    RESUMING = "resuming"


_LEGAL = {
    Stage.QUEUED: {Stage.HELD, Stage.PINNING, Stage.PREFILLING},
    Stage.HELD: {Stage.QUEUED},
    Stage.PINNING: {Stage.PREFILLING, Stage.RESUMING},
    Stage.PREFILLING: {Stage.WAITING, Stage.RESUMING},
    Stage.WAITING: {Stage.ADOPTING, Stage.MIGRATING, Stage.RESUMING},
    Stage.MIGRATING: {Stage.ADOPTING, Stage.RESUMING},
    Stage.ADOPTING: {Stage.DECODING, Stage.RESUMING},
    Stage.DECODING: {Stage.RESUMING},
    Stage.RESUMING: {Stage.QUEUED},
}

_UNPLACED = {Stage.QUEUED, Stage.HELD, Stage.RESUMING}  # at no engine
_COMPUTING = {Stage.PINNING, Stage.PREFILLING}
_AT_DECODE = {Stage.MIGRATING, Stage.ADOPTING, Stage.DECODING}


@dataclass(eq=False)
class Request:
    """One request in flight. `holders` are the engines that may hold something for it."""

    ask: Generate
    gateway: str
    arrived_s: float
    number: int  # counts arrivals
    keys: PrefixKeys  # by which what is cached of the prompt is found
    attempt: int = 1
    generated: TokenIds = NO_TOKENS  # what the client had when the attempt began
    stage: Stage = Stage.QUEUED
    leader: str = ""  # the request that it is held for
    prefill: str = ""  # who computes the prompt, and then who holds its KV
    decode: str = ""
    planned: str = ""  # the decode engine that was chosen early, since KV has to move there; it keeps a place
    prefilled: Prefilled | None = None
    prefilled_s: float = 0.0  # when that came
    way: Way = NO_WAY  # how the KV gets to decode
    movers: tuple[str, ...] = ()  # migrators that the KV moves through
    num_cached: int = 0  # tokens of the prompt that its engine was expected to read when it was chosen
    pins: dict[int, str] = field(default_factory=dict)  # first block -> owner asked to lend, that has not answered
    prefix: list[Segment] = field(default_factory=list)  # what owners lend for the prefill
    prefix_tokens: int = 0  # where that and what the prefill has itself end
    pull: tuple[str, ...] = ()  # the migrators that bring it from another node
    pinned_s: float = 0.0  # when they were asked
    is_copied: bool = False  # the decode engine was told to read copies of its own
    resume_s: float = 0.0  # when the gateway is to be asked, or asked again, what the client has
    holders: set[str] = field(default_factory=set)

    @property
    def rank(self) -> tuple[bool, int]:
        """Who is served first: interactive before batch, then the older."""
        return self.ask.priority != "interactive", self.number

    @property
    def num_tokens(self) -> int:
        """What prefill has to compute: the prompt, and what was generated after it."""
        return len(self.ask.prompt) + len(self.generated)

    @property
    def digests(self) -> tuple[bytes, ...]:
        """Digests of the prompt's full blocks that need not be computed where they are cached."""
        return self.keys.digests

    @property
    def engine(self) -> str:
        """The engine that the request is accounted to; "" while there is none."""
        return self.decode if self.stage in _AT_DECODE else self.prefill

    @property
    def owners(self) -> tuple[str, ...]:
        """Whose blocks a prefilled sequence has."""
        return tuple(segment.owner for segment in self.prefilled.handle.segments) if self.prefilled else ()

    def num_owned(self, name: str) -> int:
        """Return how many blocks of a prefilled sequence are that engine's own, and nobody else can lend it."""
        segments = self.prefilled.handle.segments if self.prefilled else ()
        return sum(len(segment.blocks) for segment in segments if segment.owner == name)


class Queue:
    """Requests that wait for the same thing, by rank."""

    def __init__(self) -> None:
        self._ranks: list[tuple[bool, int]] = []
        self._requests: dict[tuple[bool, int], Request] = {}

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def first(self) -> Request:
        return self._requests[self._ranks[0]]

    def add(self, request: Request) -> None:
        insort(self._ranks, request.rank)
        self._requests[request.rank] = request

    def remove(self, request: Request) -> None:
        del self._ranks[bisect_left(self._ranks, request.rank)]
        del self._requests[request.rank]


@dataclass(frozen=True)
class Move:
    """A request got to another stage; "" for the end. `why` says what a move that nobody wished for comes from."""

    request: str
    attempt: int
    stage: Stage | Literal[""]
    engine: str
    why: str = ""


@dataclass
class Assigned:
    """What an engine was given and has not handed on: its requests, and prompt tokens that it has to compute."""

    num_requests: int = 0
    num_tokens: int = 0


class RequestTable(Mapping[str, Request]):
    """Requests in order of arrival. Stages change here only, so that no question needs a walk over all of them."""

    def __init__(self) -> None:
        self.queued = Queue()
        self.held: dict[str, Queue] = {}  # by the request that they wait for
        self.waiting: dict[str, Queue] = {}  # by who holds the KV
        self.assigned: dict[str, Assigned] = {}
        self.under_way: dict[str, dict[str, frozenset[bytes]]] = {}  # engine -> request -> digests that it computes
        self.beginnings: dict[bytes, set[str]] = {}  # first digest -> requests that compute it
        self.touched: set[str] = set()  # engines whose assignments changed; whoever looks at them clears it
        self._requests: dict[str, Request] = {}
        self._moves: deque[Move] = deque(maxlen=MAX_MOVES)

    def __getitem__(self, name: str) -> Request:
        return self._requests[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._requests)

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_unplaced(self) -> int:
        """Requests that no engine has taken."""
        return len(self.queued) + sum(map(len, self.held.values()))

    def add(self, request: Request) -> None:
        """Take a new request in; its id is not in the table."""
        self._requests[request.ask.request] = request
        self._enter(request)
        self._note(request, request.stage)

    def remove(self, request: Request, why: str = "") -> None:
        """Forget a request."""
        del self._requests[request.ask.request]
        self._leave(request)
        self._note(request, "", why)
        self._follow(request)

    def hold(self, request: Request, leader: Request) -> None:
        """Keep a queued request until the leader's prompt is computed, or is not going to be."""
        request.leader = leader.ask.request
        self.move(request, Stage.HELD)

    def drain_moves(self) -> list[Move]:
        """Return what has moved since the last call, in order."""
        moves = list(self._moves)
        self._moves.clear()
        return moves

    def beginning(self, request: Request) -> set[str]:
        """Return the engines that are computing the first block of a request's prompt for others."""
        first = request.digests[0] if request.digests else b""
        return {self._requests[name].engine for name in self.beginnings.get(first, ())}

    def coming(self, engine: str) -> Collection[frozenset[bytes]]:
        """Return the digests that an engine is computing, by request."""
        return self.under_way.get(engine, {}).values()

    def plan(self, request: Request, engine: str) -> None:
        """Keep a place at a decode engine for a request that is not there yet; "" lets it go."""
        self._leave(request)
        request.planned = engine
        self._enter(request)

    def move(self, request: Request, stage: Stage, engine: str = "", why: str = "") -> None:
        """Change the stage; `engine` takes the request from PINNING, PREFILLING, MIGRATING or ADOPTING on.

        From WAITING on it is the store that holds the KV, if one does, and not the engine that computed it.

        Raises:
            InvariantError: the automaton above has no such arrow.
        """
        if stage not in _LEGAL[request.stage]:
            raise InvariantError(f"request {request.ask.request}: {request.stage} -> {stage} is not a legal move")
        self._leave(request)
        request.stage = stage
        if stage == Stage.RESUMING:
            request.attempt += 1
            request.prefill, request.decode, request.prefilled = "", "", None
            request.movers, request.planned = (), ""
            request.num_cached, request.is_copied = 0, False
            request.pins.clear()
            request.prefix.clear()
            request.holders.clear()
            request.pull = ()
        elif stage in (Stage.PINNING, Stage.PREFILLING):
            request.prefill = engine
        elif stage == Stage.WAITING:
            request.prefill = engine or request.prefill
        elif stage in _AT_DECODE:
            request.decode = engine or request.decode
        if engine:
            request.holders.add(engine)
        self._enter(request)
        self._note(request, stage, why)
        if stage not in _COMPUTING:
            self._follow(request)

    def check(self) -> None:
        """Hold the table against itself.

        Raises:
            InvariantError: a stage lacks what it implies, or a queue or count is wrong.
        """
        fresh = RequestTable()
        for name, request in self._requests.items():
            stage = request.stage
            if name != request.ask.request:
                raise InvariantError(f"request {request.ask.request} is filed under {name}")
            if (stage == Stage.WAITING or stage in _AT_DECODE) != (request.prefilled is not None):
                raise InvariantError(f"request {name} is {stage} with the hand-over {request.prefilled}")
            if (stage in _UNPLACED) == bool(request.engine):
                raise InvariantError(f"request {name} is {stage} at {request.engine or 'no engine'}")
            if request.engine and request.engine not in request.holders:
                raise InvariantError(f"request {name} is at {request.engine}, which is not among its holders")
            if (stage == Stage.PINNING) != bool(request.pins) or (request.pull and stage != Stage.PINNING):
                raise InvariantError(f"request {name} is {stage} and waits for {request.pins}")
            if stage == Stage.HELD and self._requests[request.leader].stage not in _COMPUTING:
                raise InvariantError(f"request {name} is held for {request.leader}, which computes nothing")
            fresh.add(request)
        for what, ours, theirs in (
            ("queued", self.queued._ranks, fresh.queued._ranks),
            ("held", _ranks(self.held), _ranks(fresh.held)),
            ("waiting", _ranks(self.waiting), _ranks(fresh.waiting)),
            ("assigned", self.assigned, fresh.assigned),
            ("under way", self.under_way, fresh.under_way),
            ("begun", self.beginnings, fresh.beginnings),
        ):
            if ours != theirs:
                raise InvariantError(f"{what} is {ours}, the requests make it {theirs}")

    def _note(self, request: Request, stage: Stage | Literal[""], why: str = "") -> None:
        self._moves.append(Move(request.ask.request, request.attempt, stage, request.engine, why))

    def _enter(self, request: Request) -> None:
        if request.stage not in _UNPLACED:
            self._count(request, 1)
        if request.stage == Stage.QUEUED:
            self.queued.add(request)
        elif request.stage == Stage.HELD:
            self.held.setdefault(request.leader, Queue()).add(request)
        elif request.stage == Stage.WAITING:
            self.waiting.setdefault(request.prefill, Queue()).add(request)

    def _leave(self, request: Request) -> None:
        if request.stage not in _UNPLACED:
            self._count(request, -1)
        if request.stage == Stage.QUEUED:
            self.queued.remove(request)
        elif request.stage == Stage.HELD:
            _take(self.held, request.leader, request)
        elif request.stage == Stage.WAITING:
            _take(self.waiting, request.prefill, request)

    def _follow(self, leader: Request) -> None:
        """Queue those again that were held for a request: it computes nothing any more."""
        while leader.ask.request in self.held:
            self.move(self.held[leader.ask.request].first, Stage.QUEUED)

    def _count(self, request: Request, sign: int) -> None:
        """Account a request to its engine; one that waits for decode keeps its place at the prefill engine."""
        if request.planned and request.stage not in _AT_DECODE:
            self._count_at(request.planned, sign)
        assigned = self._count_at(request.engine, sign)
        if request.stage in (Stage.PINNING, Stage.PREFILLING):
            assigned.num_tokens += sign * (request.num_tokens - request.num_cached)
            under_way = self.under_way.setdefault(request.engine, {})
            begun = self.beginnings.setdefault(request.digests[0], set()) if request.digests else set[str]()
            if sign > 0:
                under_way[request.ask.request] = frozenset(request.digests)
                begun.add(request.ask.request)
            else:
                del under_way[request.ask.request]
                begun.discard(request.ask.request)
                if request.digests and not begun:
                    del self.beginnings[request.digests[0]]
            if not under_way:
                del self.under_way[request.engine]

    def _count_at(self, engine: str, sign: int) -> Assigned:
        self.touched.add(engine)
        assigned = self.assigned.setdefault(engine, Assigned())
        assigned.num_requests += sign
        if not assigned.num_requests:
            del self.assigned[engine]
        return assigned


def _take(queues: dict[str, Queue], name: str, request: Request) -> None:
    queues[name].remove(request)
    if not queues[name]:
        del queues[name]


def _ranks(queues: Mapping[str, Queue]) -> dict[str, list[tuple[bool, int]]]:
    return {name: queue._ranks for name, queue in queues.items()}
