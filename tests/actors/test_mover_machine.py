"""Migrations in any mixture, over a wire that delays and spoils, with cancels, late Migrates and lost connections."""

from __future__ import annotations

import asyncio
import random

import pytest
from moving import DECODE, MAX_TOKENS, World

from pdactors.messages import Migrated, Stranded

NUM_STEPS = 150


class Chaos:
    """Draws what happens next, and knows what must follow: each request arrives right, strands, or is cancelled."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.rng = random.Random(seed)
        self.num_asked = 0
        self.open: dict[str, str] = {}  # requests that are not over -> announced, migrating
        self.handles = {}
        self.arrived: set[str] = set()
        for node in world.nodes:
            node.port.holds = lambda _tag: self.rng.random() < 0.3
            node.port.spoils = lambda tag: bool(tag & 1) and self.rng.random() < 0.05

    async def step(self) -> None:
        actions = [self.announce, self.migrate, self.deliver, self.finish, self.cancel, self.reconnect]
        await self.rng.choices(actions, [3, 5, 8, 5, 1, 0.3])[0]()
        await asyncio.sleep(self.rng.choice([0, 0, 0.001, 0.003]))
        self.hold()

    def new(self) -> str:
        name = f"r{self.num_asked}"
        self.num_asked += 1
        family = self.rng.choice([7, 8])
        self.handles[name] = self.world.handle(self.rng.choice([5, 64, 100, 200, MAX_TOKENS]), name, family=family)
        return name

    @property
    def has_room(self) -> bool:
        return self.world[0].prefill.pool.can_allocate(MAX_TOKENS // 8)

    async def announce(self) -> None:
        if not self.has_room:
            return
        name = self.new()
        blocks = self.world.blocks[name][:-1]
        if blocks:
            ready = blocks[: self.rng.randint(1, len(blocks))]
            await self.world.announce(ready, len(self.world.tokens[name]), request=name)
        self.open[name] = "announced"

    async def migrate(self) -> None:
        waiting = [name for name, stage in self.open.items() if stage == "announced"]
        if waiting and self.rng.random() < 0.7:
            name = self.rng.choice(waiting)
        elif self.has_room:
            name = self.new()
        else:
            return
        self.open[name] = "migrating"
        priority = self.rng.choice(["interactive", "batch"])
        time_left_s = 0.05 if self.rng.random() < 0.1 else None
        self.world.migrate(self.handles[name], name, priority=priority, time_left_s=time_left_s)

    async def deliver(self) -> None:
        for node in self.world.nodes:
            held, node.port.held = node.port.held, []
            for sender, tag in self.rng.sample(held, len(held)):
                node.port.deliver(sender, tag)

    async def finish(self) -> None:
        """End what has arrived, and what the router would compute again."""
        for name in [name for name, stage in self.open.items() if stage == "migrating" and name in self.ended]:
            del self.open[name]
            self.world.release(name)

    @property
    def ended(self) -> set[str]:
        return {m.request for _, m in self.world.hub.got if isinstance(m, Migrated | Stranded)}

    async def cancel(self) -> None:
        if self.open:
            name = self.rng.choice(sorted(self.open))
            del self.open[name]
            self.world.release(name)

    async def reconnect(self) -> None:
        a, b = self.rng.sample(self.world.nodes, 2)
        a.mover.reconnect(b.name, "the test says so")

    def hold(self) -> None:
        """What always holds (I1, I2, I5), and whoever has arrived has the right bytes."""
        self.world[0].prefill.loans.sweep(self.world[0].migrator.clock())
        self.world.check()
        mover = self.world[1].mover
        landing = [block for each in mover.inbound._landing for block in each.blocks]
        stored = [block for coming in mover.inbound._coming.values() for block in coming.blocks.values()]
        lent = [block for live in mover.loans.live() for block in live.blocks]
        assert len(landing) == len(set(landing)), "two transfers write one block"
        assert set(landing).isdisjoint({*stored, *lent}), "a block is written that somebody has"
        assert not any(mover.pool.is_idle(block) for block in landing)
        for _, message in self.world.hub.got:
            if isinstance(message, Migrated) and message.request in self.open and message.request not in self.arrived:
                assert self.open[message.request] == "migrating"
                self.arrived.add(message.request)
                self.world.holds_right_bytes(message.handle, message.request)

    async def settle(self) -> None:
        """Let everything come to its end: nothing waits for ever, and nothing is left."""
        for node in self.world.nodes:
            node.port.holds = node.port.spoils = lambda _tag: False
        await self.deliver()
        for name, stage in [*self.open.items()]:
            if stage == "announced":
                del self.open[name]
                self.world.release(name)

        def is_over() -> bool:
            self.hold()
            return self.open.keys() <= self.ended

        await self.world.until(is_over, lambda: f"{self.open} {World.held(self.world[1])}")
        for name in [*self.open]:
            self.world.release(name)
        await self.world.all_is_back()


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_happens_no_byte_is_wrong_and_nothing_is_left(world_of, seed):
    async with world_of(extents=64) as world:
        for extent in range(40, 64):  # the destination has room for two or three at once
            world[1].arena.set_extent_owner(extent, DECODE)
        chaos = Chaos(world, seed)
        for _ in range(NUM_STEPS):
            await chaos.step()
        await chaos.settle()
        assert len(chaos.arrived) > 3
