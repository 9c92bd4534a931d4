"""`Stall`: since when an engine's memory stands still, and who gives way then."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pdactors.actors.engine import EngineActor

STALL_S = 0.1  # a batch without room for its next step waits so long before leases are given back


class Stall:
    """Has those who wait give back what they borrow when memory stands still: it is computed again, later.

    Otherwise what runs here could wait for blocks that an engine lends to what waits behind it.
    """

    def __init__(self, actor: EngineActor) -> None:
        self._actor = actor
        self._since: float | None = None

    def over(self) -> None:
        """A step has run."""
        self._since = None

    def mind(self) -> None:
        """Look whether anything can run, where nothing does."""
        if not self._actor.engine.is_stalled:
            self._since = None
            return
        now = self._actor.clock()
        if self._since is None:
            self._since = now
        elif now - self._since > STALL_S:
            self._since = now
            if (sequence := self._actor.engine.give_way()) is not None:
                self._actor.give_leases_back(sequence)
