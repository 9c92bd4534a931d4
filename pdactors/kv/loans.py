"""`Loans`: what one engine lends and borrows, its pool and its lease records kept in step. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from pdactors.errors import InvariantError, Overloaded
from pdactors.kv.blocks import BlockPool
from pdactors.kv.lease_table import LeaseTable
from pdactors.kv.leases import Ended, Holder, LeaseLost, Lessor, LiveLease
from pdactors.messages import Lease

Key = tuple[str, int]  # request, attempt


class Loans:
    """What this engine lends to others, by request, and what it borrows.

    A lent block counts as leased in the pool until the lease has ended, whoever else uses it.
    """

    def __init__(self, pool: BlockPool, table: LeaseTable, slot: int, incarnation: int, lease_s: float) -> None:
        self._pool = pool
        self._lessor = Lessor(table, slot, incarnation)
        self._table = table
        self._holder = Holder(table, slot, incarnation)
        self._lease_s = lease_s
        self._lent: dict[Key, list[Lease]] = {}

    def take_over(self) -> int:
        """Continue a lost predecessor's books: end what it borrowed, honour what it lent. Returns how much it borrowed.

        The pool must have its extents by now.
        """
        ended = self._holder.end_predecessor()
        for live in self._lessor.rebuild():
            self._pool.restore_lease(live.blocks)
            self._lent.setdefault((live.request, live.attempt), []).append(live.lease)
            self._lessor.revoke(live.lease)
        return ended

    # ---- Lending --------

    def lend(self, key: Key, blocks: Sequence[int], now: float) -> Lease:
        """Lend blocks of ours that hold something; the record stands when this returns.

        Raises:
            Overloaded: every lease record is in use.
        """
        self._pool.lease(blocks)  # first, so that no record names what is not ours
        try:
            lease = self._lessor.grant(*key, blocks, now + self._lease_s)
        except (Overloaded, ValueError):
            self._pool.unlease(blocks)
            raise
        self._lent.setdefault(key, []).append(lease)
        return lease

    @property
    def lent_for(self) -> tuple[Key, ...]:
        """Whom something is lent for."""
        return tuple(self._lent)

    @property
    def num_left(self) -> int:
        """How many leases more could be given."""
        return self._lessor.num_left

    def is_lent(self, key: Key, lease: Lease) -> bool:
        """Whether we still honour that lease."""
        return lease in self._lent.get(key, ())

    def revoke(self, key: Key, *, spared: Lease | None = None) -> None:
        """Let nobody accept what was lent for a request, but for `spared`; who has accepted keeps it until released."""
        for lease in self._lent.get(key, ()):
            if lease != spared:
                self._lessor.revoke(lease)

    def sweep(self, now: float) -> list[Ended]:
        """Take back what holders released, what was revoked unaccepted, and what expired."""
        ended = self._lessor.sweep(now)
        for lease in ended:
            self._pool.unlease(lease.blocks)
            key = (lease.request, lease.attempt)
            self._lent[key].remove(lease.lease)
            if not self._lent[key]:
                del self._lent[key]
        return ended

    def live(self) -> list[LiveLease]:
        """Return what is lent."""
        return self._lessor.live()

    # ---- Borrowing --------

    def borrow(self, lease: Lease, now: float) -> tuple[int, ...]:
        """Accept a lease and return its blocks, which are ours to read until we give it back.

        Raises:
            LeaseLost: it has ended, or somebody else has it.
        """
        return self._holder.accept(lease, now, now + self._lease_s)

    def named(self, lease: Lease) -> tuple[int, ...]:
        """Return the blocks of a lease that we hold."""
        return self._table.blocks_named(lease.index)

    def give_back(self, lease: Lease) -> None:
        """End a lease; nothing of it is read any more. Idempotent."""
        self._holder.release(lease)

    def renew(self, now: float) -> set[Lease]:
        """Keep everything for another term: what is borrowed, and what is lent and waits for its borrower.

        Returns the borrowed leases that are lost.
        """
        for live in self._lessor.live():
            if live.holder_slot is None and not live.revoked:
                self._lessor.extend(live.lease, now + self._lease_s)
        lost = set()
        for lease in self._holder.held:
            try:
                self._holder.renew(lease, now + self._lease_s)
            except LeaseLost:
                lost.add(lease)
        return lost

    @property
    def borrowed(self) -> frozenset[Lease]:
        """Leases that we hold."""
        return self._holder.held

    def check(self) -> None:
        """Raise InvariantError unless records and books agree."""
        self._lessor.check()
        given = {live.lease for live in self._lessor.live()}
        filed = {lease for leases in self._lent.values() for lease in leases}
        if given != filed:
            raise InvariantError(f"leases given and filed differ: {sorted(lease.index for lease in given ^ filed)}")
