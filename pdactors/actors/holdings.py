"""`Holdings`: the KV that a node's migrator owns: what was moved here, and in mode kvstore what engines published."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from pdactors.actors.actor import ROUTER
from pdactors.actors.backing import Backing
from pdactors.actors.extent_keeper import ExtentKeeper
from pdactors.actors.lending import lend_cached, tell_cache
from pdactors.errors import Overloaded
from pdactors.kv.blocks import BlockPool
from pdactors.kv.loans import Loans
from pdactors.kv.store import ArenaStore
from pdactors.messages import (
    KVHandle,
    Member,
    Pin,
    Prefilled,
    Publish,
    Segment,
    Stranded,
)

if TYPE_CHECKING:
    from pdactors.actors.migrator import Migrator


FETCH_S = 0.8  # that a Pin waits for the store behind ours; the router waits a little longer


class Holdings:
    """To the arena the migrator is an owner and a borrower like any engine. `actor` is whom this speaks through."""

    def __init__(self, actor: Migrator) -> None:
        spec = actor.spec
        self.actor = actor
        self.spec = spec
        self.clock = actor.clock
        self.arena = actor.arena
        self.pool = BlockPool()
        self.loans = Loans(self.pool, self.arena.leases(), spec.slot, spec.incarnation, spec.config.kv.lease_s)
        self.store = ArenaStore(self.pool, self.loans)
        self.extents = ExtentKeeper.of(spec, self.arena, self.pool, partial(actor.tell, spec.name))
        self.num_reserved = 0  # blocks that are set aside for what is to come
        mooncake = spec.config.mooncake
        self.backing = Backing(self.arena, self.pool, self.clock, actor.transfers) if mooncake else None

    @property
    def num_unreserved(self) -> int:
        """Blocks that are set aside for nobody."""
        return self.pool.num_available - self.num_reserved

    async def start(self) -> None:
        """Join the store behind ours.

        Raises:
            ConfigError: that cannot be had.
        """
        if self.backing is not None:
            config = self.spec.config
            await self.backing.open(config.mooncake, self.spec.host, config.kv.store_bytes)
            self.actor.spawn(self.backing.serve())

    def close(self) -> None:
        """Leave the store behind ours."""
        if self.backing is not None:
            self.backing.close()

    def take_over(self) -> None:
        """Go on with what a predecessor owned and lent; what its blocks hold is not known any more."""
        self.extents.take_over()
        self.loans.take_over()

    def tick(self) -> None:
        """Take back what ended, and say what changed."""
        self.actor.counts["leases_expired"] += sum(ended.expired for ended in self.loans.sweep(self.clock()))
        self.tell_cache()

    def check(self) -> None:
        """Hold the books against themselves (I5)."""
        self.extents.check()
        self.pool.check()
        self.loans.check()

    def tell_cache(self) -> None:
        """Let the router know what our prefix cache gained and lost."""
        tell_cache(self.actor, self.pool)

    def pin(self, message: Pin) -> None:
        """Lend what there is of a prefix."""
        if self.backing is not None:
            self.actor.spawn(self._fetch_and_lend(self.backing, message))
        else:
            self._lend(message)

    def _lend(self, message: Pin) -> None:
        lend_cached(self.actor, self.pool, self.loans, self.num_reserved, message)

    async def _fetch_and_lend(self, backing: Backing, message: Pin) -> None:
        fetching = self.actor.spawn(self._fetch(backing, message.digests))
        done, _ = await asyncio.wait({fetching}, timeout=FETCH_S)
        if not done:  # it goes on, and whatever it writes to is in use until it ends
            backing.rest(f"nothing came in {FETCH_S} s")
        self._lend(message)

    async def _fetch(self, backing: Backing, digests: tuple[bytes, ...]) -> None:
        """Get what the store behind ours has of a chain, as far as there is room."""
        known = self.store.get(digests)
        missing = digests[len(known) :]
        count = await backing.contains(missing)
        self.actor.claim(count - self.num_unreserved)
        blocks = self.pool.allocate(max(0, min(count, self.num_unreserved)))
        got = await backing.fetch(missing[: len(blocks)], blocks)
        parent = digests[len(known) - 1] if known else None
        for digest, block in zip(missing[:got], blocks[:got], strict=True):
            self.pool.insert(digest, block, parent)
            parent = digest
        self.pool.free([*known, *blocks])
        self.tell_cache()

    def evict(self, count: int) -> int:
        """Give up to `count` extents back whose contents nobody uses, and return how many."""
        kept = self.extents.minimum if self.spec.config.moves_kv else 0
        spare = self.num_unreserved // self.arena.extent_blocks
        evicted = self.store.evict(max(0, min(count, len(self.pool.extents) - kept, spare)))
        for blocks in evicted:
            self.arena.set_extent_owner(blocks.start // self.arena.extent_blocks, None)
        self.tell_cache()
        return len(evicted)

    # ---- What engines publish --------

    def publish(self, sender: Member, message: Publish) -> None:
        """Own what an engine owned until now; a prompt goes on to the router under a lease of ours."""
        key, done = (message.request, message.attempt), message.done
        if not self._is_fit(sender, message):
            self.actor.drop("unfit blocks published", sender=sender.name)
            if done is not None:
                self.actor.tell(ROUTER, Stranded(*key, f"{self.spec.name} cannot take its blocks"))
            return
        for block in message.blocks:
            self.arena.set_extent_owner(block, self.spec.slot)
        held = self.store.put(message.blocks, message.digests, message.part, message.parent)
        if self.backing is not None:
            self.backing.store(message.digests, held[: len(message.digests)])
        self.tell_cache()  # first: the hand-over makes the router look for it
        if done is not None:
            before = [block for segment in done.handle.segments for block in segment.blocks]
            self._hand_over(done, [*before, *held])
        self.store.free(held)

    def _is_fit(self, sender: Member, message: Publish) -> bool:
        """Whether the blocks are the sender's, and what it borrows before them is ours and lent for this request."""
        blocks, done = message.blocks, message.done
        is_owner = all(0 <= b < self.arena.num_blocks and self.arena.extent_owner(b) == sender.slot for b in blocks)
        if (
            not is_owner
            or len(set(blocks)) < len(blocks)
            or len(message.digests) + (message.part is not None) > len(blocks)
        ):
            return False
        if done is None:
            return True
        key, before = (message.request, message.attempt), done.handle.segments
        num_blocks = len(blocks) + sum(len(segment.blocks) for segment in before)
        return num_blocks == self.spec.layout.num_blocks(done.handle.num_tokens) and all(
            self.loans.is_lent(key, segment.lease) and set(segment.blocks) <= set(self.loans.named(segment.lease))
            for segment in before
        )

    def _hand_over(self, done: Prefilled, blocks: list[int]) -> None:
        key = done.request, done.attempt
        try:
            lease = self.store.lease(key, blocks, self.clock())
        except Overloaded as error:
            self.actor.tell(ROUTER, Stranded(*key, error.message))
            return
        segment = Segment(self.spec.name, lease, 0, tuple(blocks))
        handle = KVHandle(self.spec.node, self.spec.name, done.handle.layout, (segment,), done.handle.num_tokens)
        self.actor.tell(ROUTER, msgspec.structs.replace(done, handle=handle))
