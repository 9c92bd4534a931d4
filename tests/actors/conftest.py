"""Actors of one process: specs, peers that say what a test wants, and waiting with a deadline."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

import msgspec
import pytest
from moving import Port, make_world

from pdactors.actors.actor import Actor
from pdactors.actors.router import Router
from pdactors.actors.spec import ActorSpec, Descriptors, ModelSpec
from pdactors.config.cluster import ClusterConfig, ClusterSection, KVSection, NodeSection, RouterSection
from pdactors.kv.layout import KVLayout
from pdactors.messages import (
    PROTOCOL_VERSION,
    Fleet,
    Heartbeat,
    Hello,
    Load,
    Message,
    Resume,
    Role,
    Welcome,
    control_decoder,
    decode,
    encode,
)
from pdactors.token_ids import TokenIds
from pdactors.transport import Channel
from pdactors.transport.inproc import InprocTransport
from pdactors.version import VERSION

WAIT_S = 10.0
READY = Heartbeat("ready", Load(max_sequences=2))
ROLES: dict[str, Role] = {
    "gateway": "gateway",
    "migrator": "migrator",
    "s": "supervisor",
    "p": "prefill",
    "d": "decode",
    "w": "worker",
}
JOIN_TOKEN = "open-sesame-4711"
M = TypeVar("M", bound=Message)
numbers = itertools.count()


class FakePeer:
    """A connection to an actor's listener, on which a test says what it likes."""

    def __init__(self, spec: ActorSpec, address: str, identity: bytes | None = None) -> None:
        self.spec = spec
        self.got: list[Message] = []
        self._transport = InprocTransport()
        if identity is None:
            identity = f"{spec.name}#{spec.incarnation}".encode()
        self._channel: Channel = self._transport.connect(address, identity, self._receive)

    def _receive(self, _peer: bytes, frames: list[bytes]) -> None:
        self.got.append(decode(control_decoder, frames))

    def send(self, message: Message) -> None:
        self._channel.send(encode(message))

    def send_raw(self, data: bytes) -> None:
        self._channel.send([data])

    def hello(self, **changes: object) -> Hello:
        spec = self.spec
        model, layout = spec.model.fingerprint, spec.layout.fingerprint
        terms = spec.config.cluster.mode, spec.model.max_model_len, spec.run_id
        hello = Hello(PROTOCOL_VERSION, VERSION, spec.member(100), layout, model, spec.join_token, *terms)
        return msgspec.structs.replace(hello, **changes)

    async def join(self) -> Welcome:
        self.send(self.hello())
        return await self.expect(Welcome)

    def of(self, kind: type[M]) -> list[M]:
        return [message for message in self.got if isinstance(message, kind)]

    async def expect(self, kind: type[M], where: Callable[[M], object] = lambda _: True) -> M:
        """Wait for a message, and forget it and those of its kind that came before it."""
        found: list[M] = []

        def arrived() -> bool:
            found[:] = [message for message in self.of(kind) if where(message)]
            return bool(found)

        await until(arrived, lambda: f"no such {kind.__name__} among the last of {len(self.got)}: {self.got[-3:]}")
        last = next(i for i, message in enumerate(self.got) if message is found[0])
        self.got = [m for i, m in enumerate(self.got) if i > last or not isinstance(m, kind)]
        return found[0]

    def close(self) -> None:
        self._transport.close()


async def until(condition: Callable[[], object], what: str | Callable[[], str] = "it never came to be") -> None:
    """Let the loop turn until `condition` holds."""
    try:
        async with asyncio.timeout(WAIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.001)
    except TimeoutError:
        raise AssertionError(what if isinstance(what, str) else what()) from None


@pytest.fixture
def control() -> str:
    return f"inproc://control-{next(numbers)}"


MakeSpec = Callable[..., ActorSpec]


