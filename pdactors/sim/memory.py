"""A node's KV memory under the virtual clock: who has which extents, and which leases stand. No bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdactors.actors.extent_keeper import STEP_BLOCKS
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.messages import Lease
from pdactors.policy import extents

MAX_EXTENT_BLOCKS = 64
Key = tuple[str, int]  # request, attempt


@dataclass(frozen=True)
class NoBytes:
    """Stands where the engine expects an arena: copies take no time of their own."""

    layout: KVLayout

    def copy_block(self, source: int, target: int) -> None:
        """Copy nothing."""


@dataclass(eq=False)
class Owner:
    """One who has extents: its pool, and how many blocks of it nobody claims."""

    pool: BlockPool
    num_unreserved: Callable[[], int]
    num_extents: int = 0


class NodeMemory:
    """Grants and recalls extents as a node's migrator does, by the same policy and at once.

    Where there is a `store` extents are single blocks, which engines give to it one by one; it alone keeps what nobody
    uses, and loses that when somebody lacks memory.
    """

    def __init__(
        self, num_blocks: int, num_engines: int, num_owners: int, sequence_blocks: int, store: Owner | None = None
    ) -> None:
        share = num_blocks // (16 * num_engines)
        self.extent_blocks = 1 if store else max(1, min(MAX_EXTENT_BLOCKS, share))
        self._step = max(self.extent_blocks, min(STEP_BLOCKS, share))
        self._store = store
        self._num_extents = -(-num_blocks // self.extent_blocks)
        self._num_blocks = num_blocks
        self._num_owners = num_owners
        self._minimum = extents.guaranteed(self._num_extents, num_owners, -(-sequence_blocks // self.extent_blocks))
        self._reserve = 0 if store else extents.reserve(self._num_extents, num_owners)
        self._owners: dict[int, Owner] = {}
        self._in_vain: Counter[int] = Counter()
        self._returned: list[range] = []
        self._num_given = 0

    @property
    def max_blocks(self) -> int:
        """How many blocks one owner can come to have."""
        reachable = extents.reachable(self._num_extents, self._num_owners, self._minimum)
        return min(self._num_blocks, reachable * self.extent_blocks)

    @property
    def spare_blocks(self) -> int:
        """With fewer to spare an owner asks for another extent."""
        return (self._step + 1) // 2

    def add(self, owner: Owner) -> None:
        """Take an owner in, with its first extent."""
        self._owners[len(self._owners)] = owner
        self.mind(owner, 1)

    def mind(self, owner: Owner, lacking: int) -> bool:
        """Get an owner the blocks that it lacks, and half an extent to spare; say whether it got any.

        What lies idle is taken before anything is evicted.
        """
        spare = owner.num_unreserved()
        missed = max(lacking, self._step if spare < self.spare_blocks else 0)
        wanted = -(-missed // self.extent_blocks)
        me = next(number for number, other in self._owners.items() if other is owner)
        if not wanted and self._store is not None:  # which alone keeps what nobody uses
            return False
        if not wanted:
            empty = spare - (owner.pool.num_available - owner.pool.num_free)
            idle = -(-(2 * self.extent_blocks - empty) // self.extent_blocks)
            return empty < self.extent_blocks and self._grant(me, idle, self._num_free - self._reserve) > 0
        if self._store is not None and owner is not self._store:
            short = extents.shortage(wanted, me, self._owned(), self._num_free, self._minimum)
            self._take_back(self._store, short, 0)
        granted = self._grant(me, wanted, self._num_free)
        if granted < wanted:
            self._recall(wanted - granted, me)
            granted += self._grant(me, wanted - granted, self._num_free)
        if self._num_free < self._reserve:
            self._recall(self._reserve - self._num_free, me, kept=self.extent_blocks)
        return granted > 0

    def give(self, owner: Owner, count: int) -> None:
        """The store got blocks from an owner."""
        assert self._store is not None
        owner.num_extents -= count
        self._store.num_extents += count

    @property
    def _num_free(self) -> int:
        return self._num_extents - self._num_given + len(self._returned)

    def _recall(self, wanted: int, number: int, kept: int = 0) -> None:
        """Have others return extents; each keeps so many blocks that nobody claims."""
        owned = {other: count for other, count in self._owned().items() if self._owners[other] is not self._store}
        for other, count in extents.recall(wanted, number, owned, self._minimum, self._in_vain).items():
            self._in_vain[other] += 1
            if self._take_back(self._owners[other], count, kept):
                del self._in_vain[other]

    def _owned(self) -> dict[int, int]:
        return {number: owner.num_extents for number, owner in self._owners.items()}

    def _grant(self, number: int, wanted: int, num_free: int) -> int:
        count = extents.grant(wanted, number, self._owned(), num_free, self._minimum)
        owner = self._owners[number]
        for _ in range(count):
            owner.pool.add_extent(self._returned.pop() if self._returned else self._next())
        owner.num_extents += count
        return count

    def _next(self) -> range:
        start = self._num_given * self.extent_blocks
        self._num_given += 1
        return range(start, min(start + self.extent_blocks, self._num_blocks))

    def _take_back(self, owner: Owner, count: int, kept: int) -> int:
        """Have an owner return extents that hold nothing live, as `ExtentKeeper.give_back` does; return how many."""
        spare = owner.num_unreserved() - kept
        former = owner.num_extents
        minimum = self._minimum if owner in self._owners.values() else 0
        for blocks in owner.pool.removable_extents()[:count] if count > 0 and spare > 0 else ():
            if owner.num_extents <= minimum or spare < len(blocks):
                break
            owner.pool.remove_extent(blocks)
            owner.num_extents -= 1
            spare -= len(blocks)
            self._returned.append(blocks)
        return former - owner.num_extents


@dataclass(eq=False)
class _Record:
    key: Key
    lender: str
    pool: BlockPool
    blocks: tuple[int, ...]
    is_held: bool = False
    is_revoked: bool = False


@dataclass
class Leases:
    """What the owners of a node lend each other. A lease ends as soon as the arena's rules let it."""

    ended: Callable[[str, Key], object]  # told of the lender, and for which request
    _records: dict[Lease, _Record] = field(default_factory=dict)
    _lent: dict[tuple[str, Key], list[Lease]] = field(default_factory=dict)
    _count: int = 0

    def lend(self, lender: str, key: Key, pool: BlockPool, blocks: Sequence[int]) -> Lease:
        """Lend blocks that hold something."""
        pool.lease(blocks)
        self._count += 1
        lease = Lease(self._count, 1)
        self._records[lease] = _Record(key, lender, pool, tuple(blocks))
        self._lent.setdefault((lender, key), []).append(lease)
        return lease

    def borrow(self, lease: Lease) -> tuple[int, ...] | None:
        """Accept a lease and return its blocks; None if it has ended."""
        record = self._records.get(lease)
        if record is None or record.is_revoked:
            return None
        record.is_held = True
        return record.blocks

    def is_lent(self, lender: str, key: Key, lease: Lease) -> bool:
        """Whether that lender still honours that lease."""
        return lease in self._lent.get((lender, key), ())

    def give_back(self, lease: Lease) -> None:
        """Read it no more. Idempotent."""
        if lease in self._records:
            self._end(lease)

    def revoke(self, lender: str, key: Key) -> None:
        """Let nobody accept what was lent for a request; who has it keeps it until he gives it back."""
        for lease in list(self._lent.get((lender, key), ())):
            record = self._records[lease]
            record.is_revoked = True
            if not record.is_held:
                self._end(lease)

    def _end(self, lease: Lease) -> None:
        record = self._records.pop(lease)
        record.pool.unlease(record.blocks)
        mine = self._lent[record.lender, record.key]
        mine.remove(lease)
        if not mine:
            del self._lent[record.lender, record.key]
        self.ended(record.lender, record.key)
