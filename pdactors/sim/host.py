"""`Host`: a machine whose engines share its memory, so that a step takes longer while others are in theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pdactors.sim.clock import Clock
from pdactors.sim.cost import Crowd


@dataclass(eq=False)
class _Step:
    left_s: float  # of it, if it were alone
    is_decode: bool
    ended: Callable[[], object]
    rate: float = 1.0
    since_s: float = 0.0
    turn: int = 0


class Host:
    """Owns the steps under way on a machine."""

    def __init__(self, clock: Clock, crowd: Crowd) -> None:
        self._clock = clock
        self._crowd = crowd
        self._steps: dict[_Step, None] = {}

    @property
    def is_shared(self) -> bool:
        """Whether steps slow each other."""
        return self._crowd != Crowd()

    def begin(self, seconds: float, is_decode: bool, ended: Callable[[], object]) -> None:
        """Begin a step that takes so long alone; `ended` is called at its end."""
        self._steps[_Step(seconds, is_decode, ended, rate=0.0, since_s=self._clock.now)] = None
        self._share()

    def _share(self) -> None:
        decodes = sum(step.is_decode for step in self._steps)
        prompts = len(self._steps) - decodes
        for step in self._steps:
            own = step.is_decode, not step.is_decode
            rate = 1 / self._crowd.slowdown(step.is_decode, decodes - own[0], prompts - own[1])
            if rate != step.rate:
                step.left_s -= (self._clock.now - step.since_s) * step.rate
                step.rate, step.since_s, step.turn = rate, self._clock.now, step.turn + 1
                self._clock.after(max(0.0, step.left_s) / rate, self._end, step, step.turn)

    def _end(self, step: _Step, turn: int) -> None:
        if turn != step.turn:
            return
        del self._steps[step]
        self._share()
        step.ended()
