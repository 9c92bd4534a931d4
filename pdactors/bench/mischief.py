"""`Mischief`: hurts the actors of a cluster on this machine, at random from a seed, and notes what it did."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from typing import Any, cast

import psutil
from msgspec import Struct

from pdactors.actors.remains import is_actor
from pdactors.client import AsyncClient
from pdactors.errors import PDError
from pdactors.messages import Role
from pdactors.policy.scaling import ENGINES

KINDS = ("kill", "kill", "stop", "pause", "restart", "drain", "cut")
PAUSE_S = (0.5, 5.0)  # between two deeds
ASK_TIMEOUT_S = 10.0


class Deed(Struct, frozen=True):
    """What was done to whom, seconds after the beginning; `error` says why it was not."""

    at_s: float
    kind: str
    actor: str
    error: str = ""


class Mischief:
    """`kill` and `restart` end a process at once or by SIGTERM; `stop` holds it until it is given up, `pause` for less.

    `drain` has another engine of that role and node started first. `cut` drops every TCP connection of a process, as a
    network may, with what is under way on it; the kernel lets root do that.
    """

    def __init__(self, run_id: str, address: str, token: str, dead_after_s: float, seed: int) -> None:
        self.deeds: list[Deed] = []
        self._run_id = run_id
        self._address = address
        self._token = token
        self._dead_after_s = dead_after_s
        self._random = random.Random(seed)  # noqa: S311 - nothing secret
        self._began = time.monotonic()

    async def go_on(self, seconds: float) -> None:
        """Do one thing after the other for so long; what was held goes on at the end."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as held:
                while True:
                    await asyncio.sleep(self._random.uniform(*PAUSE_S))
                    await self._do(self._random.choice(KINDS), held)

    async def _do(self, kind: str, held: asyncio.TaskGroup) -> None:
        names = await self._names()
        victims = list(self._processes())
        if kind == "drain":
            name = self._random.choice(
                [name for name in names.values() if name.rpartition("/")[2].startswith(ENGINES)] or [""]
            )
            error = await self._replace(name) if name else "no engine is known"
        elif victims:
            process = self._random.choice(victims)
            name = names.get(process.pid, f"process {process.pid}")
            error = self._hurt(kind, process, held)
        else:
            return
        self.deeds.append(Deed(round(time.monotonic() - self._began, 2), kind, name, error))

    def _hurt(self, kind: str, process: psutil.Process, held: asyncio.TaskGroup) -> str:
        """Signal a process; return why it could not be done."""
        try:
            if kind == "cut":
                return cut(process)
            if kind in ("stop", "pause"):
                process.send_signal(signal.SIGSTOP)
                longest = self._dead_after_s * (2.5 if kind == "stop" else 0.5)
                held.create_task(_go_on_after(process, self._random.uniform(0.5, 1.0) * longest))
            else:
                process.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGTERM)
        except psutil.Error as error:
            return str(error)
        return ""

    def _processes(self) -> Iterator[psutil.Process]:
        """Yield this run's processes, the nursery too."""
        for process in psutil.process_iter(["cmdline"]):
            arguments = process.info["cmdline"] or []
            if is_actor(arguments) and arguments[-2] == self._run_id:
                yield process

    async def _names(self) -> dict[int, str]:
        """Return the actors' names by process, as far as they can be asked for now."""
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S), AsyncClient(self._address, token=self._token) as client:
                return {actor["pid"]: actor["name"] for actor in (await client.status())["actors"]}
        except (PDError, TimeoutError):
            return {}

    async def _replace(self, name: str) -> str:
        """Start another engine of that role and node, and drain this one; return why it could not be done."""
        node, _, engine = name.partition("/")
        role = cast(Role, engine.partition("-")[0])
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S), AsyncClient(self._address, token=self._token) as client:
                actors = (await client.status())["actors"]
                alike = [a for a in actors if (a["node"], a["role"]) == (node, role) and a["state"] != "draining"]
                await client.scale(node, role, len(alike) + 1)
                await client.drain(name)
        except (PDError, TimeoutError) as error:
            return str(error) or "no answer"
        return ""


def cut(process: psutil.Process) -> str:
    """Have the kernel drop a process's TCP connections; return why it could not be done."""
    if shutil.which("ss") is None:
        return "connections are dropped by `ss`, which is not installed (iproute2)"
    for one in process.net_connections("tcp"):
        if one.raddr:
            ends = ["src", _end(one.laddr), "dst", _end(one.raddr)]
            done = subprocess.run(["ss", "-K", "-t", *ends], capture_output=True, text=True, check=False)  # noqa: S603, S607
            if done.returncode:
                return done.stderr.strip()
    return ""


def _end(address: Any) -> str:
    return f"[{address.ip}]:{address.port}" if ":" in address.ip else f"{address.ip}:{address.port}"


async def _go_on_after(process: psutil.Process, seconds: float) -> None:
    try:
        await asyncio.sleep(seconds)
    finally:
        with contextlib.suppress(psutil.Error):
            process.send_signal(signal.SIGCONT)
