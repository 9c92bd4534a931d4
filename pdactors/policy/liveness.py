"""Who is silent for too long. Pure: the caller brings the clock."""

from __future__ import annotations


class Liveness:
    """Remembers when each peer was last heard.

    A pause of the observer itself says nothing about the others: after one, everybody gets a new term.
    """

    def __init__(self, dead_after_s: float) -> None:
        self._dead_after_s = dead_after_s
        self._heard: dict[str, float] = {}
        self._last_check: float | None = None

    def heard(self, name: str, now: float) -> None:
        """Note that `name` gave a sign of life."""
        self._heard[name] = now

    def forget(self, name: str) -> None:
        """Stop watching `name`; unknown names are fine."""
        self._heard.pop(name, None)

    def silent(self, now: float) -> list[str]:
        """Return who has not been heard for `dead_after_s`; call it several times in such a span."""
        paused = self._last_check is not None and now - self._last_check > self._dead_after_s / 2
        self._last_check = now
        if paused:
            self._heard = dict.fromkeys(self._heard, now)
        return [name for name, heard in self._heard.items() if now - heard > self._dead_after_s]
