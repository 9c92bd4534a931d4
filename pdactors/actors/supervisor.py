"""The supervisor of a node: starts its actors, watches, fences and restarts them, and ends them in order.

Its process holds what must outlive a single actor: the arena and the listening sockets.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Sequence

import msgspec

from pdactors.actors.actor import ROUTER, Actor
from pdactors.actors.blueprint import ENGINE_OVERHEAD_BYTES, SPARE_SLOTS, check_room
from pdactors.actors.discovery import ReadyActor
from pdactors.actors.process import Nursery, Process, become_subreaper, spawn_actor
from pdactors.actors.spec import ENGINES, ActorSpec
from pdactors.config.memory import available_bytes, format_size
from pdactors.errors import ConnectionLost, PDError
from pdactors.messages import Drain, EnginesStarted, Exited, Fence, Fleet, Member, Retire, Role, StartEngines
from pdactors.policy.liveness import Liveness
from pdactors.transport import Transport

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.2, 10.0
STABLE_AFTER_S = 10.0  # an actor that lived so long starts afresh with its back-off
JOIN_TIMEOUT_S = 10.0  # of engines that are added; who asked for them has it that they count from then on
LAST_WORDS_S = 0.3  # between SIGTERM and SIGKILL
ROUTER_WAIT_S = 60.0  # for a router that may have been launched a little later
ROUTER_GONE_S = 30.0  # more than a restart of the router takes, and most interruptions of a network


class Child:
    """One actor's process, over all its incarnations."""

    def __init__(self, spec: ActorSpec, nursery: Nursery) -> None:
        self.spec = spec
        self.is_retired = False
        self.process: Process | None = None
        self.started_s = 0.0
        self.backoff_s = FIRST_BACKOFF_S
        self._nursery = nursery

    async def start(self) -> None:
        """Start the next incarnation."""
        self.spec = msgspec.structs.replace(self.spec, incarnation=time.time_ns() // 1000)
        self.started_s = time.monotonic()
        if self.spec.role in ENGINES:
            self.process = await self._nursery.fork(self.spec)
        else:
            self.process = spawn_actor(self.spec)

    def send(self, number: signal.Signals) -> None:
        """Signal the process, if it still lives."""
        if self.process is not None:
            self.process.send(number)

    async def ended(self) -> int:
        """Wait until the process is dead and reaped."""
        assert self.process is not None
        return await self.process.ended()


class Supervisor(Actor):
    role = "supervisor"

    def __init__(self, spec: ActorSpec, transport: Transport, children: Sequence[ActorSpec], nursery: Nursery) -> None:
        super().__init__(spec, transport)
        self.hosts_router = any(child.role == "router" for child in children)
        self.is_ready = asyncio.Event()
        self._nursery = nursery
        self._children = {child.name: Child(child, nursery) for child in children}
        self._changed = asyncio.Event()
        self._is_welcome = asyncio.Event()
        self._is_over = False  # the run has ended elsewhere
        dead_after_s = spec.config.router.dead_after_ms / 1000
        self._router = Liveness(dead_after_s if self.hosts_router else max(ROUTER_GONE_S, 5 * dead_after_s))
        self.accept(Fleet, self._on_news, "router")
        self.accept(Fence, self._on_fence, "router")
        self.accept(StartEngines, self._on_start_engines, "router")
        self.accept(Retire, self._on_retire, "router")

    async def start(self) -> None:
        become_subreaper()
        if not self.spec.run_id:
            await self._join()
        for child in list(self._children.values()):
            await child.start()
            self.spawn(self._watch(child))
        if self.hosts_router:
            self.every(self.spec.config.router.heartbeat_ms / 1000, self._mind_router)
        await self._until(self._all_ready)
        self.is_ready.set()

    async def _join(self) -> None:
        """Wait for the router, which another launch runs, and learn from it which run this is.

        Raises:
            ConnectionLost: it does not answer.
        """
        router = self.spec.config.router
        self.log.info("waiting for the router", control=self.spec.control)
        try:
            async with asyncio.timeout(ROUTER_WAIT_S):
                await self._is_welcome.wait()
        except TimeoutError:
            raise ConnectionLost(
                f"no router answered at {self.spec.control} within {ROUTER_WAIT_S:.0f} s; "
                f"is node {router.node} launched, and router.control reachable from here"
                f"{', with the same keys in security.key_dir' if self.spec.keys else ''}?"
            ) from None
        for child in self._children.values():
            child.spec = msgspec.structs.replace(child.spec, run_id=self.spec.run_id)
        self.log.info("joined", run_id=self.spec.run_id)
        self.every(router.heartbeat_ms / 1000, self._mind_router)

    def welcomed(self, host: Member) -> None:
        self._router.heard(ROUTER, self.clock())
        self._is_welcome.set()

    def _mind_router(self) -> None:
        """Kill our own router when it is silent, which nobody else could fence; end without one that is elsewhere."""
        if not self._router.silent(self.clock()):
            return
        if self.hosts_router:
            self.log.error("actor fenced", peer=ROUTER, reason="silent")
            self._router.forget(ROUTER)
            self._children[ROUTER].send(signal.SIGKILL)
        else:
            self.abandon(ConnectionLost(f"run {self.spec.run_id} is over: its router is silent at {self.spec.control}"))

    def abandon(self, error: PDError | None = None) -> None:
        """End at once: there is nobody left to work for."""
        self._is_over = True
        self.stop(error)

    async def close(self) -> None:
        """End the node: drain for a moment, let the gateway say goodbye, then end everyone."""
        if self.is_ready.is_set() and not self._is_over and self._fatal is None:
            self.tell(ROUTER, Drain())
            await self._until(self._is_drained, self.spec.config.cluster.drain_s)
        gateways = [child for child in self._children.values() if child.spec.role == "gateway"]
        others = [child for child in self._children.values() if child not in gateways]
        for children in (gateways, others):
            await self._end(children)
        if not self.hosts_router and not self._is_over:
            self.tell(ROUTER, Exited(self.spec.name, self.spec.incarnation, is_final=True))

    def _is_drained(self) -> bool:
        """Say whether the run is idle or, where the router is elsewhere, whether all engines were retired."""
        if self.hosts_router:
            return self.fleet.is_draining and not self.fleet.num_requests
        return not any(child.spec.role in ENGINES for child in self._children.values())

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
            if child.is_retired:
                del self._children[child.spec.name]
                self.tell(ROUTER, Exited(child.spec.name, child.spec.incarnation, is_final=True))
                self._changed.set()
                return
            if self.state == "stopping" or self._stop.is_set():
                return
            reason = child.process.reason() if child.process is not None else ""
            self.log.error("actor ended", peer=child.spec.name, status=status, reason=reason)
            if not self.is_ready.is_set():
                why = reason or f"it ended with status {status}"
                self.stop(PDError(f"{child.spec.name} could not start: {why}"))
                return
            if child.spec.role == "router":
                self._router.forget(ROUTER)  # it is heard again once its successor has started
            self.tell(ROUTER, Exited(child.spec.name, child.spec.incarnation))
            if time.monotonic() - child.started_s > STABLE_AFTER_S:
                child.backoff_s = FIRST_BACKOFF_S
            await self._restart(child)

    async def _restart(self, child: Child) -> None:
        """Start a successor, again and again with growing pauses where it cannot be started."""
        while True:
            await asyncio.sleep(child.backoff_s)
            child.backoff_s = min(2 * child.backoff_s, MAX_BACKOFF_S)
            if self._stop.is_set():
                return
            try:
                await child.start()
            except PDError as error:  # the nursery was lost, too
                self.log.error("actor not restarted", peer=child.spec.name, reason=error.message)
            else:
                self.log.info("actor restarted", peer=child.spec.name, pid=child.process and child.process.pid)
                return

    def _on_fence(self, _sender: Member, message: Fence) -> None:
        """Kill a silent actor; `_watch` reaps it and tells the router."""
        child = self._children.get(message.name)
        if child is None or child.spec.incarnation != message.incarnation:
            return self.drop("fence of the unknown", name=message.name)
        self.log.error("actor fenced", peer=message.name, reason=message.reason)
        return child.send(signal.SIGKILL)

    # ---- Fewer and more engines --------

    def _on_retire(self, _sender: Member, message: Retire) -> None:
        child = self._children.get(message.name)
        if child is None:  # it is gone already
            self.tell(ROUTER, Exited(message.name, message.incarnation, is_final=True))
            return None
        if child.spec.incarnation != message.incarnation:
            return self.drop("retirement of the unknown", name=message.name)
        child.is_retired = True
        return child.send(signal.SIGTERM)

    def _on_start_engines(self, _sender: Member, message: StartEngines) -> None:
        self.spawn(self._start_engines(message))

    async def _start_engines(self, message: StartEngines) -> None:
        started: list[str] = []
        error = ""
        try:
            for _ in range(message.count):
                child = Child(self._new_engine(message.node, message.role), self._nursery)
                self._children[child.spec.name] = child
                await child.start()
                self.spawn(self._watch(child))
                started.append(child.spec.name)
        except PDError as refused:
            error = refused.message
        await self._until(lambda: {member.name for member in self.fleet.members}.issuperset(started), JOIN_TIMEOUT_S)
        self.tell(ROUTER, EnginesStarted(message.query, tuple(started), error))

    def _new_engine(self, node: str, role: Role) -> ActorSpec:
        """Plan one more engine in the first free slot of a node's arena.

        Raises:
            PDError: there is no slot or no memory for it.
        """
        here = [child.spec for child in self._children.values() if child.spec.node == node]
        migrator = next(spec for spec in here if spec.role == "migrator")
        slots = {spec.slot for spec in here}
        free = [slot for slot in range(migrator.num_engines + SPARE_SLOTS) if slot not in slots]
        if not free:
            raise PDError(f"the arena of {node} has no slot for another engine")
        check_room(migrator, sum(spec.role in ENGINES for spec in here) + 1)
        available = available_bytes()
        if available < ENGINE_OVERHEAD_BYTES:
            raise PDError(
                f"an engine needs {format_size(ENGINE_OVERHEAD_BYTES)}; {format_size(available)} are available"
            )
        names = {spec.name for spec in here}
        name = next(name for i in range(len(here) + 1) if (name := f"{node}/{role}-{i}") not in names)
        return msgspec.structs.replace(migrator, name=name, role=role, slot=free[0], cores=(), ready_file="")

    # ---- Readiness --------

    def _on_news(self, sender: Member, fleet: Fleet) -> None:
        self._on_fleet(sender, fleet)
        self._changed.set()
        self._router.heard(ROUTER, self.clock())
        is_ending = fleet.is_draining and any(m.role == "router" and m.state == "stopping" for m in fleet.members)
        if is_ending and not self.hosts_router:
            self.abandon()

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

    def actors(self) -> list[ReadyActor]:
        """Return the node's processes, as far as the router knows them."""
        known = [member for member in self.fleet.members if member.name in self._children]
        return [ReadyActor(m.name, m.role, m.node, m.rack, m.pid) for m in known]
