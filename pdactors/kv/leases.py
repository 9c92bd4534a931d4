"""Leases: how one engine lends KV blocks to another without a lock or a message.

A `Lessor` lends blocks that its process owns, a `Holder` reads them in place; which blocks are free is not known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pdactors.errors import InvariantError, Overloaded, PDError
from pdactors.kv.lease_table import GRACE_S, MARGIN_S, REQUEST_BYTES, LeaseTable
from pdactors.messages import Lease

__all__ = ["GRACE_S", "MARGIN_S", "Ended", "Holder", "LeaseLost", "LeaseTable", "Lessor", "LiveLease"]


class LeaseLost(PDError):
    """The lease has ended, was revoked, or belongs to somebody else: its blocks must not be read any more."""


@dataclass(frozen=True, slots=True)
class LiveLease:
    """A lease that its lessor still has to honour."""

    lease: Lease
    request: str
    attempt: int
    blocks: tuple[int, ...]
    holder_slot: int | None  # None: not accepted yet
    revoked: bool
    expires_s: float


@dataclass(frozen=True, slots=True)
class Ended:
    """A lease that ended; its blocks belong to the lessor alone again."""

    lease: Lease
    request: str
    attempt: int
    blocks: tuple[int, ...]
    expired: bool


@dataclass(slots=True)
class _Given:
    lease: Lease
    request: str
    attempt: int
    blocks: tuple[int, ...]
    ending_since: float | None = None  # when a sweep first found it at its end


class Lessor:
    """The lending side of one slot. One process at a time may be it; the supervisor sees to that.

        (free) -- grant --> published -- accept --> held -- release --> (free at the next sweep)
                                |                     |
                       revoke, or expiry           expiry
                                |                     |
                             ending  -- GRACE_S -->  (free)

    A successor of a lost process calls `rebuild` before anything else.
    """

    def __init__(self, table: LeaseTable, slot: int, incarnation: int) -> None:
        own = table.records_of(slot)
        self._table = table
        self._slot = slot
        self._incarnation = incarnation
        self._free = deque(i for i in own if table.generation[i] == 0)  # first in, first out: a late holder meets rest
        self._given: dict[int, _Given] = {}
        rows = slice(own.start, own.stop)
        self._next_generation = 1 + max(int(table.generation[rows].max()), int(table.revoked[rows].max()))

    @property
    def num_left(self) -> int:
        """Records that are in use for nothing."""
        return len(self._free)

    def grant(self, request: str, attempt: int, blocks: Sequence[int], deadline: float) -> Lease:
        """Publish a lease of `blocks` that ends at `deadline` unless its holder renews it.

        Raises:
            Overloaded: every record of this slot is in use.
            ValueError: too many blocks or too long a request id for a record.
        """
        table = self._table
        name = request.encode("ascii")
        if len(name) > REQUEST_BYTES:
            raise ValueError(f"request id must have at most {REQUEST_BYTES} characters, got {len(name)}")
        if len(blocks) > table.blocks.shape[1]:
            raise ValueError(f"a lease names at most {table.blocks.shape[1]} blocks, got {len(blocks)}")
        if not self._free:
            raise Overloaded(f"all {table.leases_per_slot} lease records of slot {self._slot} are in use")
        index = self._free.popleft()
        lease = Lease(index, self._next_generation)
        self._next_generation += 1
        table.lessor_slot[index] = self._slot
        table.lessor_incarnation[index] = self._incarnation
        table.request[index] = name
        table.attempt[index] = attempt
        table.deadline[index] = deadline
        table.num_blocks[index] = len(blocks)
        table.blocks[index, : len(blocks)] = blocks
        table.generation[index] = lease.generation
        self._given[index] = _Given(lease, request, attempt, tuple(blocks))
        return lease

    def extend(self, lease: Lease, deadline: float) -> None:
        """Let a lease that nobody accepted yet live until `deadline`; an ended lease is left alone."""
        given = self._given.get(lease.index)
        if given is not None and given.lease == lease and self._table.closing[lease.index] != lease.generation:
            self._table.deadline[lease.index] = deadline

    def revoke(self, lease: Lease) -> None:
        """Let nobody accept the lease from now on; who has accepted it keeps it. An ended lease is left alone."""
        given = self._given.get(lease.index)
        if given is not None and given.lease == lease:
            self._table.revoked[lease.index] = lease.generation

    def sweep(self, now: float) -> list[Ended]:
        """End what was released, and what has been revoked or expired for `GRACE_S` of sweeps."""
        ended = []
        for given in list(self._given.values()):
            index, generation = given.lease.index, given.lease.generation
            released = bool(self._table.released[index] == generation)
            expired = not released and now > self._table.expiry(index, generation)
            if released or self._is_over(given, now, expired):
                self._end(given)
                ended.append(Ended(given.lease, given.request, given.attempt, given.blocks, expired))
        return ended

    def live(self) -> list[LiveLease]:
        """Return every lease that has not ended."""
        table, live = self._table, []
        for given in self._given.values():
            index, generation = given.lease.index, given.lease.generation
            holder = int(table.holder_slot[index]) if table.accepted[index] == generation else None
            revoked = bool(table.revoked[index] == generation)
            expires_s = table.expiry(index, generation)
            live.append(LiveLease(given.lease, given.request, given.attempt, given.blocks, holder, revoked, expires_s))
        return live

    def rebuild(self) -> list[LiveLease]:
        """Take over what earlier incarnations of this slot published; the blocks named must stay untouched."""
        table = self._table
        for index in table.records_of(self._slot):
            generation = int(table.generation[index])
            if generation == 0 or index in self._given:
                continue
            table.lessor_incarnation[index] = self._incarnation
            request, attempt = table.request[index].decode("ascii"), int(table.attempt[index])
            self._given[index] = _Given(Lease(index, generation), request, attempt, table.blocks_named(index))
        return self.live()

    def end_all(self) -> None:
        """End every lease now: whoever holds one does not read its blocks any more."""
        for given in list(self._given.values()):
            self._end(given)

    def check(self) -> None:
        """Raise InvariantError unless every record is either free or given, and the table agrees."""
        own = self._table.records_of(self._slot)
        if len(set(self._free)) != len(self._free) or sorted([*self._free, *self._given]) != list(own):
            raise InvariantError(
                f"slot {self._slot}: {len(self._free)} free + {len(self._given)} given lease records are not {len(own)}"
            )
        expected = {index: given.lease.generation for index, given in self._given.items()}
        for index in own:
            if self._table.generation[index] != expected.get(index, 0):
                raise InvariantError(
                    f"lease record {index}: generation is {self._table.generation[index]}, not {expected.get(index, 0)}"
                )

    def _is_over(self, given: _Given, now: float, expired: bool) -> bool:
        table, index, generation = self._table, given.lease.index, given.lease.generation
        if expired and table.closing[index] != generation:
            table.closing[index] = generation
            given.ending_since = now
            return False
        unclaimed = table.revoked[index] == generation and table.accepted[index] != generation
        if not expired and not unclaimed:  # accepted or renewed just before it saw our mark
            table.closing[index] = 0
            given.ending_since = None
            return False
        if given.ending_since is None:
            given.ending_since = now
        return now - given.ending_since >= GRACE_S

    def _end(self, given: _Given) -> None:
        index = given.lease.index
        self._table.revoked[index] = given.lease.generation
        self._table.generation[index] = 0
        del self._given[index]
        self._free.append(index)


class Holder:
    """The reading side of one process. A lease is meant for one holder; the router sees to that."""

    def __init__(self, table: LeaseTable, slot: int, incarnation: int) -> None:
        table.records_of(slot)
        self._table = table
        self._slot = slot
        self._incarnation = incarnation
        self._held: set[Lease] = set()

    @property
    def held(self) -> frozenset[Lease]:
        """Leases that were accepted and not released yet, lost ones among them."""
        return frozenset(self._held)

    def accept(self, lease: Lease, now: float, until: float) -> tuple[int, ...]:
        """Take the lease, hold it at least until its deadline and `until`, and return its blocks.

        Raises:
            LeaseLost: it ended, was revoked, is about to expire, or somebody accepted it already.
        """
        blocks = self._inspect(lease, now)
        self._claim(lease, until)
        self._confirm(lease)
        return blocks

    def renew(self, lease: Lease, until: float) -> None:
        """Hold the lease until `until`.

        Raises:
            LeaseLost: it has ended or is ending. Stop reading its blocks, then `release` it.
        """
        if not self._stands(lease):
            raise LeaseLost(f"lease {lease.index}.{lease.generation} is not held any more")
        self._table.renewed_until[lease.index] = until
        if not self._stands(lease):
            raise LeaseLost(f"lease {lease.index}.{lease.generation} ended while it was renewed")

    def is_valid(self, lease: Lease, now: float) -> bool:
        """Whether the lease's blocks may be read for another `MARGIN_S` at least."""
        return self._stands(lease) and now + MARGIN_S <= self._table.expiry(lease.index, lease.generation)

    def release(self, lease: Lease) -> None:
        """Give the lease back; nothing of it is read after this call. Idempotent."""
        if lease in self._held:
            self._held.remove(lease)
            if self._table.generation[lease.index] == lease.generation and self._is_mine(lease):
                self._table.released[lease.index] = lease.generation

    def end_predecessor(self) -> int:
        """Release what every other incarnation of this slot holds, and return how many leases that were.

        Only when those processes are dead: their successor calls it, or the supervisor once it has reaped them.
        """
        table = self._table
        abandoned = (table.holder_slot == self._slot) & (table.holder_incarnation != self._incarnation)
        abandoned &= (table.generation != 0) & (table.accepted == table.generation)
        indices = np.flatnonzero(abandoned & (table.released != table.generation)).tolist()
        for index in indices:
            table.released[index] = table.accepted[index]
        return len(indices)

    def _inspect(self, lease: Lease, now: float) -> tuple[int, ...]:
        table, index, generation = self._table, lease.index, lease.generation
        name = f"lease {index}.{generation}"
        if not 0 <= index < table.num_records or generation <= 0:
            raise LeaseLost(f"{name}: no such record; the table has {table.num_records}")
        if table.generation[index] != generation:
            raise LeaseLost(f"{name} has ended; its record is at generation {table.generation[index]}")
        if table.accepted[index] == generation:
            raise LeaseLost(f"{name} was accepted already, by slot {table.holder_slot[index]}")
        if table.revoked[index] == generation:
            raise LeaseLost(f"{name} was revoked")
        deadline = float(table.deadline[index])
        if now + MARGIN_S > deadline or table.closing[index] == generation:
            raise LeaseLost(f"{name} expires in {deadline - now:.3f} s")
        return table.blocks_named(index)

    def _claim(self, lease: Lease, until: float) -> None:
        table, index = self._table, lease.index
        table.holder_slot[index] = self._slot
        table.holder_incarnation[index] = self._incarnation
        table.renewed_until[index] = until
        table.accepted[index] = lease.generation
        self._held.add(lease)

    def _confirm(self, lease: Lease) -> None:
        if self._stands(lease) and self._table.revoked[lease.index] != lease.generation:
            return
        self.release(lease)
        raise LeaseLost(f"lease {lease.index}.{lease.generation} ended while it was accepted")

    def _stands(self, lease: Lease) -> bool:
        table, index, generation = self._table, lease.index, lease.generation
        return bool(
            lease in self._held
            and table.generation[index] == generation
            and table.closing[index] != generation
            and self._is_mine(lease)
        )

    def _is_mine(self, lease: Lease) -> bool:
        table, index = self._table, lease.index
        return bool(
            table.accepted[index] == lease.generation
            and table.holder_slot[index] == self._slot
            and table.holder_incarnation[index] == self._incarnation
        )
