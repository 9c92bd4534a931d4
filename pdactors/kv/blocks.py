"""`BlockPool`: one owner's account of the arena blocks in its extents. Integers only; it touches no memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from pdactors.errors import InvariantError, PDError
from pdactors.kv.prefix import Changes, PrefixCache
from pdactors.messages import Blocks


class NoBlocks(PDError):
    """Fewer blocks are free or evictable than were asked for."""


class BlockPool:
    """Counts references and leases of every block of one owner.

        free -- allocate --> used -- free --> cached (if it has a digest) -- evicted --> free
                                         `--> free (if not)        `-- match --> used

    A block that a lease names is leased whatever else it is, and becomes cached or free when its last lease and its
    last reference are gone. Blocks of other owners never appear here.
    """

    def __init__(self) -> None:
        self._extents: set[range] = set()
        self._owned: set[int] = set()
        self._free: dict[int, None] = {}  # a stack: the last one in is the warmest
        self._references: dict[int, int] = {}
        self._leases: dict[int, int] = {}
        self._prefixes = PrefixCache()

    @property
    def num_free(self) -> int:
        """Blocks that hold nothing."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could give: free or evictable."""
        return len(self._free) + self._prefixes.num_idle

    @property
    def extents(self) -> frozenset[range]:
        """The extents that this owner was given."""
        return frozenset(self._extents)

    def owns(self, block: int) -> bool:
        """Whether the block lies in one of this owner's extents."""
        return block in self._owned

    def add_extent(self, blocks: range) -> None:
        """Take over an extent, all of its blocks free.

        Raises:
            InvariantError: some of it is here already.
        """
        if not self._owned.isdisjoint(blocks):
            raise InvariantError(f"blocks {blocks.start}..{blocks.stop - 1} are owned already, at least in part")
        self._extents.add(blocks)
        self._owned.update(blocks)
        self._free.update(dict.fromkeys(reversed(blocks)))

    def receive(self, blocks: Sequence[int]) -> None:
        """Take blocks over with what they hold, an extent each and one reference to each.

        Raises:
            InvariantError: one of them is here already.
        """
        for block in blocks:
            self.add_extent(range(block, block + 1))
            del self._free[block]
            self._references[block] = 1

    def cede(self, blocks: Sequence[int]) -> None:
        """Give blocks, an extent each, away with what they hold: the counterpart of `receive`.

        Raises:
            InvariantError: one of them is not ours, or in use by more than one reference; nothing has changed.
        """
        if unfit := [b for b in blocks if self._references.get(b) != 1 or b in self._leases or b in self._prefixes]:
            raise InvariantError(f"cede: blocks {unfit} are not held by one reference alone")
        for block in blocks:
            self._extents.remove(range(block, block + 1))
            self._owned.remove(block)
            del self._references[block]

    def removable_extents(self) -> list[range]:
        """Return the extents without used or leased blocks, the fewest cached ones first, of these the oldest."""
        busy = self._references.keys() | self._leases.keys()
        ages = self._prefixes.ages()
        removable = [extent for extent in self._extents if busy.isdisjoint(extent)]

        def value(extent: range) -> tuple[int, int, int]:
            known = [ages[block] for block in extent if block in ages]
            return len(known), max(known, default=0), extent.start

        return sorted(removable, key=value)

    def remove_extent(self, blocks: range) -> None:
        """Give an extent up; what is cached in it is evicted.

        Raises:
            InvariantError: it is not ours, or something in it is used or leased.
        """
        if blocks not in self._extents:
            raise InvariantError(f"extent {blocks.start}..{blocks.stop - 1} is not owned")
        if busy := [b for b in blocks if b in self._references or b in self._leases]:
            raise InvariantError(f"extent {blocks.start}..{blocks.stop - 1} has blocks in use: {busy}")
        for block in blocks:
            if block in self._prefixes:
                self._release(self._prefixes.forget(block))
        for block in blocks:
            del self._free[block]
        self._owned.difference_update(blocks)
        self._extents.remove(blocks)

    def can_allocate(self, n: int) -> bool:
        """Whether `allocate(n)` would succeed."""
        return n <= self.num_available

    def allocate(self, n: int) -> list[int]:
        """Return `n` blocks with one reference each, evicting the least recently used cached ones if need be.

        Raises:
            NoBlocks: there are not that many; nothing has changed.
        """
        if n > self.num_available:
            raise NoBlocks(f"{n} blocks wanted, {self.num_free} free and {self._prefixes.num_idle} evictable")
        while len(self._free) < n:
            self._release(self._prefixes.evict())
        blocks = [self._free.popitem()[0] for _ in range(n)]
        self._references.update(dict.fromkeys(blocks, 1))
        return blocks

    def retain(self, blocks: Sequence[int]) -> None:
        """Add a reference to blocks that hold something.

        Raises:
            InvariantError: one of them is free or not ours; nothing has changed.
        """
        self._count_up(self._references, blocks, "retain")

    def free(self, blocks: Sequence[int]) -> None:
        """Drop a reference to each; `blocks` in token order.

        Raises:
            InvariantError: one of them has fewer references than that; nothing has changed.
        """
        self._count_down(self._references, blocks, "free")

    def lease(self, blocks: Sequence[int]) -> None:
        """Count a lease of each; a block may be named by many.

        Raises:
            InvariantError: one of them is free or not ours; nothing has changed.
        """
        self._count_up(self._leases, blocks, "lease")

    def unlease(self, blocks: Sequence[int]) -> None:
        """Take back what `lease` or `restore_lease` counted; `blocks` in token order.

        Raises:
            InvariantError: one of them has fewer leases than that; nothing has changed.
        """
        self._count_down(self._leases, blocks, "unlease")

    def restore_lease(self, blocks: Sequence[int]) -> None:
        """Count a lease that a lost predecessor gave; its blocks may look free in this new account.

        Raises:
            InvariantError: one of them is not ours; nothing has changed.
        """
        if foreign := [b for b in blocks if b not in self._owned]:
            raise InvariantError(f"restore_lease: blocks {foreign} are not owned")
        for block in blocks:
            self._free.pop(block, None)
            self._prefixes.wake(block)
            self._leases[block] = self._leases.get(block, 0) + 1

    def match(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix, with a reference to each."""
        blocks = self._prefixes.lookup(digests)
        self.retain(blocks)
        return blocks

    def match_spare(self, digests: Iterable[bytes], num_reserved: int) -> list[int]:
        """Match what can be taken out of use for others: `num_reserved` blocks stay to be allocated."""
        blocks = self.match(digests)
        while blocks and self.num_available < num_reserved:
            self.free([blocks.pop()])
        return blocks

    def cached(self, digest: bytes) -> int | None:
        """Return the block that holds what the digest names, without a reference; None if there is none."""
        found = self._prefixes.lookup((digest,))
        return found[0] if found else None

    def is_idle(self, block: int) -> bool:
        """Whether the block is cached and used by nobody: `allocate` may give it away."""
        return self._prefixes.is_idle(block)

    def insert(self, digest: bytes, block: int, parent: bytes | None) -> bool:
        """Make a block findable that is full and never written again; `parent` is the digest before it in the chain.

        Return False if the digest has a block already: the first one wins.

        Raises:
            InvariantError: the block is not in use, or holds another digest.
        """
        if block not in self._references and block not in self._leases:
            raise InvariantError(f"insert: block {block} is not in use")
        return self._prefixes.insert(digest, block, parent)

    def digests(self) -> list[bytes]:
        """Return the digests of all that is cached."""
        return self._prefixes.digests()

    def drain_events(self) -> Changes:
        """Return the digests added and evicted since the last call."""
        return self._prefixes.drain_events()

    def account(self) -> Blocks:
        """Return the account, each block counted once; `leased_in` is the caller's to set."""
        return Blocks(
            total=len(self._owned),
            free=len(self._free),
            cached=self._prefixes.num_idle,
            used=len(self._references.keys() - self._leases.keys()),
            leased_out=len(self._leases),
        )

    def check(self) -> None:
        """Raise InvariantError if a block is in no state or in two, or a count is off."""
        self._prefixes.check()
        for name, counts in (("reference", self._references), ("lease", self._leases)):
            if wrong := {block: count for block, count in counts.items() if count < 1}:
                raise InvariantError(f"{name} counts below 1: {wrong}")
        busy = self._references.keys() | self._leases.keys()
        idle = {block for block in self._owned if self._prefixes.is_idle(block)}
        for names, one, other in (
            ("free and in use", self._free.keys(), busy),
            ("free and cached", self._free.keys(), {b for b in self._free if b in self._prefixes}),
            ("cached as idle and in use", idle, busy),
        ):
            if both := one & other:
                raise InvariantError(f"blocks are {names}: {sorted(both)}")
        if set[int]().union(*self._extents) != self._owned:
            raise InvariantError("owned blocks are not those of the extents")
        placed = self._free.keys() | busy | idle
        if placed != self._owned or len(idle) != self._prefixes.num_idle:
            lost, foreign = sorted(self._owned - placed), sorted(placed - self._owned)
            raise InvariantError(f"blocks in no state: {lost}; in a state but not owned: {foreign}")

    def _count_up(self, counts: dict[int, int], blocks: Sequence[int], verb: str) -> None:
        if unfit := [b for b in blocks if b not in self._owned or b in self._free]:
            raise InvariantError(f"{verb}: blocks {unfit} are free or not owned")
        for block in blocks:
            self._prefixes.wake(block)
            counts[block] = counts.get(block, 0) + 1

    def _count_down(self, counts: dict[int, int], blocks: Sequence[int], verb: str) -> None:
        wanted = Counter(blocks)
        if over := [b for b, n in wanted.items() if counts.get(b, 0) < n]:
            raise InvariantError(f"{verb}: blocks {over} are not held that often")
        for block, n in wanted.items():
            counts[block] -= n
            if counts[block] == 0:
                del counts[block]
        unused = [b for b in wanted if b not in self._references and b not in self._leases]
        self._prefixes.settle([b for b in unused if b in self._prefixes])
        self._release([b for b in unused if b not in self._prefixes])

    def _release(self, blocks: Sequence[int]) -> None:
        self._free.update(dict.fromkeys(reversed(blocks)))