@pytest.fixture
def make_spec(control: str) -> MakeSpec:
    """Make specs of one cluster: `make_spec("prefill", "n0/prefill-0", dead_after_ms=100)`."""

    def make(
        role: Role,
        name: str = "",
        *,
        incarnation: int = 1,
        node: str = "n0",
        slot: int = -1,
        mode: str = "disaggregated",
        transport: str = "auto",
        arena: int = -1,
        num_engines: int = 1,
        **router: object,
    ) -> ActorSpec:
        settings = {"control": control, "heartbeat_ms": 10, "dead_after_ms": 600_000, **router}
        return ActorSpec(
            run_id="run",
            name=name or role,
            role=role,
            node=node,
            rack="r0",
            slot=slot,
            incarnation=incarnation,
            supervisor_pid=1,
            config=ClusterConfig(
                cluster=msgspec.convert({"mode": mode}, ClusterSection),
                kv=msgspec.convert({"transport": transport}, KVSection),
                router=msgspec.convert(settings, RouterSection),
                node=(NodeSection("n0"), NodeSection("n1")),
            ),
            model=ModelSpec("tiny", "/models/tiny", "ab" * 8, (2,), 100, 64),
            layout=KVLayout(2, 2, 8, 8, "float32"),
            control=control,
            join_token=JOIN_TOKEN,
            fds=Descriptors(arena=arena),
            num_engines=num_engines,
        )

    return make


@pytest.fixture
def fake_peer(make_spec: MakeSpec, control: str) -> AsyncIterator[Callable[..., FakePeer]]:
    """Make peers of the actor that listens on the control address, or another: `fake_peer("gateway")`."""
    made: list[FakePeer] = []

    def make(
        role: Role, name: str = "", *, identity: bytes | None = None, address: str = "", **spec: object
    ) -> FakePeer:
        made.append(FakePeer(make_spec(role, name, **spec), address or control, identity))
        return made[-1]

    yield make
    for peer in made:
        peer.close()


@pytest.fixture(scope="session")
def living():
    """Let actors live while a block runs; an actor that ends by an error ends the block with it."""

    @asynccontextmanager
    async def living(*actors: Actor) -> AsyncIterator[None]:
        try:
            async with asyncio.TaskGroup() as tasks:
                for actor in actors:
                    tasks.create_task(actor.run())
                await asyncio.sleep(0)
                try:
                    yield
                finally:
                    for actor in actors:
                        actor.stop()
        except ExceptionGroup as errors:
            if len(errors.exceptions) > 1:
                raise
            raise errors.exceptions[0] from None

    return living


@pytest.fixture(scope="session", name="until")
def until_fixture():
    return until


class Cluster:
    """A router and its peers, joined and ready. The beginning of a peer's name says what it is."""

    def __init__(self, router: Router, fake_peer: Callable) -> None:
        self.router = router
        self._fake_peer = fake_peer
        self.peers: dict[str, object] = {}

    async def join(self, name: str, beat: Heartbeat = READY, **spec: object):
        """Let a peer join, and wait until the fleet's news say what it said."""
        role = next(role for start, role in ROLES.items() if name.rpartition("/")[2].startswith(start))
        peer = self.peers[name] = self._fake_peer(role, name, **spec)
        await peer.join()
        peer.send(beat)
        await self.news(name, lambda fleet: any(m.name == name and m.state == beat.state for m in fleet.members))
        return peer

    async def news(self, name: str, where: Callable[[Fleet], object]) -> Fleet:
        return await self.peers[name].expect(Fleet, where)

    async def resume(self, *generated: int) -> None:
        """Let the gateway say what its client has of the request whose attempt was lost."""
        question = await self.peers["gateway"].expect(Resume)
        self.peers["gateway"].send(msgspec.structs.replace(question, generated=TokenIds.of(generated)))

    def __getitem__(self, name: str):
        return self.peers[name]


@pytest.fixture
def cluster_of(make_spec, fake_peer, living):
    @asynccontextmanager
    async def cluster_of(*names: str, mode: str = "disaggregated", **settings: object) -> AsyncIterator[Cluster]:
        router = Router(make_spec("router", mode=mode, **settings), InprocTransport())
        async with living(router):
            cluster = Cluster(router, partial(fake_peer, mode=mode))
            for name in names:
                await cluster.join(name)
            yield cluster

    return cluster_of


@pytest.fixture
def world_of(make_spec, living, until, monkeypatch):
    """Make nodes whose migrators know each other: `world_of(2, kv={"damage_every": 3})`."""
    monkeypatch.setattr("pdactors.actors.mover.open_port", lambda *_, **__: Port())
    return partial(make_world, make_spec, living, until)
