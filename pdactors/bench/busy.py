"""`CPUMeter`: how much of a core each process used over a while."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

import psutil


class CPUMeter:
    """Starts when it is made; `shares` reads it. A process that ends meanwhile is left out.

    `pids` are by name. Shares are of one core: 1.0 is a core kept busy, and threads may add up to more.
    """

    def __init__(self, pids: Mapping[str, int]) -> None:
        self._processes: dict[str, psutil.Process] = {}
        for name, pid in pids.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                self._processes[name] = psutil.Process(pid)
        self._began = self._used_s()
        self._began_s = time.monotonic()

    def shares(self) -> dict[str, float]:
        """Return the share of a core that each process used since the beginning."""
        seconds = max(time.monotonic() - self._began_s, 1e-9)
        return {name: round((used - self._began[name]) / seconds, 3) for name, used in self._used_s().items()}

    def _used_s(self) -> dict[str, float]:
        used = {}
        for name, process in self._processes.items():
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            used[name] = times.user + times.system
        return used
