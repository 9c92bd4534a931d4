"""`Trail`: what an actor notes of the last requests, so that it can tell when asked. No message leaves for it.

A decode step is noted once, whatever its batch; a request keeps the numbers of the steps that it took part in.
"""

from __future__ import annotations

import os
import socket
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pdactors.stamps import Detail, Stamp, Stamps, Steps

MAX_STAMPS = 4096  # of one request at one actor
MAX_WRITES = 65_536


def clock_id() -> str:
    """Name the clock that this process reads: processes with the same name read the same CLOCK_MONOTONIC."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/time')}"
    except OSError:  # a sandbox that does not tell: then it is measured
        return f"{socket.gethostname()}/{os.getpid()}"


@dataclass(slots=True)
class _Record:
    stamps: list[Stamp] = field(default_factory=list)
    runs: list[int] = field(default_factory=list)  # of step numbers: first, past the last, first, ...
    written_s: array[float] = field(default_factory=lambda: array("d"))
    num_lost: int = 0


class Trail:
    """The last `num_requests` requests that there was news of, and the last `num_steps` decode steps; 0: none."""

    def __init__(self, num_requests: int, num_steps: int = 0) -> None:
        self._num_requests = num_requests
        self._records: OrderedDict[str, _Record] = OrderedDict()
        self._num_steps = 0
        self._began_s = array("d", bytes(8 * num_steps))
        self._ended_s = array("d", bytes(8 * num_steps))
        self._batch = array("L", bytes(8 * num_steps))

    def __iter__(self) -> Iterator[str]:
        """Go through the requests, from the one whose news are oldest."""
        return iter(tuple(self._records))

    def note(
        self, request: str, what: str, at_s: float, until_s: float | None = None, attempt: int = 1, /, **detail: Detail
    ) -> None:
        """Note a moment, or with `until_s` a span."""
        record = self._record(request)
        if record is None:
            return
        if len(record.stamps) < MAX_STAMPS:
            record.stamps.append(Stamp(what, at_s, until_s, attempt, detail))
        else:
            record.num_lost += 1

    def written(self, request: str, at_s: float) -> None:
        """Note that a token was written to its client."""
        record = self._record(request)
        if record is None:
            return
        if len(record.written_s) < MAX_WRITES:
            record.written_s.append(at_s)
        else:
            record.num_lost += 1

    def step(self, requests: Iterable[str], began_s: float, ended_s: float, batch: int) -> None:
        """Note a decode step, and who took part in it."""
        if not self._num_requests or not self._batch:
            return
        number = self._num_steps
        place = number % len(self._batch)
        self._began_s[place], self._ended_s[place], self._batch[place] = began_s, ended_s, batch
        self._num_steps = number + 1
        for request in requests:
            record = self._record(request)
            if record is None:
                continue
            if record.runs and record.runs[-1] == number:
                record.runs[-1] = number + 1
            else:
                record.runs += (number, number + 1)

    def of(self, request: str) -> Stamps | None:
        """Return what is known of a request; None if nothing is."""
        record = self._records.get(request)
        if record is None:
            return None
        size, oldest = len(self._batch), self._num_steps - len(self._batch)
        numbers = [
            number for first, stop in zip(record.runs[::2], record.runs[1::2], strict=True)
            for number in range(first, stop)
        ]  # fmt: skip
        places = [number % size for number in numbers if number >= oldest]
        steps = Steps(
            tuple(self._began_s[i] for i in places),
            tuple(self._ended_s[i] for i in places),
            tuple(self._batch[i] for i in places),
        )
        num_lost = record.num_lost + len(numbers) - len(places)
        return Stamps(tuple(record.stamps), steps, tuple(record.written_s), num_lost)

    def _record(self, request: str) -> _Record | None:
        """Find or begin a request's record, and let the one go that there was no news of for longest."""
        record = self._records.get(request)
        if record is not None:
            self._records.move_to_end(request)
            return record
        if not self._num_requests:
            return None
        record = self._records[request] = _Record()
        if len(self._records) > self._num_requests:
            self._records.popitem(last=False)
        return record
