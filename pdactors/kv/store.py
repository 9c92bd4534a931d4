"""`ArenaStore`: what a node's engines published: blocks of its arena, found by digest and read under leases. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdactors.kv.blocks import BlockPool
from pdactors.kv.loans import Key, Loans
from pdactors.messages import Lease


class ArenaStore:
    """The store's contract over the migrator's own pool and lease records.

        put --> in use -- free --> cached -- lease --> leased out
                   ^                 |  ^-- its end ------'
                   '------ get ------'-- evict --> free

    `put` copies nothing: who published a block owned it, and it is the store's from then on. Any number of engines
    read one block at once. What is neither in use nor leased is evicted when somebody lacks memory, the least recently
    used first; whoever asks for it then computes it again.
    """

    def __init__(self, pool: BlockPool, loans: Loans) -> None:
        self._pool = pool
        self._loans = loans

    def contains(self, digests: Sequence[bytes]) -> int:
        """Return how many leading blocks of a chain are here."""
        return next((i for i, digest in enumerate(digests) if self._pool.cached(digest) is None), len(digests))

    def put(
        self, blocks: Sequence[int], digests: Sequence[bytes], part: bytes | None, parent: bytes | None
    ) -> list[int]:
        """Take over blocks that follow the one of digest `parent`, and return who holds their content now.

        The leading ones are full and have `digests`; where one is known already, its first block stays and the new one
        is free. The next one can be found by a `part` of it. What is returned has a reference, the caller's to free.

        Raises:
            InvariantError: a block is the store's already.
        """
        self._pool.receive(blocks)
        held = list(blocks)
        for i, digest in enumerate(digests):
            known = self._pool.cached(digest)
            if known is None:
                self._pool.insert(digest, blocks[i], parent)
            else:
                self._pool.retain([known])
                self._pool.free([blocks[i]])
                held[i] = known
            parent = digest
        if part is not None:
            self._pool.insert(part, blocks[len(digests)], parent)
        return held

    def get(self, digests: Sequence[bytes]) -> list[int]:
        """Return the blocks of the leading part of a chain that is here, with a reference to each."""
        return self._pool.match(digests)

    def free(self, blocks: Sequence[int]) -> None:
        """Let go of what `put` or `get` returned; full blocks stay."""
        self._pool.free(blocks)

    def lease(self, key: Key, blocks: Sequence[int], now: float) -> Lease:
        """Lend blocks to whoever serves a request; the record stands when this returns.

        Raises:
            Overloaded: every lease record is in use.
        """
        return self._loans.lend(key, blocks, now)

    def evict(self, count: int) -> list[range]:
        """Give up to `count` extents up that nobody uses anything of, free ones first, and return them."""
        evicted = self._pool.removable_extents()[:count]
        for blocks in evicted:
            self._pool.remove_extent(blocks)
        return evicted
