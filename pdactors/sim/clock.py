"""`Clock`: virtual time, and what is to happen when."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from typing import Any

_Event = tuple[float, int, Callable[..., object], tuple[Any, ...]]


class Clock:
    """Events in order of their time; those of one time in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[_Event] = []
        self._numbers = itertools.count()

    def at(self, when_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have something happen at a time, at once if that has passed."""
        heapq.heappush(self._events, (max(when_s, self.now), next(self._numbers), action, arguments))

    def after(self, delay_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Have something happen in a while."""
        self.at(self.now + delay_s, action, *arguments)

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let events happen until `is_over` or there are none."""
        while self._events and not is_over():
            self.now, _, action, arguments = heapq.heappop(self._events)
            action(*arguments)
