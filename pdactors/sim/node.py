"""`SimNode`: one node of the cluster file: its memory, leases, engines, and a migrator where KV moves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdactors.config.cluster import ClusterConfig, NodeSection
from pdactors.engine.limits import EngineLimits
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.messages import Announce, CacheChanged, Member, Pin, Pinned, Release, Segment
from pdactors.sim.clock import Clock
from pdactors.sim.cost import CostModel
from pdactors.sim.engine import SimEngine
from pdactors.sim.host import Host
from pdactors.sim.memory import Key, Leases, NodeMemory
from pdactors.sim.mover import SimMover

if TYPE_CHECKING:
    from pdactors.sim.cluster import SimCluster


class SimNode:
    """Owns what the engines of a node share."""

    def __init__(
        self,
        router: SimCluster,
        section: NodeSection,
        host: Host,
        layout: KVLayout,
        limits: EngineLimits,
        sequence_tokens: int,
    ) -> None:
        self.router = router
        self.section = section
        self.host = host
        self.layout = layout
        engines = section.engines(self.config.cluster.mode)
        num_engines = sum(engines.values())
        moves = self.config.moves_kv
        name = f"{section.name}/migrator"
        self.mover = SimMover(self, Member(name, "migrator", section.name, section.rack, 0, 1, state="ready"))
        self.memory = NodeMemory(
            max(1, self.config.kv.memory_bytes // layout.block_bytes),
            max(1, num_engines),
            max(1, num_engines) + moves,
            layout.num_blocks(sequence_tokens),
            self.mover.owner if self.config.has_store else None,
        )
        self.leases = Leases(self._lease_ended)
        names = [(role, f"{section.name}/{role}-{i}") for role, count in engines.items() for i in range(count)]
        self.engines = {
            name: SimEngine(self, Member(name, role, section.name, section.rack, 0, 1, slot, "ready"), limits)
            for slot, (role, name) in enumerate(names)
        }
        for engine in self.engines.values():
            self.memory.add(engine.owner)
        if moves:
            self.memory.add(self.mover.owner)

    @property
    def clock(self) -> Clock:
        return self.router.clock

    @property
    def cost(self) -> CostModel:
        return self.router.cost

    @property
    def config(self) -> ClusterConfig:
        return self.router.config

    def tell_mover(self, message: Announce | Release) -> None:
        """Have the node's migrator hear something, one message later."""
        self.clock.after(self.cost.control_s, self.mover.receive, message)

    def lend_cached(self, lender: str, pool: BlockPool, num_reserved: int, pin: Pin) -> None:
        """Lend what is still cached of a prefix, as engines and migrators do, and tell the router."""
        blocks = pool.match_spare(pin.digests, num_reserved)
        segment = None
        if blocks:
            lease = self.leases.lend(lender, (pin.request, pin.attempt), pool, blocks)
            segment = Segment(lender, lease, pin.start, tuple(blocks))
            pool.free(blocks)
        self.router.post(lender, Pinned(pin.request, pin.attempt, pin.start, segment))

    def tell_cache(self, owner: str, pool: BlockPool) -> None:
        """Let the router know what a prefix cache gained and lost."""
        changes = pool.drain_events()
        if changes.added or changes.evicted:
            self.router.post(owner, CacheChanged(tuple(changes.added), tuple(changes.evicted)))

    def check(self) -> None:
        """Hold every owner's books against themselves (I5)."""
        for pool in (*(engine.pool for engine in self.engines.values()), self.mover.pool):
            pool.check()

    def _lease_ended(self, lender: str, key: Key) -> None:
        engine = self.engines.get(lender)
        if engine is None:
            self.clock.after(0.0, self.mover.serve)
        else:
            engine.lease_ended(key)
            if engine.engine.waiting or engine.engine.running:
                self.clock.after(0.0, engine.wake)
