"""`ExtentKeeper`: an engine's share of the node's memory: asks before it is missed, gives back what is empty."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from pdactors.actors.spec import ActorSpec
from pdactors.errors import InvariantError
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.messages import ReturnExtents, WantExtents
from pdactors.policy import extents

REPEAT_S = 0.1  # a wish that was not granted is repeated
STEP_BLOCKS = 32  # that are asked for at once at least, where extents are smaller


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
        self.minimum = extents.guaranteed(arena.num_extents, num_engines, per_sequence)
        self._step = max(arena.extent_blocks, min(STEP_BLOCKS, arena.num_blocks // (16 * num_engines)))
        self._num_wanted = 0
        self._asked_s = 0.0
        self._grew = asyncio.Event()
        self._arriving: set[int] = set()  # granted, not in the pool yet
        self._mapped: set[int] = set()  # extents of others

    @classmethod
    def of(
        cls, spec: ActorSpec, arena: Arena, pool: BlockPool, ask: Callable[[WantExtents | ReturnExtents], object]
    ) -> ExtentKeeper:
        """Return the keeper of an actor's memory."""
        return cls(arena, pool, spec.slot, spec.num_owners, spec.layout.num_blocks(spec.model.max_model_len), ask)

    def max_blocks(self, num_engines: int) -> int:
        """Return how many blocks the pool can come to own while the others of `num_engines` keep their minimum."""
        reachable = extents.reachable(self._arena.num_extents, num_engines, self.minimum)
        return min(self._arena.num_blocks, reachable * self._arena.extent_blocks)

    def take_over(self) -> None:
        """Use what a predecessor in this slot had; nothing that it said is on its way to the migrator any more."""
        for extent in self._arena.extents_of(self._slot):
            self._pool.add_extent(self._arena.blocks_of_extent(extent))

    def reconcile(self) -> None:
        """Return what is ours by the table and unknown here: what its lost keeper gave us, or had been given by us."""
        known = {blocks.start // self._arena.extent_blocks for blocks in self._pool.extents} | self._arriving
        if lost := set(self._arena.extents_of(self._slot)) - known:
            self._ask(ReturnExtents(tuple(sorted(lost))))

    def check(self) -> None:
        """Raise InvariantError if the pool has an extent that the table gives to somebody else."""
        used = {blocks.start // self._arena.extent_blocks for blocks in self._pool.extents}
        if foreign := used.difference(self._arena.extents_of(self._slot)):
            raise InvariantError(f"extents in use here that belong to others: {sorted(foreign)}")

    def mind(self, lacking: int, spare: int, now: float, *, caches: bool = False) -> None:
        """Ask for memory when `lacking` blocks are missed, or fewer than half a step is spare.

        An owner that `caches` also asks for what lies idle before it evicts.
        """
        missed = max(lacking, self._step if spare < self._step / 2 else 0)
        wanted = -(-missed // self._arena.extent_blocks)
        empty = spare - (self._pool.num_available - self._pool.num_free)  # below 0: what is set aside will evict
        if wanted and (wanted != self._num_wanted or now - self._asked_s > REPEAT_S):
            self._num_wanted, self._asked_s = wanted, now
            self._ask(WantExtents(wanted))
        elif caches and not (wanted or self._arriving) and empty < self._step and now - self._asked_s > REPEAT_S:
            self._num_wanted, self._asked_s = 0, now
            self._ask(WantExtents(0, -(-(2 * self._step - empty) // self._arena.extent_blocks)))

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
        self._arriving.update(granted)
        await asyncio.to_thread(_each, self._arena.populate, granted)
        self._arriving.difference_update(granted)
        for extent in granted:
            blocks = self._arena.blocks_of_extent(extent)
            if self._arena.extent_owner(extent) == self._slot and blocks not in self._pool.extents:
                self._pool.add_extent(blocks)
        self._num_wanted, self._asked_s = 0, 0.0
        self._grew.set()

    def unmapped(self) -> list[int]:
        """Return the extents that others were given since the last call."""
        new = [extent for extent in self._arena.extents_of_others(self._slot) if extent not in self._mapped]
        self._mapped.update(new)
        return new

    async def map_ahead(self, new: list[int]) -> None:
        """Map extents of others: a page fault is dear, and would be met by the step that reads a prompt."""
        await asyncio.to_thread(_each, self._arena.map_ahead, new)

    def give_back(self, count: int, spare: int, *, idle: bool = False) -> None:
        """Return up to `count` extents that hold nothing live, out of `spare` blocks that nobody claims.

        `idle`: nobody misses them, so what would soon be asked for again stays.
        """
        spare -= self._step if idle else 0
        returned = []
        for blocks in self._pool.removable_extents()[:count] if spare > 0 else ():
            if len(self._pool.extents) <= self.minimum or spare < len(blocks):
                break
            self._pool.remove_extent(blocks)
            spare -= len(blocks)
            returned.append(blocks.start // self._arena.extent_blocks)
        if returned:
            self._ask(ReturnExtents(tuple(returned)))


def _each(action: Callable[[int], None], extents: Sequence[int]) -> None:
    for extent in extents:
        action(extent)
