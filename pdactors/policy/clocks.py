"""How far the clocks of other machines are ahead of ours. Pure: echoes in, bounds out.

The router's news say when they were sent, and heartbeats echo that (`Echo`). A clock that is ahead by x showed
`heard_s` at a time of ours after `news_s`, and `sent_s` before the heartbeat came, so sent_s - now <= x <= heard_s -
news_s: half the round trip to either side of the middle (NTP's estimate, RFC 5905). Each echo narrows what the earlier
ones left, which widens meanwhile by what two quartz clocks may part.
"""

from __future__ import annotations

from dataclasses import dataclass

from pdactors.stamps import Clock, Echo

DRIFT = 200e-6  # seconds a second


@dataclass
class _Bounds:
    low_s: float
    high_s: float
    noted_s: float

    def at(self, now: float) -> tuple[float, float]:
        widened_s = DRIFT * max(0.0, now - self.noted_s)
        return self.low_s - widened_s, self.high_s + widened_s


class Clocks:
    """Knows the clock of every actor that was heard; `own` is the name of ours."""

    def __init__(self, own: str) -> None:
        self._own = own
        self._of: dict[str, str] = {}  # actor -> clock
        self._bounds: dict[str, _Bounds] = {}

    def heard(self, actor: str, echo: Echo, now: float) -> None:
        """Take an actor's echo in; one that cannot be true says nothing."""
        self._of[actor] = echo.clock
        low, high = echo.sent_s - now, echo.heard_s - echo.news_s
        if echo.clock == self._own or not low <= high:
            return
        known = self._bounds.get(echo.clock)
        if known is not None:
            before = known.at(now)
            if max(low, before[0]) <= min(high, before[1]):  # else the clock was set, or slept: begin anew
                low, high = max(low, before[0]), min(high, before[1])
        self._bounds[echo.clock] = _Bounds(low, high, now)

    def forget(self, actor: str) -> None:
        """The actor is gone; what is known of its machine's clock stays while others read it."""
        clock = self._of.pop(actor, "")
        if clock not in self._of.values():
            self._bounds.pop(clock, None)

    def of(self, actor: str, now: float) -> Clock | None:
        """Return what is known of an actor's clock."""
        clock = self._of.get(actor)
        if clock == self._own:
            return Clock(is_shared=True)
        if clock not in self._bounds:
            return None
        low, high = self._bounds[clock].at(now)
        return Clock((low + high) / 2, (high - low) / 2)
