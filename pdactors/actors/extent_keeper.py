"""`ExtentKeeper`: an engine's share of the node's memory: asks before it is missed, gives back what is empty."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.messages import ReturnExtents, WantExtents
from pdactors.policy import extents

REPEAT_S = 0.1  # a wish that was not granted is repeated


class ExtentKeeper:
    """Owns which extents the pool has. `ask` sends to the node's migrator."""

    def __init__(
        self,
        arena: Arena,
        pool: BlockPool,
        slot: int,
        num_engines: int,
        max_sequence_blocks: int,
        ask: Callable[[WantExtents | ReturnExtents], object],
    ) -> None:
        self._arena = arena
        self._pool = pool
        self._slot = slot
        self._ask = ask
        per_sequence = -(-max_sequence_blocks // arena.extent_blocks)
        self._minimum = extents.guaranteed(arena.num_extents, num_engines, per_sequence)
        self._num_wanted = 0
        self._asked_s = 0.0
        self._grew = asyncio.Event()
        self._mapped: set[int] = set()  # extents of others

    def max_blocks(self, num_engines: int) -> int:
        """Return how many blocks the pool can come to own while the others of `num_engines` keep their minimum."""
        reachable = extents.reachable(self._arena.num_extents, num_engines, self._minimum)
        return min(self._arena.num_blocks, reachable * self._arena.extent_blocks)

    def take_over(self) -> None:
        """Use what a predecessor in this slot had."""
        for extent in self._arena.extents_of(self._slot):
            self._pool.add_extent(self._arena.blocks_of_extent(extent))

    def mind(self, lacking: int, spare: int, now: float) -> None:
        """Ask for memory when `lacking` blocks are missed, or fewer than half an extent is spare."""
        wanted = -(-lacking // self._arena.extent_blocks)
        if not wanted and spare < self._arena.extent_blocks / 2:
            wanted = 1
        if wanted and (wanted != self._num_wanted or now - self._asked_s > REPEAT_S):
            self._num_wanted, self._asked_s = wanted, now
            self._ask(WantExtents(wanted))

    async def first(self, clock: Callable[[], float]) -> None:
        """Wait until there is an extent at all."""
        while not self._pool.extents:
            self._grew.clear()
            self.mind(1, 0, clock())
            try:
                async with asyncio.timeout(2 * REPEAT_S):
                    await self._grew.wait()
            except TimeoutError:
                pass

    async def add(self, granted: tuple[int, ...]) -> None:
        """Have the memory of granted extents backed, then use it."""
        for extent in granted:
            await asyncio.to_thread(self._arena.populate, extent)
            blocks = self._arena.blocks_of_extent(extent)
            if self._arena.extent_owner(extent) == self._slot and blocks not in self._pool.extents:
                self._pool.add_extent(blocks)
        self._num_wanted = 0
        self._grew.set()

    def unmapped(self) -> list[int]:
        """Return the extents that others were given since the last call."""
        new = [extent for extent in self._arena.extents_of_others(self._slot) if extent not in self._mapped]
        self._mapped.update(new)
        return new

    async def map_ahead(self, new: list[int]) -> None:
        """Map extents of others: a page fault is dear, and would be met by the step that reads a prompt."""
        for extent in new:
            await asyncio.to_thread(self._arena.map_ahead, extent)

    def give_back(self, count: int, spare: int) -> None:
        """Return up to `count` extents that hold nothing live, out of `spare` blocks that nobody claims."""
        returned = []
        for blocks in self._pool.removable_extents()[:count]:
            if len(self._pool.extents) <= self._minimum or spare < len(blocks):
                break
            self._pool.remove_extent(blocks)
            spare -= len(blocks)
            returned.append(blocks.start // self._arena.extent_blocks)
        if returned:
            self._ask(ReturnExtents(tuple(returned)))
