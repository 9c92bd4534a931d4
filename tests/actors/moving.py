"""Migrators of several nodes in one process: the wire between them, a router, engines, and what a test asks of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import numpy as np

from pdactors.actors.actor import Actor
from pdactors.actors.migrator import Migrator
from pdactors.config.cluster import KVSection, NodeSection
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.kv.loans import Loans
from pdactors.kv.prefix import chain
from pdactors.messages import (
    Announce,
    CacheChanged,
    Fleet,
    Heartbeat,
    KVHandle,
    Migrate,
    Migrated,
    Pinned,
    Release,
    Segment,
    Stranded,
)
from pdactors.transport.inproc import InprocTransport
from pdactors.transport.inproc_port import InprocPort

LAYOUT = KVLayout(2, 2, 8, 8, "float32")
BLOCK = LAYOUT.block_tokens
EXTENT_BLOCKS, NUM_EXTENTS = 8, 16
PREFILL, DECODE, MIGRATOR = 0, 1, 2  # slots of a node
MAX_TOKENS = 320  # 40 blocks: three transfers
KEY = b"key"


class Port(InprocPort):
    """A wire that a test can hold up and spoil. A transfer's header has an even tag, its payload an odd one."""

    def __init__(self) -> None:
        super().__init__()
        self.holds = lambda tag: False
        self.spoils = lambda tag: False
        self.held: list[tuple[bytes, int]] = []
        self.num_payloads = 0

    def deliver(self, sender, tag):
        if self.holds(tag):
            self.held.append((sender, tag))
        else:
            super().deliver(sender, tag)

    def let_go(self):
        self.holds = lambda tag: False
        held, self.held = self.held, []
        for sender, tag in held:
            self.deliver(sender, tag)

    def copy(self, tag, sources, targets):
        super().copy(tag, sources, targets)
        self.num_payloads += tag & 1
        if self.spoils(tag):
            targets[-1][len(targets[-1]) // 2] ^= 1


def headers(tag):
    return not tag & 1


def payloads(tag):
    return bool(tag & 1)


class Hub(Actor):
    """A router that only knows who is there, and keeps what it is told."""

    role = "router"

    def __init__(self, spec, transport):
        super().__init__(spec, transport)
        self.members = {}
        self.got = []
        for kind in (Migrated, Stranded, CacheChanged, Pinned):
            self.accept(kind, lambda sender, message: self.got.append((sender.name, message)), "migrator")
        self.accept(Heartbeat, self._on_heartbeat, "migrator")

    def open(self):
        self.listen(self.spec.control)

    def beat(self):
        pass

    def _on_heartbeat(self, sender, message):
        if self.members.get(sender.name) != sender and message.state == "ready":
            self.members[sender.name] = sender
            self.tell_all()

    def lose(self, name):
        del self.members[name]
        self.dismiss(name)
        self.tell_all()

    def tell_all(self):
        for name in self.members:
            self.tell(name, Fleet("disaggregated", tuple(self.members.values())))

    def of(self, kind, request="r"):
        return [message for _, message in self.got if isinstance(message, kind) and message.request == request]


class Engine:
    """An engine's share of an arena: lends what it has computed, or reads what it is lent."""

    def __init__(self, arena, slot, clock, num_extents=0):
        self.arena, self.clock = arena, clock
        self.pool = BlockPool()
        for extent in [e for e in range(arena.num_extents) if arena.extent_owner(e) is None][:num_extents]:
            arena.set_extent_owner(extent, slot)
            self.pool.add_extent(arena.blocks_of_extent(extent))
        self.loans = Loans(self.pool, arena.leases(), slot, 1, 30.0)

    def compute(self, tokens):
        """Return blocks that hold what the tokens determine."""
        blocks = self.pool.allocate(LAYOUT.num_blocks(len(tokens)))
        for i, block in enumerate(blocks):
            seed = [len(tokens[: (i + 1) * BLOCK]), *tokens[: (i + 1) * BLOCK]]
            self.arena.payload()[block] = np.random.default_rng(seed).integers(0, 256, LAYOUT.block_bytes, np.uint8)
        return blocks

    def lend(self, blocks, start=0, request="r", attempt=1, owner="n0/prefill-0"):
        return Segment(owner, self.loans.lend((request, attempt), blocks, self.clock()), start, tuple(blocks))


class Node:
    def __init__(self, migrator, arena):
        self.migrator, self.arena, self.mover = migrator, arena, migrator.mover
        self.prefill = Engine(arena, PREFILL, migrator.clock, arena.num_extents // 2)
        self.decode = Engine(arena, DECODE, migrator.clock)

    @property
    def name(self):
        return self.migrator.spec.name

    @property
    def port(self):
        return self.mover.port


class World:
    """Nodes, their migrators connected, and requests on their way from the first to the second."""

    def __init__(self, hub, nodes, until):
        self.hub, self.nodes, self.until = hub, nodes, until
        self.blocks = {}  # what each request's prefill computed
        self.tokens = {}
        self.alive = list(nodes)

    def __getitem__(self, index):
        return self.nodes[index]

    def __iter__(self):
        return iter(self.nodes)

    def handle(self, num_tokens=100, request="r", attempt=1, family=7):
        prefill = self[0].prefill
        tokens = self.tokens[request] = [family] * (num_tokens - 1) + [int.from_bytes(request.encode()) % 99]
        self.blocks[request] = prefill.compute(tokens)
        segment = prefill.lend(self.blocks[request], request=request, attempt=attempt)
        return KVHandle("n0", "n0/prefill-0", LAYOUT.fingerprint, (segment,), num_tokens)

    def digests(self, request="r"):
        tokens = self.tokens[request]
        return tuple(chain(tokens[: (len(tokens) - 1) // BLOCK * BLOCK], BLOCK, KEY))

    def migrate(self, handle, request="r", attempt=1, target=1, **fields):
        message = Migrate(request, attempt, handle, self[target].name, self.digests(request), **fields)
        assert self.hub.tell(self[0].name, message)

    async def announce(self, blocks, num_tokens, target=1, start=0, request="r"):
        """Say that the first blocks of a prompt are final, as a prefill does."""
        segment = self[0].prefill.lend(blocks, start, request)
        sender = self[0].migrator.spec.member(1)
        sender = msgspec.structs.replace(sender, name="n0/prefill-0", role="prefill")
        message = Announce(request, 1, self[target].name, segment, num_tokens, self.digests(request))
        self[0].migrator._handle(sender, message)

    async def arrives(self, request="r", node=1):
        """Wait for a sequence, and hold that every byte of it is right."""
        await self.until(lambda: self.hub.of(Migrated, request), lambda: f"{self.hub.got}")
        (message,) = self.hub.of(Migrated, request)
        self.holds_right_bytes(message.handle, request, node)
        return message

    def holds_right_bytes(self, handle, request="r", node=1):
        (segment,) = handle.segments
        assert (handle.owner, handle.num_tokens) == (self[node].name, len(self.tokens[request]))
        assert self[node].decode.loans.borrow(segment.lease, self[node].migrator.clock()) == segment.blocks
        theirs, ours = self[0].arena.payload(), self[node].arena.payload()
        assert np.array_equal(ours[list(segment.blocks)], theirs[self.blocks[request]])
        self[node].decode.loans.give_back(segment.lease)

    async def strands(self, reason="", request="r"):
        await self.until(lambda: self.hub.of(Stranded, request), lambda: f"{self.hub.got}")
        (message,) = self.hub.of(Stranded, request)
        assert reason in message.reason
        return message

    def release(self, request="r", attempt=1):
        for node in self.alive:
            self.hub.tell(node.name, Release(request, attempt))
        self[0].prefill.loans.revoke((request, attempt))
        self[0].prefill.pool.free(self.blocks.pop(request))

    async def stop(self, index):
        """End a migrator, and let everybody know."""
        node = self[index]
        self.alive.remove(node)
        node.migrator.stop()
        await self.until(lambda: node.name not in node.migrator.fleet.members and node.migrator.state == "stopping")
        self.hub.lose(node.name)

    async def all_is_back(self):
        """Hold that nothing is held for anybody, on every node that lives."""

        def is_back():
            now = self[0].migrator.clock()
            for node in self.nodes:
                node.prefill.loans.sweep(now)
            self.check()
            return not any(map(self.held, self.alive)) and not self[0].prefill.loans.live()

        await self.until(is_back, lambda: f"{[*map(self.held, self.alive)]} {self[0].prefill.loans.live()}")

    def check(self):
        for node in self.alive:
            node.migrator.holdings.check()
            node.prefill.loans.check()
            node.prefill.pool.check()
            blocks = node.mover.pool.account()
            assert blocks.total == blocks.free + blocks.cached + blocks.used + blocks.leased_out
            assert 0 <= node.mover.holdings.num_reserved <= node.mover.pool.num_available

    @staticmethod
    def held(node):
        """Return what a migrator still holds."""
        mover, blocks = node.mover, node.mover.pool.account()
        counts = {
            "reserved": mover.holdings.num_reserved, "used": blocks.used, "lent": blocks.leased_out,
            "keys": (*mover.inbound.keys, *mover.outbound.keys), "queue": len(mover.outbound.queue),
            "borrowed": mover.loans.borrowed, "live": mover.loans.live(),
        }  # fmt: skip
        return {name: count for name, count in counts.items() if count}


@asynccontextmanager
async def make_world(
    make_spec, living, until, num_nodes=2, *, kv=None, extents=NUM_EXTENTS, **router
) -> AsyncIterator[World]:
    """Make nodes whose migrators know each other."""
    async with AsyncExitStack() as opened:
        hub = Hub(make_spec("router", **router), InprocTransport())
        nodes = []
        for i in range(num_nodes):
            arena = opened.enter_context(
                Arena.create(
                    LAYOUT,
                    EXTENT_BLOCKS * extents,
                    extent_blocks=EXTENT_BLOCKS,
                    num_slots=3,
                    leases_per_slot=64,
                    max_lease_blocks=40,
                )
            )
            spec = make_spec("migrator", f"n{i}/migrator", node=f"n{i}", slot=MIGRATOR, arena=arena.fileno(), **router)
            config = msgspec.structs.replace(
                spec.config, kv=KVSection(**(kv or {})), node=tuple(NodeSection(f"n{j}") for j in range(num_nodes))
            )
            model = msgspec.structs.replace(spec.model, max_model_len=MAX_TOKENS)
            spec = msgspec.structs.replace(spec, config=config, model=model, host=f"127.0.0.{i + 1}")
            migrator = Migrator(spec, InprocTransport())
            opened.callback(migrator.arena.close)
            nodes.append(Node(migrator, arena))
        model = msgspec.structs.replace(hub.spec.model, max_model_len=MAX_TOKENS)
        hub.spec = msgspec.structs.replace(hub.spec, model=model)
        await opened.enter_async_context(living(hub, *(node.migrator for node in nodes)))
        world = World(hub, nodes, until)
        names = [node.name for node in nodes]
        await until(lambda: all(node.migrator.state == "ready" for node in nodes))
        await until(lambda: all(node.mover.can_reach(name) for node in nodes for name in names))
        yield world
        world.check()
