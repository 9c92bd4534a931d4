"""The router: where actors join and requests are placed. What to do is decided in policy/dispatch.py."""

from __future__ import annotations

import asyncio
import os
from typing import BinaryIO

import msgspec

from pdactors.actors.actor import GATEWAY, Actor
from pdactors.actors.spec import ENGINES, ActorSpec
from pdactors.actors.surveys import Surveys
from pdactors.errors import ConfigError, PDError
from pdactors.kv.prefix import cache_key
from pdactors.messages import (
    Adopted,
    Answered,
    CacheChanged,
    Cancel,
    Decode,
    Drain,
    DrainActor,
    EnginesStarted,
    Exited,
    Failed,
    Fence,
    Finished,
    Fleet,
    Generate,
    Heartbeat,
    Hello,
    Load,
    Member,
    Message,
    Migrate,
    Migrated,
    Pinned,
    Prefill,
    Prefilled,
    Rejected,
    Report,
    Resume,
    Retire,
    Retired,
    Scale,
    StartEngines,
    State,
    Stranded,
)
from pdactors.observe.trail import clock_id
from pdactors.policy.admission import Limits
from pdactors.policy.clocks import Clocks
from pdactors.policy.dispatch import Dispatcher
from pdactors.policy.liveness import Liveness
from pdactors.policy.recording import record
from pdactors.policy.scaling import Crew
from pdactors.policy.tasks import Order
from pdactors.transport import Peer, Transport


