"""`Timeline`: one request over all actors, on one clock, and where its time went. Pure.

Times are milliseconds since the gateway received the request. The parts of the breakdown are what lies between marks
of the actors' stamps, each mark beginning a part that the next one ends, so they add up to the whole exactly.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from msgspec import Struct

from pdactors.errors import BadRequest
from pdactors.messages import Report
from pdactors.stamps import Clock, Detail, Stamps

HOME = ("gateway", "router")  # they are of one node, and read one clock
RECEIVED, TOKENISED, DONE, FAILED = "received", "tokenised", "done", "failed"  # stamps of the gateway
STAGES = (
    "queued",
    "held",
    "pinning",
    "prefilling",
    "waiting",
    "migrating",
    "adopting",
    "decoding",
    "resuming",
)  # of the router
_ON_THE_WAY = {"waiting": "waiting for decode", "migrating": "KV moves", "adopting": "to decode"}
_TO_CLIENT = "to the client"


class Span(Struct, frozen=True, omit_defaults=True):
    """What an actor did from `at_ms` to `until_ms`; without that a moment."""

    what: str
    at_ms: float
    until_ms: float | None = None
    attempt: int = 1
    detail: dict[str, Detail] = {}


class Lane(Struct, frozen=True, omit_defaults=True):
    """One actor's part. Steps are columns; `clock` says how far the actor's own was ahead, which is taken off."""

    actor: str
    role: str
    node: str
    clock: Clock
    spans: tuple[Span, ...]
    step_at_ms: tuple[float, ...] = ()
    step_until_ms: tuple[float, ...] = ()
    step_batch: tuple[int, ...] = ()
    written_ms: tuple[float, ...] = ()
    num_lost: int = 0


class Part(Struct, frozen=True):
    """What a share of the time went into; `count` says in how many pieces."""

    what: str
    ms: float
    count: int


class Timeline(Struct, frozen=True, omit_defaults=True):
    """One request. `first` adds up to `ttft_ms`, with `rest` to `total_ms`."""

    request: str
    id: str  # the client's
    end: str  # finish reason, or the code of the error; "" while it goes on
    message: str  # of the error
    received_at: float  # seconds since the epoch, by the gateway's machine
    num_tokens: int
    ttft_ms: float | None  # None: no token was written
    total_ms: float
    first: tuple[Part, ...]
    rest: tuple[Part, ...]
    lanes: tuple[Lane, ...]
    silent: tuple[str, ...] = ()  # actors that did not answer, or whose clock is not known yet
    detail: dict[str, Detail] = {}


def make_timeline(
    request: str,
    reports: Iterable[Report],
    clocks: Mapping[str, Clock],
    silent: Sequence[str],
    now_s: float,
    wall_s: float,
) -> Timeline:
    """Put together what the actors told; `now_s` and `wall_s` are the same moment on the gateway's two clocks.

    Raises:
        BadRequest: the gateway does not know the request (any more).
    """
    told = {report.name: report for report in reports if report.stamps is not None}
    gateway = next((r.stamps for r in told.values() if r.role == "gateway" and r.stamps is not None), None)
    received = next((stamp for stamp in gateway.stamps if stamp.what == RECEIVED), None) if gateway else None
    if gateway is None or received is None:
        raise BadRequest(f"request {request!r} is not among the last ones")
    origin_s = received.at_s
    lanes, unclear = [], list(silent)
    for report in told.values():
        clock = Clock(is_shared=True) if report.role in HOME else clocks.get(report.name)
        if clock is None:
            unclear.append(report.name)
        elif report.stamps is not None:
            lanes.append(_lane(report, report.stamps, clock, origin_s))
    lanes.sort(key=lambda lane: (lane.role not in HOME, _begin_ms(lane), lane.actor))
    over = next((stamp for stamp in gateway.stamps if stamp.what in (DONE, FAILED)), None)
    total_ms = _ms((over.at_s if over else now_s) - origin_s)
    ttft_ms = _ms(gateway.written_s[0] - origin_s) if gateway.written_s else None
    marks = sorted((mark for lane in lanes for mark in _marks(lane)), key=lambda mark: mark[0])
    to_first = [mark for mark in marks if mark[2] or ttft_ms is None]
    first = _parts(to_first, 0.0, total_ms if ttft_ms is None else ttft_ms)
    rest = () if ttft_ms is None else _parts(_after(marks, ttft_ms), ttft_ms, total_ms)
    how = over.detail if over else {}
    return Timeline(
        request=request,
        id=str(received.detail.get("id", "")),
        end=str(how.get("end", "")),
        message=str(how.get("message", "")),
        received_at=wall_s - (now_s - origin_s),
        num_tokens=len(gateway.written_s),
        ttft_ms=ttft_ms,
        total_ms=total_ms,
        first=first,
        rest=rest,
        lanes=tuple(lanes),
        silent=tuple(unclear),
        detail={k: v for k, v in {**received.detail, **how}.items() if k not in ("id", "end", "message")},
    )


# ---- Lanes --------


def _lane(report: Report, stamps: Stamps, clock: Clock, origin_s: float) -> Lane:
    """Bring an actor's stamps to the gateway's clock."""
    zero_s = origin_s + clock.offset_s
    spans = [
        Span(
            stamp.what,
            _ms(stamp.at_s - zero_s),
            None if stamp.until_s is None else _ms(stamp.until_s - zero_s),
            stamp.attempt,
            stamp.detail,
        )
        for stamp in stamps.stamps
    ]
    return Lane(
        report.name,
        report.role,
        report.node,
        clock,
        tuple(_lasting(spans, report.role)),
        tuple(_ms(at_s - zero_s) for at_s in stamps.steps.began_s),
        tuple(_ms(at_s - zero_s) for at_s in stamps.steps.ended_s),
        stamps.steps.batch,
        tuple(_ms(at_s - zero_s) for at_s in stamps.written_s),
        stamps.num_lost,
    )


def _lasting(spans: list[Span], role: str) -> Iterator[Span]:
    """Let moments that begin a state last until the next one: the router's stages, and an engine's wait for room."""
    for i, span in enumerate(spans):
        until = None
        if role == "router" and span.what != "gone":
            until = next((later for later in spans[i + 1 :]), None)
        elif span.what == "received" and role not in ("gateway", "migrator"):
            until = next(
                (s for s in spans[i + 1 :] if s.attempt == span.attempt and s.what in ("admitted", "left")), None
            )
        elif span.what == RECEIVED:
            until = next((later for later in spans if later.what == TOKENISED), None)
        if until is None or span.until_ms is not None:
            yield span
        else:
            yield Span(span.what, span.at_ms, until.at_ms, span.attempt, span.detail)


def _begin_ms(lane: Lane) -> float:
    return min([span.at_ms for span in lane.spans] + [*lane.step_at_ms[:1]], default=0.0)


# ---- Where the time went --------

Mark = tuple[float, str, bool]  # when, the part that begins, whether it is on the way to the first token


def _marks(lane: Lane) -> Iterator[Mark]:
    if lane.role == "gateway":
        yield from _gateway_marks(lane)
    elif lane.role == "router":
        for span in lane.spans:
            if span.what in _ON_THE_WAY:
                yield span.at_ms, _ON_THE_WAY[span.what], False
            elif span.what != "decoding":
                word = {"prefilling": "to the engine", "gone": _TO_CLIENT}.get(span.what, span.what)
                yield span.at_ms, word, True
    elif lane.role != "migrator":
        yield from _engine_marks(lane)


def _gateway_marks(lane: Lane) -> Iterator[Mark]:
    for span in lane.spans:
        if span.what == RECEIVED:
            yield span.at_ms, "tokenising", True
        elif span.what == TOKENISED:
            yield span.at_ms, "to the router", True


def _engine_marks(lane: Lane) -> Iterator[Mark]:
    is_first = lane.role != "decode"  # it prefills; what comes after a decode engine's word is no part of the TTFT
    for span in lane.spans:
        if span.what == "received":
            yield span.at_ms, "waiting for room", is_first
        elif span.what == "admitted":
            yield span.at_ms, "between steps", is_first
        elif span.what == "chunk" and span.until_ms is not None:
            yield span.at_ms, "prompt chunks", True
            yield span.until_ms, "between steps", True
        elif span.what == "first token":
            yield span.at_ms, _TO_CLIENT, True
            yield span.at_ms, "handing over" if lane.role == "prefill" else "between steps", False
    steps = list(zip(lane.step_at_ms, lane.step_until_ms, strict=True))
    for i, (at_ms, until_ms) in enumerate(steps):
        yield at_ms, "decode steps", False
        yield until_ms, "between steps" if i + 1 < len(steps) else _TO_CLIENT, False
    for span in lane.spans:
        if span.what == "admitted" and "again" in span.detail:
            stopped = max((until_ms for _, until_ms in steps if until_ms < span.at_ms), default=None)
            if stopped is not None:
                yield stopped, "preempted", False


def _after(marks: Sequence[Mark], ttft_ms: float) -> list[Mark]:
    """Choose the marks of the time after the first token: all that are later, and the last of those before it.

    Until then the first token was on its way, while the sequence was handed over.
    """
    begun = [mark for mark in marks if mark[0] <= ttft_ms and not mark[2]]
    return begun[-1:] + [mark for mark in marks if mark[0] > ttft_ms]


def _parts(marks: Sequence[Mark], begin_ms: float, end_ms: float) -> tuple[Part, ...]:
    """Add up, by name, what lies between marks within `begin_ms .. end_ms`; names in order of their first time."""
    sums: dict[str, list[float]] = {}
    moments = [(min(max(at_ms, begin_ms), end_ms), what) for at_ms, what, _ in marks]
    edges = [(begin_ms, moments[0][1] if moments else "unknown"), *moments, (end_ms, "")]
    for (at_ms, what), (next_ms, _) in pairwise(edges):
        if next_ms > at_ms:
            sums.setdefault(what, []).append(next_ms - at_ms)
    return tuple(Part(what, round(sum(pieces), 3), len(pieces)) for what, pieces in sums.items())


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
