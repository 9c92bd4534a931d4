"""`RateSearch`: finds the highest rate that is still held, by doubling and halving. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

LOWEST, HIGHEST = 1 / 64, 1024.0  # requests a second beyond which nothing is tried


@dataclass
class RateSearch:
    """Ask `next_rate` what to try, `add` what came of it, until there is nothing more to try.

    The rate is doubled from `start` while it is held (halved while it is not), and then closed in on until the bounds
    are within a factor of `precision`. One failed try is believed: of noise, several rounds tell.
    """

    start: float = 1.0
    precision: float = 1.1
    held: float = 0.0  # the highest that was
    missed: float = field(default=float("inf"))  # the lowest that was not

    def next_rate(self) -> float | None:
        """Return the rate to try; None at the end."""
        if not self.held and self.missed == float("inf"):
            return self.start
        if self.missed == float("inf"):
            return self.held * 2 if self.held * 2 <= HIGHEST else None
        if not self.held:
            return self.missed / 2 if self.missed / 2 >= LOWEST else None
        return (self.held * self.missed) ** 0.5 if self.missed / self.held > self.precision else None

    def add(self, rate: float, is_held: bool) -> None:
        """Take note of a try."""
        if is_held:
            self.held = max(self.held, rate)
        else:
            self.missed = min(self.missed, rate)