class Router(Actor):
    role = "router"

    def __init__(self, spec: ActorSpec, transport: Transport) -> None:
        super().__init__(spec, transport)
        config = spec.config
        self.members: dict[str, Member] = {}
        self.dispatcher = Dispatcher(
            Limits.of(
                config,
                max_model_len=spec.model.max_model_len,
                prefix_key=cache_key(spec.model.fingerprint, spec.layout.fingerprint),
                layout=spec.layout.fingerprint,
            )
        )
        self._record: BinaryIO | None = None
        if config.router.record:
            self._record = _open_record(f"{config.router.record}-{spec.incarnation}")
            record(self.dispatcher, self._record.write)
        self.liveness = Liveness(config.router.dead_after_ms / 1000)
        self._given_up: dict[str, int] = {}  # incarnations of actors that were lost with their node
        self._is_draining = False
        self._draining: set[str] = set()  # engines that get no new work
        self._scaling: dict[int, tuple[Member, str]] = {}  # questions under way: who asked, and the node
        self.clocks = Clocks(clock_id())
        self._surveys = Surveys(self)
        self.accept(Heartbeat, self._on_heartbeat, "gateway", "migrator", "supervisor", *ENGINES)
        self.accept(Exited, self._on_exited, "supervisor")
        self.accept(DrainActor, self._on_drain_actor, "gateway")
        self.accept(Scale, self._on_scale, "gateway")
        self.accept(EnginesStarted, self._on_engines_started, "supervisor")
        self.accept(Drain, self._on_drain, "supervisor")
        self.accept(Generate, self._on_generate, "gateway")
        self.accept(Resume, self._on_resume, "gateway")
        self.accept(Cancel, self._on_cancel, "gateway")
        self.accept(CacheChanged, self._on_cache_changed, "migrator", *ENGINES)
        self.accept(Pinned, self._on_pinned, "migrator", *ENGINES)
        self.accept(Migrated, self._on_migrated, "migrator")
        self.accept(Stranded, self._on_stranded, "migrator")
        self.accept(Prefilled, self._on_prefilled, "prefill", "migrator")
        self.accept(Adopted, self._on_adopted, "decode")
        self.accept(Finished, self._on_finished, *ENGINES)
        self.accept(Failed, self._on_failed, *ENGINES)

    def open(self) -> None:
        fd = self.spec.fds.control
        self.listen(self.spec.control, fd=fd if fd >= 0 else None)
        self.every(self.spec.config.router.heartbeat_ms / 1000, self._tick)

    def beat(self) -> None:
        """Tell everyone who is in the cluster: the router's own sign of life."""
        me = msgspec.structs.replace(self.me(), state=self.state)
        fleet = Fleet(
            self.spec.config.cluster.mode,
            (me, *self.members.values()),
            len(self.dispatcher.requests),
            self._is_draining,
            self.dispatcher.requests.num_unplaced,
            self.clock(),
        )
        for name in self.members:
            self.tell(name, fleet)

    def report(self) -> Report:
        dropped = dict(self.dropped + self.dispatcher.dropped)
        return msgspec.structs.replace(super().report(), requests=tuple(self.dispatcher.requests), dropped=dropped)

    def load(self) -> Load:
        requests = self.dispatcher.requests.values()
        return Load(running=len(requests), waiting=sum(r.stage in ("queued", "held", "waiting") for r in requests))

    async def close(self) -> None:
        self.beat()  # where the run ends, others hear of it
        if self._record is not None:
            self._record.close()

    # ---- The fleet --------

    def _objection(self, peer: Peer, hello: Hello) -> str | None:
        member = hello.member
        if (reason := super()._objection(peer, hello)) is not None:
            return reason
        racks = {node.name: node.rack for node in self.spec.config.node}
        if member.node not in racks:
            return f"node: theirs is {member.node}, ours are {', '.join(racks)}"
        if member.rack != racks[member.node]:
            return f"rack of {member.node}: theirs is {member.rack}, ours is {racks[member.node]}"
        if member.incarnation <= self._given_up.get(member.name, -1):
            return f"incarnation {member.incarnation} was given up, since its node was silent"
        return None

    def joined(self, member: Member) -> None:
        former = self.members.get(member.name)
        if former is not None and former.incarnation == member.incarnation:  # it said Hello again
            return
        if former is not None and member.role == "supervisor":
            del self.members[member.name]
            self._lose_node(member.node, "it was launched again")
        elif former is not None:
            self.liveness.forget(member.name)
            self._perform(self.dispatcher.lost(member.name, self.clock()))
        if member.role == "supervisor":
            self.liveness.heard(member.name, self.clock())
        self.members[member.name] = member
        self.log.info("actor joined", peer=member.name, pid=member.pid)
        self.beat()

    def _forget(self, member: Member) -> None:
        """Go on without an actor that is dead."""
        del self.members[member.name]
        self.liveness.forget(member.name)
        self.clocks.forget(member.name)
        self.dismiss(member.name)
        self.beat()  # first: whoever is told to do something in its stead knows that it is gone
        self._perform(self.dispatcher.lost(member.name, self.clock()))

    def _lose_node(self, node: str, reason: str) -> None:
        """Go on without a node whose supervisor is gone. Its actors end with it; if one does not, it is refused."""
        self.log.warning("node lost", peer=node, reason=reason)
        for member in [m for m in self.members.values() if m.node == node]:
            if member.role != "supervisor":  # which may come back, and starts the others anew
                self._given_up[member.name] = member.incarnation
            self._draining.discard(member.name)
            self._forget(member)
        for query in [query for query, (_, other) in self._scaling.items() if other == node]:
            asker, _ = self._scaling.pop(query)
            self._answer_query(asker, Answered(query, error=f"{node} was lost"))
        self.beat()

    def _on_heartbeat(self, sender: Member, message: Heartbeat) -> None:
        now = self.clock()
        known = self.members.get(sender.name)
        if known is None:
            return self.drop("heartbeat of the lost", sender=sender.name)
        if message.echo is not None:
            self.clocks.heard(sender.name, message.echo, now)
        if message.state != "starting" or sender.role == "supervisor":  # starting may take an actor longer than death
            self.liveness.heard(sender.name, now)
        state: State = "draining" if sender.name in self._draining and message.state == "ready" else message.state
        if known.state != state:
            self.members[sender.name] = msgspec.structs.replace(known, state=state)
            self.beat()
        if sender.role in ENGINES:
            self._perform(self.dispatcher.joined(self.members[sender.name], message.load, now))
        elif sender.role == "migrator" and state == "ready":
            self._perform(self.dispatcher.migrator_ready(self.members[sender.name], now))
        return None

    def _tick(self) -> None:
        now = self.clock()
        for name in self.liveness.silent(now):
            self._fence(name)
        self._perform(self.dispatcher.tick(now))
        self.dispatcher.check()
        self._retire_idle()
        self._surveys.mind(now)

    def _fence(self, name: str) -> None:
        """Have a silent actor killed; it is lost when its supervisor says that it is dead."""
        member = self.members.get(name)
        reason = f"silent for {self.spec.config.router.dead_after_ms} ms"
        if member is None or member.role == "supervisor":
            self.liveness.forget(name)
            if member is not None and member.node != self.spec.node:
                self._lose_node(member.node, reason)
            return
        self.log.error("actor is silent", peer=name, reason=reason)
        for other in self.members.values():
            if other.role == "supervisor" and other.node == member.node:
                if self.tell(other.name, Fence(name, member.incarnation, reason)):
                    self.liveness.forget(name)

    def _on_exited(self, _sender: Member, message: Exited) -> None:
        member = self.members.get(message.name)
        if member is None or member.incarnation != message.incarnation:
            return self.drop("exit of the unknown", name=message.name)
        if member.role == "supervisor":
            return self._lose_node(member.node, "it left")
        self._forget(member)
        if message.is_final:
            self._draining.discard(message.name)
            self.log.info("actor retired", peer=message.name)
            self.tell(f"{member.node}/migrator", Retired(member.slot))
        else:
            self.log.warning("actor lost", peer=message.name)
        return self.beat()

    def _on_drain(self, sender: Member, _message: Drain) -> None:
        if sender.node == self.spec.node:
            self._is_draining = True
        else:
            for member in [m for m in self.members.values() if m.node == sender.node and m.role in ENGINES]:
                self._drain_engine(member)
            self._retire_idle()
        self.beat()

    # ---- Fewer and more engines --------

    def _on_drain_actor(self, sender: Member, message: DrainActor) -> None:
        if error := self._crew().drain_objection(message.name):
            return self._answer_query(sender, Answered(message.query, error=error))
        self._drain_engine(self.members[message.name])
        return self._answer_query(sender, Answered(message.query, draining=(message.name,)))

    def _on_scale(self, sender: Member, message: Scale) -> None:
        crew, config = self._crew(), self.spec.config
        here = [m for m in crew.engines(message.role, "ready", "starting") if m.node == message.node]
        roles = ("prefill", "decode") if config.is_separated else ("worker",)
        error = crew.scale_objection(message, roles, config.cluster.mode)
        if not error and any(node == message.node for _, node in self._scaling.values()):
            error = f"{message.node} is being scaled; ask again once that is done"
        if error:
            return self._answer_query(sender, Answered(message.query, error=error))
        if message.count > len(here):
            missing = message.count - len(here)
            if self.tell(
                f"{message.node}/supervisor", StartEngines(message.query, message.node, message.role, missing)
            ):
                self._scaling[message.query] = sender, message.node
                return None
            return self._answer_query(sender, Answered(message.query, error=f"{message.node} cannot be reached"))
        surplus = sorted(here, key=lambda m: (m.state != "ready", m.slot))[message.count :]
        for member in surplus:
            self._drain_engine(member)
        return self._answer_query(sender, Answered(message.query, draining=tuple(m.name for m in surplus)))

    def _on_engines_started(self, _sender: Member, message: EnginesStarted) -> None:
        if message.query not in self._scaling:
            return self.drop("late answer")
        asker, _ = self._scaling.pop(message.query)
        return self._answer_query(asker, Answered(message.query, started=message.names, error=message.error))

    def _answer_query(self, asker: Member, answer: Answered) -> None:
        self.tell(asker.name, answer)

    def _crew(self) -> Crew:
        return Crew(self.members, self._draining, can_migrate=self.dispatcher.limits.can_migrate)

    def _drain_engine(self, member: Member) -> None:
        self._draining.add(member.name)
        self.members[member.name] = msgspec.structs.replace(member, state="draining")
        engine = self.dispatcher.fleet.engines.get(member.name)
        load = engine.load if engine is not None else Load()
        self._perform(self.dispatcher.joined(self.members[member.name], load, self.clock()))
        self.beat()

    def _retire_idle(self) -> None:
        """End the drained engines that no request needs any more."""
        for name in list(self._draining):
            member = self.members.get(name)
            if member is not None and self.dispatcher.is_idle(name):
                self.tell(f"{member.node}/supervisor", Retire(name, member.incarnation))

    # ---- Requests --------

    def _on_generate(self, sender: Member, message: Generate) -> None:
        now = self.clock()
        self._perform(self.dispatcher.generate(sender.name, message, now))
        if message.deadline_s is not None:  # which may be nearer than the next tick
            asyncio.get_running_loop().call_later(message.deadline_s - now + 0.001, self._overdue, message.request)

    def _overdue(self, request: str) -> None:
        if request in self.dispatcher.requests:
            self._perform(self.dispatcher.tick(self.clock()))

    def _on_resume(self, sender: Member, message: Resume) -> None:
        self._perform(self.dispatcher.resume(sender.name, message, self.clock()))

    def _on_cancel(self, _sender: Member, message: Cancel) -> None:
        self._perform(self.dispatcher.cancel(message, self.clock()))

    def _on_cache_changed(self, sender: Member, message: CacheChanged) -> None:
        self.dispatcher.cache_changed(sender.name, message)

    def _on_pinned(self, sender: Member, message: Pinned) -> None:
        self._perform(self.dispatcher.pinned(sender.name, message, self.clock()))

    def _on_prefilled(self, sender: Member, message: Prefilled) -> None:
        self._perform(self.dispatcher.prefilled(sender.name, message, self.clock()))

    def _on_migrated(self, sender: Member, message: Migrated) -> None:
        self._perform(self.dispatcher.migrated(sender.name, message, self.clock()))

    def _on_stranded(self, sender: Member, message: Stranded) -> None:
        self.log.warning("migration failed", request=message.request, peer=sender.name, reason=message.reason)
        self._perform(self.dispatcher.stranded(sender.name, message, self.clock()))

    def _on_adopted(self, sender: Member, message: Adopted) -> None:
        self._perform(self.dispatcher.adopted(sender.name, message))

    def _on_finished(self, sender: Member, message: Finished) -> None:
        self._perform(self.dispatcher.finished(sender.name, message, self.clock()))

    def _on_failed(self, sender: Member, message: Failed) -> None:
        self.log.warning("request failed", request=message.request, peer=sender.name, reason=message.message)
        self._perform(self.dispatcher.failed(sender.name, message, self.clock()))

    def failed(self, message: Message, error: Exception) -> None:
        """End the request that a failed message was about, here and at the gateway."""
        request = getattr(message, "request", None)
        if request is not None:
            code = error.code if isinstance(error, PDError) else "internal"
            self.tell(GATEWAY, Rejected(request, code, f"{self.spec.name}: {error}"))
            self._perform(self.dispatcher.cancel(Cancel(request), self.clock()))

    def _perform(self, orders: list[Order]) -> None:
        for move in self.dispatcher.requests.drain_moves():
            detail = {name: text for name, text in (("at", move.engine), ("why", move.why)) if text}
            self.trail.note(move.request, move.stage or "gone", self.clock(), None, move.attempt, **detail)
        for to, message in orders:
            if self.tell(to, message):
                self.counts["retries"] += isinstance(message, Prefill) and message.attempt > 1
            elif isinstance(message, Prefill | Decode | Migrate):
                self._perform(self.dispatcher.undelivered(to, message, self.clock()))
        if self._is_draining and not self.dispatcher.requests:
            self.beat()


def _open_record(path: str) -> BinaryIO:
    """Open a new file for what the router is told, which has prompts in it: nobody else may read it.

    Raises:
        ConfigError: it is there already, or cannot be made.
    """
    try:
        return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0)
    except OSError as error:
        raise ConfigError(f'router.record = "{path}": {error.strerror}') from error
