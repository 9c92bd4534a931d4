"""What every actor is: one process, one mailbox, one loop, one failure rule.

Life: `starting` (open sockets, say Hello, load what it needs) -> `ready` (handle messages) -> `stopping`.

The mailbox is the transport's bounded queue; handlers run on the loop, one at a time, and never wait. The failure
rule: an error while handling a message ends that message's request with a reason and nothing else; an
`InvariantError` (our own books are wrong) ends the actor, loudly, and its supervisor starts a successor.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import msgspec

from pdactors.actors.spec import ENGINES, ActorSpec
from pdactors.config.logging import get_logger
from pdactors.errors import BadRequest, InvariantError, PDError, Refused
from pdactors.messages import (
    PROTOCOL_VERSION,
    Failed,
    Fleet,
    Heartbeat,
    Hello,
    Inspect,
    Inspected,
    Load,
    Member,
    Message,
    Refusal,
    Report,
    Role,
    State,
    Stranger,
    Welcome,
    control_decoder,
    decode,
    encode,
)
from pdactors.observe.trail import Trail, clock_id
from pdactors.stamps import Echo
from pdactors.transport import Busy, Channel, Listener, Peer, PeerGone, Transport
from pdactors.version import VERSION

ROUTER = "router"
GATEWAY = "gateway"

M = TypeVar("M", bound=Message)
Handler = Callable[[Member, Any], None]


class Actor:
    """Base of all actors: who it is, whom it knows, what it accepts from whom."""

    role: ClassVar[Role]

    def __init__(self, spec: ActorSpec, transport: Transport, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.spec = spec
        self.clock = clock
        self.log = get_logger(actor=spec.name, node=spec.node)
        self.state: State = "starting"
        self.fleet = Fleet(spec.config.cluster.mode, ())
        self.dropped: Counter[str] = Counter()
        self.counts: Counter[str] = Counter()
        self.trail = Trail(spec.config.trace.requests, spec.config.trace.steps if spec.role in ENGINES else 0)
        self.listener: Listener | None = None
        self._transport = transport
        self._handlers: dict[type[Message], tuple[Handler, frozenset[Role]]] = {}
        self._peers: dict[Peer, Member] = {}  # admitted on our listener
        self._peer_of: dict[str, Peer] = {}
        self._channels: dict[str, Channel] = {}  # opened by us
        self._targets: dict[str, Member] = {}  # whom the fleet's news made us open them to
        self._hosts: dict[str, Member] = {}  # who welcomed us on them
        self._router_known = -1  # incarnation of the router that took us in
        self._clock_id = clock_id()
        self._news: tuple[float, float] | None = None  # what the router's last ones said, and when they came
        self._stop = asyncio.Event()
        self._fatal: BaseException | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self.accept(Fleet, self._on_fleet, "router")
        self.accept(Inspect, self._on_inspect, "router")

    # ---- For the children to override --------

    async def start(self) -> None:
        """Load what the actor needs; it is ready when this returns."""

    async def close(self) -> None:
        """Let go of what `start` opened."""

    def wants(self, member: Member) -> bool:
        """Say whether this actor opens a channel to `member`."""
        return False

    def joined(self, member: Member) -> None:
        """A peer was admitted on our listener."""

    def welcomed(self, host: Member) -> None:
        """A peer that we connected to took us in; it may do so again, and under another incarnation."""

    def router_changed(self) -> None:
        """The router was lost, and another one took us in: it knows nothing of what its predecessor had us do."""

    def load(self) -> Load:
        """What there is to do here."""
        return Load()

    def report(self) -> Report:
        """Account for everything, for `status` and `leaks`."""
        spec = self.spec
        return Report(
            name=spec.name,
            role=self.role,
            node=spec.node,
            rack=spec.rack,
            state=self.state,
            pid=os.getpid(),
            incarnation=spec.incarnation,
            load=self.load(),
            dropped=dict(self.dropped),
            counts=dict(self.counts),
        )

    # ---- Talking --------

    def accept(self, kind: type[M], handler: Callable[[Member, M], None], *roles: Role) -> None:
        """Handle messages of `kind` from peers of these roles; from anyone else they are dropped."""
        self._handlers[kind] = (handler, frozenset(roles))

    def tell(self, name: str, message: Message) -> bool:
        """Send without waiting; False (counted and logged) when that actor is not connected or does not read."""
        try:
            if name in self._channels:
                self._channels[name].send(encode(message))
            elif name in self._peer_of and self.listener is not None:
                self.listener.send(self._peer_of[name], encode(message))
            else:
                raise PeerGone(f"{name} is not connected")
        except (PeerGone, Busy) as error:
            self.dropped["unsent"] += 1
            self.log.debug("message not sent", to=name, message=type(message).__name__, reason=str(error))
            return False
        return True

    def is_welcome(self, name: str) -> bool:
        """Say whether the actor that we connected to took us in."""
        return name in self._hosts

    def drop(self, why: str, **context: object) -> None:
        """Count what is late, duplicate, unknown or malformed; never fatal."""
        self.dropped[why] += 1
        self.log.debug("message dropped", why=why, **context)

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        """Run a task whose failure ends the actor."""
        assert self._tasks is not None
        return self._tasks.create_task(coroutine)

    def soon(self, action: Callable[[], None]) -> None:
        """Call `action` once whatever is handled now has been."""
        asyncio.get_running_loop().call_soon(action)

    def every(self, period_s: float, action: Callable[[], None]) -> None:
        """Call `action` about every `period_s`."""

        async def repeat() -> None:
            while True:
                await asyncio.sleep(period_s)
                action()

        self.spawn(repeat())

    # ---- Life --------

    async def run(self) -> None:
        """Live until `stop()`.

        Raises:
            InvariantError: the actor's books are wrong.
            Refused: the cluster does not take this actor.
            Exception: whatever else ended one of its tasks.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                self.open()
                self.every(self.spec.config.router.heartbeat_ms / 1000, self.beat)
                starting = tasks.create_task(self._start())
                await self._stop.wait()
                starting.cancel()
                self.state = "stopping"
                await self.close()
                raise _Stopped
        except BaseExceptionGroup as group:
            _, failures = group.split(_Stopped)
            if failures is not None:
                self._fatal = self._fatal or _first(failures)
        finally:
            self._transport.close()
        if self._fatal is not None:
            raise self._fatal

    def stop(self, error: BaseException | None = None) -> None:
        """End the actor; with `error` it ends by raising it."""
        self._fatal = self._fatal or error
        self._stop.set()

    def open(self) -> None:
        """Open the channel to the router; the router itself overrides this."""
        self.connect(ROUTER, self.spec.control)

    async def _start(self) -> None:
        try:
            await self.start()
        except PDError as error:
            return self.stop(error)
        self.state = "ready"
        self.beat()

    def beat(self) -> None:
        """Tell the router that we live, and what there is to do."""
        if ROUTER in self._hosts:
            echo = None if self._news is None else Echo(self._clock_id, *self._news, self.clock())
            self.tell(ROUTER, Heartbeat(self.state, self.load(), echo))
        else:
            self._introduce(ROUTER)

    # ---- Our listener --------

    def listen(self, address: str, *, fd: int | None = None) -> None:
        """Listen for other actors."""
        self.listener = self._transport.listen(address, self._on_listener, fd=fd)

    def _on_listener(self, peer: Peer, frames: list[bytes]) -> None:
        message = self._decode(frames)
        if isinstance(message, Hello):
            self._admit(peer, message)
        elif peer in self._peers:
            if message is not None:
                self._handle(self._peers[peer], message)
        else:
            self.drop("stranger", peer=repr(peer[:64]))
            self._answer(peer, Stranger())

    def _admit(self, peer: Peer, hello: Hello) -> None:
        member = hello.member
        reason = self._objection(peer, hello)
        if reason is not None:
            self.log.warning("peer refused", peer=member.name, reason=reason)
            self._answer(peer, Refusal(reason))
            return
        former = self._peer_of.get(member.name)
        if former is not None and former != peer:
            self._peers.pop(former, None)
        self._peers[peer] = member
        self._peer_of[member.name] = peer
        self._answer(peer, Welcome(self.me(), self.spec.run_id))
        self.joined(member)

    def _objection(self, peer: Peer, hello: Hello) -> str | None:
        """Say why a peer is not admitted, with both values; None if it is."""
        spec, member = self.spec, hello.member
        if not hmac.compare_digest(hello.join_token.encode(), spec.join_token.encode()):
            return "join token: wrong or missing"
        expected = [
            ("protocol", hello.protocol, PROTOCOL_VERSION),
            ("version", hello.version, VERSION),
            ("model", hello.model, spec.model.fingerprint),
            ("KV layout", hello.layout, spec.layout.fingerprint),
            ("cluster.mode", hello.mode, spec.config.cluster.mode),
            ("model.max_model_len", hello.max_model_len, spec.model.max_model_len),
            ("run", hello.run_id or spec.run_id, spec.run_id),
            ("identity", peer.decode(errors="replace"), f"{member.name}#{member.incarnation}"),
        ]
        for what, theirs, ours in expected:
            if theirs != ours:
                return f"{what}: theirs is {theirs}, ours is {ours}"
        former = self._peers.get(self._peer_of.get(member.name, b""))
        if former is not None and former.incarnation > member.incarnation:
            return f"incarnation: theirs is {member.incarnation}, ours is {former.incarnation}"
        return None

    def _answer(self, peer: Peer, message: Message) -> None:
        assert self.listener is not None
        try:
            self.listener.send(peer, encode(message))
        except (PeerGone, Busy) as error:
            self.drop("unanswered", reason=str(error))

    def dismiss(self, name: str) -> None:
        """Forget an admitted peer; what it still sends is a stranger's."""
        self._peers.pop(self._peer_of.pop(name, b""), None)

    # ---- Our channels --------

    def connect(self, name: str, address: str) -> None:
        """Open a channel to the actor `name` and introduce ourselves."""
        identity = f"{self.spec.name}#{self.spec.incarnation}".encode()

        def receive(_peer: Peer, frames: list[bytes]) -> None:
            self._on_channel(name, frames)

        self._channels[name] = self._transport.connect(address, identity, receive)
        self._introduce(name)

    def me(self) -> Member:
        """Return how this actor introduces itself."""
        return self.spec.member(os.getpid(), self.listener.address if self.listener is not None else "")

    def _introduce(self, name: str) -> None:
        self.tell(name, self.spec.hello(self.me()))

    def _on_channel(self, name: str, frames: list[bytes]) -> None:
        message = self._decode(frames)
        if isinstance(message, Welcome):
            if not self.spec.run_id:
                self.spec = msgspec.structs.replace(self.spec, run_id=message.run_id)
            self._hosts[name] = message.member
            self.welcomed(message.member)
            if name == ROUTER:
                self.beat()
                former, self._router_known = self._router_known, message.member.incarnation
                if former not in (-1, self._router_known):
                    self.router_changed()
        elif isinstance(message, Refusal):
            self.stop(Refused(f"{name} refuses {self.spec.name}: {message.reason}"))
        elif isinstance(message, Stranger):
            self._hosts.pop(name, None)
            self._introduce(name)
        elif message is not None and name in self._hosts:
            self._handle(self._hosts[name], message)

    def _on_fleet(self, _sender: Member, fleet: Fleet) -> None:
        self.fleet, self._news = fleet, (fleet.sent_s, self.clock())
        for member in fleet.members:
            if not member.address or not self.wants(member):
                continue
            former = self._targets.get(member.name)
            if former is not None and former.incarnation == member.incarnation:
                continue
            if former is not None:  # a successor: start afresh
                self._channels.pop(member.name).abort()
                self._hosts.pop(member.name, None)
            self._targets[member.name] = member
            self.connect(member.name, member.address)

    # ---- Handling --------

    def _decode(self, frames: list[bytes]) -> Message | None:
        try:
            return decode(control_decoder, frames)
        except BadRequest as error:
            self.drop("malformed", reason=error.message)
            return None

    def _handle(self, sender: Member, message: Message) -> None:
        handler, roles = self._handlers.get(type(message), (None, frozenset()))
        if handler is None or sender.role not in roles:
            self.drop("unexpected", message=type(message).__name__, sender=sender.name)
            return
        try:
            handler(sender, message)
        except InvariantError as error:
            self.log.critical("own books are wrong", reason=error.message)
            self.stop(error)
        except PDError as error:
            self.log.info("message refused", message=type(message).__name__, sender=sender.name, reason=error.message)
            self.failed(message, error)
        except Exception as error:
            self.log.exception("message failed", message=type(message).__name__, sender=sender.name)
            self.failed(message, error)

    def failed(self, message: Message, error: Exception) -> None:
        """End the request that a failed message was about."""
        request, attempt = getattr(message, "request", None), getattr(message, "attempt", None)
        if request is not None and attempt is not None:
            code = error.code if isinstance(error, PDError) else "internal"
            self.tell(ROUTER, Failed(request, attempt, code, f"{self.spec.name}: {error}"))

    def _on_inspect(self, sender: Member, message: Inspect) -> None:
        report = msgspec.structs.replace(self.report(), stamps=self.trail.of(message.request))
        self.tell(sender.name, Inspected(message.query, report))


class _Stopped(Exception):
    """Ends the task group of an actor that was asked to stop."""


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that ended the group; the others are its echo."""
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
