"""`Network`: transfers that share links. Each gets the least of its even shares of what it passes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from pdactors.sim.clock import Clock


@dataclass(eq=False)
class _Flow:
    left: float  # bytes
    passes: tuple[Hashable, ...]
    done: Callable[[], object]
    rate: float = 0.0
    since_s: float = 0.0
    turn: int = 0  # counts changes of rate, so that an end that was foretold earlier is not believed


@dataclass
class _Resource:
    bytes_s: float
    flows: dict[_Flow, None] = field(default_factory=dict)


class Network:
    """Owns the transfers under way. Shares change when one begins or ends at something that they pass."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._resources: dict[Hashable, _Resource] = {}

    def add(self, name: Hashable, bytes_s: float) -> None:
        """Make something known that transfers pass: a port, a rack's uplink."""
        self._resources[name] = _Resource(bytes_s)

    def send(
        self, num_bytes: float, passes: tuple[Hashable, ...], latency_s: float, done: Callable[[], object]
    ) -> None:
        """Begin a transfer; `done` is called when its last byte has arrived."""
        flow = _Flow(num_bytes, passes, lambda: self._clock.after(latency_s, done), since_s=self._clock.now)
        for name in passes:
            self._resources[name].flows[flow] = None
        self._share(flow)

    def _share(self, changed: _Flow) -> None:
        """Give all that pass what `changed` passes their new rates."""
        for flow in {flow: None for name in changed.passes for flow in self._resources[name].flows}:
            rate = min(self._resources[name].bytes_s / len(self._resources[name].flows) for name in flow.passes)
            if rate != flow.rate:
                flow.left -= (self._clock.now - flow.since_s) * flow.rate
                flow.rate, flow.since_s, flow.turn = rate, self._clock.now, flow.turn + 1
                self._clock.after(max(0.0, flow.left) / rate, self._end, flow, flow.turn)

    def _end(self, flow: _Flow, turn: int) -> None:
        if turn != flow.turn:
            return
        flow.turn += 1
        for name in flow.passes:
            del self._resources[name].flows[flow]
        self._share(flow)
        flow.done()
