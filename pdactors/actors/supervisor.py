"""The supervisor of a machine: starts its actors, watches, fences and restarts them, and ends them in order.

It holds what must outlive a single actor: the arenas and the listening sockets.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence

import msgspec

from pdactors.actors.actor import ROUTER, Actor
from pdactors.actors.discovery import Ready, ReadyActor, announce
from pdactors.actors.spec import ActorSpec, encode_spec
from pdactors.errors import PDError
from pdactors.messages import Drain, Exited, Fence, Fleet, Member
from pdactors.transport import Transport

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 30.0
STABLE_AFTER_S = 60.0  # an actor that lived so long starts afresh with its back-off
LAST_WORDS_S = 0.3  # between SIGTERM and SIGKILL


class Child:
    """One actor's process, over all its incarnations."""

    def __init__(self, spec: ActorSpec) -> None:
        self.spec = spec
        self.process: asyncio.subprocess.Process | None = None
        self.started_s = 0.0
        self.backoff_s = FIRST_BACKOFF_S

    async def start(self) -> None:
        """Start the next incarnation; its spec travels over its standard input."""
        self.spec = msgspec.structs.replace(self.spec, incarnation=time.time_ns() // 1000)
        self.started_s = time.monotonic()
        fds = [fd for fd in msgspec.structs.astuple(self.spec.fds) if fd >= 0]
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "pdactors.actors",
            self.spec.name,
            self.spec.run_id,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=fds,
            env=self._environment(),
        )
        assert self.process.stdin is not None
        self.process.stdin.write(encode_spec(self.spec))
        self.process.stdin.close()

    def _environment(self) -> dict[str, str]:
        threads = str(self.spec.threads)
        quiet = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "TRANSFORMERS_VERBOSITY": "error"}
        return {**os.environ, **quiet, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}

    def send(self, number: signal.Signals) -> None:
        """Signal the process, if it still lives."""
        if self.process is not None and self.process.returncode is None:
            self.process.send_signal(number)

    async def ended(self) -> int:
        """Wait until the process is dead and reaped."""
        assert self.process is not None
        return await self.process.wait()

    async def reason(self) -> str:
        """Return what the dead process said about its end; "" if nothing."""
        assert self.process is not None
        assert self.process.stdout is not None
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                return " ".join((await self.process.stdout.read()).decode(errors="replace").split())
        except TimeoutError:  # somebody inherited the pipe
            return ""


class Supervisor(Actor):
    role = "supervisor"

    def __init__(
        self,
        spec: ActorSpec,
        transport: Transport,
        children: Sequence[ActorSpec],
        ready: Callable[[Ready], None],
        *,
        addresses: dict[str, str],
    ) -> None:
        super().__init__(spec, transport)
        self._children = {child.name: Child(child) for child in children}
        self._tell_ready = ready
        self._addresses = addresses
        self._changed = asyncio.Event()
        self._server: asyncio.Server | None = None
        self.accept(Fleet, self._on_news, "router")
        self.accept(Fence, self._on_fence, "router")

    async def start(self) -> None:
        for child in self._children.values():
            await child.start()
            self.spawn(self._watch(child))
        await self._until(self._all_ready)
        ready = self._ready()
        self._server = await announce(ready)
        self._tell_ready(ready)

    async def close(self) -> None:
        """End the run: drain for a moment, let the gateway say goodbye, then end everyone."""
        drain_s = self.spec.config.cluster.drain_s
        if self._server is not None:
            self._server.close()
            if self.fleet.num_requests or drain_s:
                self.tell(ROUTER, Drain())
                await self._until(lambda: self.fleet.is_draining and not self.fleet.num_requests, timeout_s=drain_s)
        gateways = [child for child in self._children.values() if child.spec.role == "gateway"]
        others = [child for child in self._children.values() if child not in gateways]
        for children in (gateways, others):
            await self._end(children)

    async def _end(self, children: Sequence[Child]) -> None:
        started = [child for child in children if child.process is not None]
        for child in started:
            child.send(signal.SIGTERM)
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await asyncio.gather(*(child.ended() for child in started))
        except TimeoutError:
            for child in started:
                child.send(signal.SIGKILL)
            await asyncio.gather(*(child.ended() for child in started))

    # ---- Watching --------

    async def _watch(self, child: Child) -> None:
        """Start a successor whenever the actor dies; give up if it dies while the cluster starts."""
        while True:
            status = await child.ended()
            if self.state == "stopping" or self._stop.is_set():
                return
            reason = await child.reason()
            self.log.error("actor ended", peer=child.spec.name, status=status, reason=reason)
            if self._server is None:
                why = reason or f"it ended with status {status}"
                self.stop(PDError(f"{child.spec.name} could not start: {why}"))
                return
            self.tell(ROUTER, Exited(child.spec.name, child.spec.incarnation))
            if time.monotonic() - child.started_s > STABLE_AFTER_S:
                child.backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(child.backoff_s)
            child.backoff_s = min(2 * child.backoff_s, MAX_BACKOFF_S)
            if not self._stop.is_set():
                await child.start()
                self.log.info("actor restarted", peer=child.spec.name, pid=child.process and child.process.pid)

    def _on_fence(self, _sender: Member, message: Fence) -> None:
        """Kill a silent actor; `_watch` reaps it and tells the router."""
        child = self._children.get(message.name)
        if child is None or child.spec.incarnation != message.incarnation:
            return self.drop("fence of the unknown", name=message.name)
        self.log.error("actor fenced", peer=message.name, reason=message.reason)
        return child.send(signal.SIGKILL)

    # ---- Readiness --------

    def _on_news(self, sender: Member, fleet: Fleet) -> None:
        self._on_fleet(sender, fleet)
        self._changed.set()

    def _all_ready(self) -> bool:
        states = {member.name: member.state for member in self.fleet.members}
        return all(states.get(name) == "ready" for name in self._children)

    async def _until(self, condition: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait for news that make `condition` true, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not condition():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass

    def _ready(self) -> Ready:
        known = [member for member in self.fleet.members if member.name in self._children]
        actors = tuple(ReadyActor(m.name, m.role, m.node, m.rack, m.pid) for m in known)
        return Ready(self.spec.run_id, os.getpid(), actors=actors, **self._addresses)
