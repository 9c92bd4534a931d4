"""What actors note of a request while they work on it, and what their clocks show. Told only to whoever asks.

Times are seconds of the noting actor's CLOCK_MONOTONIC, which other machines' clocks have nothing in common with.
"""

from __future__ import annotations

from msgspec import Struct

Detail = str | int | float


class Stamp(Struct, frozen=True, omit_defaults=True):
    """A moment of a request's life at one actor; with `until_s` what went on from then to then."""

    what: str
    at_s: float
    until_s: float | None = None
    attempt: int = 1
    detail: dict[str, Detail] = {}


class Steps(Struct, frozen=True, omit_defaults=True):
    """The decode steps of an engine that a request took part in, in columns of one length."""

    began_s: tuple[float, ...] = ()
    ended_s: tuple[float, ...] = ()
    batch: tuple[int, ...] = ()  # sequences in the step


class Stamps(Struct, frozen=True, omit_defaults=True):
    """All that one actor still knows of one request."""

    stamps: tuple[Stamp, ...] = ()
    steps: Steps = Steps()
    written_s: tuple[float, ...] = ()  # gateway: when each token was handed to its client's socket
    num_lost: int = 0  # steps, stamps and tokens for which there was no room


class Echo(Struct, frozen=True):
    """An actor's answer to the router's last news: which clock it reads, and what that showed."""

    clock: str  # actors with the same one read the same clock
    news_s: float  # what the news said when they were sent, on the router's clock
    heard_s: float
    sent_s: float


class Clock(Struct, frozen=True):
    """How far an actor's clock is ahead of the router's; the truth is at most `error_s` away."""

    offset_s: float = 0.0
    error_s: float = 0.0
    is_shared: bool = False  # it is the router's own
