"""Two engines of one node that lend to each other: pools, books and lease records stay in step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdactors.errors import InvariantError, Overloaded
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.kv.leases import GRACE_S, MARGIN_S, Ended, LeaseLost
from pdactors.kv.loans import Key, Loans
from pdactors.messages import Blocks, Lease

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=2, dtype="float32")
LEASE_S = 10.0
NUM_BLOCKS = 8  # of each engine
KEY, OTHER_KEY = ("r", 1), ("r", 2)


@dataclass
class House:
    """One engine's memory and loans."""

    arena: Arena
    slot: int
    incarnation: int = 0

    def __post_init__(self) -> None:
        self.succeed()

    def succeed(self) -> int:
        """Be a new process in the same slot; return what `take_over` says."""
        self.incarnation += 1
        self.pool = BlockPool()
        self.pool.add_extent(range(self.slot * NUM_BLOCKS, (self.slot + 1) * NUM_BLOCKS))
        self.loans = Loans(self.pool, self.arena.leases(), self.slot, self.incarnation, LEASE_S)
        return self.loans.take_over()

    def check(self) -> None:
        self.pool.check()
        self.loans.check()


def make_arena(leases_per_slot: int = 3) -> Arena:
    return Arena.create(
        LAYOUT,
        2 * NUM_BLOCKS,
        extent_blocks=NUM_BLOCKS,
        num_slots=3,
        leases_per_slot=leases_per_slot,
        max_lease_blocks=4,
    )


@pytest.fixture
def arena() -> Iterator[Arena]:
    with make_arena() as arena:
        yield arena


@pytest.fixture
def lender(arena: Arena) -> Iterator[House]:
    house = House(arena, 0)
    yield house
    house.check()


@pytest.fixture
def borrower(arena: Arena) -> Iterator[House]:
    house = House(arena, 1)
    yield house
    house.check()


def lend(lender: House, count: int = 2, key: Key = KEY, now: float = 0.0) -> tuple[Lease, list[int]]:
    """Lend new blocks that nobody else uses."""
    blocks = lender.pool.allocate(count)
    lease = lender.loans.lend(key, blocks, now)
    lender.pool.free(blocks)
    return lease, blocks


def ended(lease: Lease, blocks: list[int], key: Key = KEY, *, expired: bool = False) -> list[Ended]:
    return [Ended(lease, *key, tuple(blocks), expired)]


# ---- Lending and borrowing --------


def test_lent_blocks_are_leased_until_they_are_given_back_and_swept(lender: House, borrower: House) -> None:
    lease, blocks = lend(lender)
    assert lender.pool.account() == Blocks(total=8, free=6, leased_out=2)
    assert borrower.loans.borrow(lease, 0.0) == tuple(blocks)
    assert borrower.loans.borrowed == {lease}
    assert borrower.loans.named(lease) == tuple(blocks)
    assert borrower.pool.account() == Blocks(total=8, free=8)
    assert lender.loans.sweep(1.0) == []
    borrower.loans.give_back(lease)
    borrower.loans.give_back(lease)
    assert borrower.loans.borrowed == frozenset()
    assert lender.pool.account().leased_out == 2
    assert lender.loans.sweep(1.0) == ended(lease, blocks)
    assert lender.pool.account() == Blocks(total=8, free=8)


def test_both_lend_to_each_other(lender: House, borrower: House) -> None:
    there, _ = lend(lender)
    back, _ = lend(borrower, 3)
    lender.loans.borrow(back, 0.0)
    borrower.loans.borrow(there, 0.0)
    lender.loans.give_back(back)
    assert [e.lease for e in borrower.loans.sweep(0.0)] == [back]
    assert lender.loans.sweep(0.0) == []


def test_a_lease_is_borrowed_once(arena: Arena, lender: House, borrower: House) -> None:
    lease, _ = lend(lender)
    borrower.loans.borrow(lease, 0.0)
    for late in (borrower.loans, Loans(BlockPool(), arena.leases(), 2, 1, LEASE_S)):
        with pytest.raises(LeaseLost, match="accepted already"):
            late.borrow(lease, 0.0)
    assert borrower.loans.borrowed == {lease}


def test_a_block_may_be_lent_many_times(lender: House, borrower: House) -> None:
    blocks = lender.pool.allocate(2)
    leases = [lender.loans.lend(key, blocks, 0.0) for key in (KEY, KEY, OTHER_KEY)]
    lender.pool.free(blocks)
    for left, lease in zip((2, 2, 0), leases, strict=True):
        borrower.loans.borrow(lease, 0.0)
        borrower.loans.give_back(lease)
        lender.loans.sweep(0.0)
        assert lender.pool.account().leased_out == left
        lender.check()


def test_what_is_lent_is_known_by_its_key(lender: House) -> None:
    lease, _ = lend(lender)
    assert lender.loans.is_lent(KEY, lease)
    assert not lender.loans.is_lent(OTHER_KEY, lease)
    assert not lender.loans.is_lent(KEY, Lease(lease.index, lease.generation + 1))
    lender.loans.revoke(KEY)
    assert lender.loans.is_lent(KEY, lease)  # it has not ended yet
    lender.loans.sweep(0.0)
    lender.loans.sweep(1.0)
    assert not lender.loans.is_lent(KEY, lease)


def test_a_full_table_lends_nothing_and_changes_nothing(lender: House) -> None:
    for _ in range(3):
        lend(lender, 1)
    blocks = lender.pool.allocate(1)
    before = lender.pool.account()
    with pytest.raises(Overloaded):
        lender.loans.lend(KEY, blocks, 0.0)
    assert lender.pool.account() == before
    assert len(lender.loans.live()) == 3


def test_what_is_not_ours_is_lent_to_nobody_and_a_successor_hears_nothing_of_it(lender: House) -> None:
    (own,) = lender.pool.allocate(1)
    with pytest.raises(InvariantError, match="not owned"):
        lender.loans.lend(KEY, [own, NUM_BLOCKS], 0.0)
    assert lender.loans.live() == []
    assert lender.pool.account() == Blocks(total=8, free=7, used=1)
    lender.pool.free([own])
    assert lender.succeed() == 0


def test_lent_blocks_that_are_cached_stay_cached_when_they_come_back(lender: House, borrower: House) -> None:
    blocks = lender.pool.allocate(1)
    lender.pool.insert(b"digest", blocks[0], None)
    lease = lender.loans.lend(KEY, blocks, 0.0)
    lender.pool.free(blocks)
    borrower.loans.borrow(lease, 0.0)
    borrower.loans.give_back(lease)
    lender.loans.sweep(0.0)
    assert lender.pool.account() == Blocks(total=8, free=7, cached=1)
    assert lender.pool.match([b"digest"]) == blocks


# ---- Revoking --------


def test_one_lease_of_a_request_can_be_spared(lender: House, borrower: House) -> None:
    old, new = lend(lender, 1), lend(lender, 1)
    lender.loans.revoke(KEY, spared=new[0])
    lender.loans.sweep(0.0)
    assert lender.loans.sweep(2 * GRACE_S) == ended(*old)
    assert borrower.loans.borrow(new[0], 0.0) == tuple(new[1])


def test_revoking_a_request_ends_what_nobody_borrowed_and_nothing_else(lender: House, borrower: House) -> None:
    offered, held, other = (lend(lender, 1, key) for key in (KEY, KEY, OTHER_KEY))
    borrower.loans.borrow(held[0], 0.0)
    lender.loans.revoke(KEY)
    lender.loans.revoke(KEY)
    lender.loans.revoke(("unknown", 1))
    with pytest.raises(LeaseLost, match="revoked"):
        borrower.loans.borrow(offered[0], 0.0)
    assert lender.loans.sweep(0.0) == []
    assert lender.loans.sweep(2 * GRACE_S) == ended(*offered)
    assert {live.lease for live in lender.loans.live()} == {held[0], other[0]}
    borrower.loans.give_back(held[0])
    assert lender.loans.sweep(0.0) == ended(*held)
    assert borrower.loans.borrow(other[0], 0.0) == tuple(other[1])


# ---- Time --------


def test_renewing_keeps_what_is_borrowed(lender: House, borrower: House) -> None:
    lease, blocks = lend(lender)
    borrower.loans.borrow(lease, 0.0)
    for now in (8.0, 16.0, 24.0):
        assert borrower.loans.renew(now) == set()
        assert lender.loans.sweep(now + LEASE_S) == []
    late = 24.0 + LEASE_S + 0.1
    assert lender.loans.sweep(late) == []
    assert borrower.loans.renew(late) == {lease}
    assert borrower.loans.renew(late) == {lease}  # it is lost until it is given back
    assert lender.loans.sweep(late + 2 * GRACE_S) == ended(lease, blocks, expired=True)
    borrower.loans.give_back(lease)
    assert borrower.loans.renew(late) == set()


def test_renewing_keeps_what_waits_for_its_borrower(lender: House, borrower: House) -> None:
    lease, blocks = lend(lender)
    lender.loans.renew(8.0)
    with pytest.raises(LeaseLost):
        borrower.loans.borrow(lease, 8.0 + LEASE_S - MARGIN_S / 2)
    assert lender.loans.sweep(8.0 + LEASE_S) == []
    assert borrower.loans.borrow(lease, 8.0 + LEASE_S - 2 * MARGIN_S) == tuple(blocks)


def test_nothing_is_kept_that_is_revoked_or_borrowed_by_somebody_silent(lender: House, borrower: House) -> None:
    offered, held = lend(lender, 1), lend(lender, 1, OTHER_KEY)
    borrower.loans.borrow(held[0], 0.0)
    lender.loans.revoke(KEY)
    lender.loans.renew(8.0)
    lender.loans.sweep(LEASE_S + 0.1)
    found = lender.loans.sweep(LEASE_S + 0.1 + 2 * GRACE_S)
    assert {(e.lease, e.expired) for e in found} == {(offered[0], True), (held[0], True)}


def test_a_lease_that_nobody_takes_expires(lender: House) -> None:
    lease, blocks = lend(lender, now=5.0)
    assert lender.loans.sweep(5.0 + LEASE_S) == []
    lender.loans.sweep(5.1 + LEASE_S)
    assert lender.loans.sweep(5.1 + LEASE_S + 2 * GRACE_S) == ended(lease, blocks, expired=True)
    assert lender.pool.account().leased_out == 0


# ---- Successors --------


def test_a_lenders_successor_honours_what_is_held_and_ends_what_is_not(lender: House, borrower: House) -> None:
    held, offered = lend(lender, 2), lend(lender, 1, OTHER_KEY)
    borrower.loans.borrow(held[0], 0.0)
    assert lender.succeed() == 0
    lender.check()
    assert lender.pool.account() == Blocks(total=8, free=5, leased_out=3)
    assert lender.loans.is_lent(KEY, held[0])
    assert not set(lender.pool.allocate(5)) & {*held[1], *offered[1]}
    with pytest.raises(LeaseLost, match="revoked"):
        borrower.loans.borrow(offered[0], 0.0)
    assert borrower.loans.renew(1.0) == set()
    lender.loans.sweep(1.0)
    assert lender.loans.sweep(1.0 + 2 * GRACE_S) == ended(*offered, OTHER_KEY)
    borrower.loans.give_back(held[0])
    assert lender.loans.sweep(2.0) == ended(*held)
    assert lender.pool.account() == Blocks(total=8, free=3, used=5)


def test_a_borrowers_successor_gives_back_what_the_lost_one_held(lender: House, borrower: House) -> None:
    held, offered = lend(lender, 2), lend(lender, 1, OTHER_KEY)
    borrower.loans.borrow(held[0], 0.0)
    predecessor = borrower.loans
    assert borrower.succeed() == 1
    assert borrower.loans.borrowed == frozenset()
    assert lender.loans.sweep(0.0) == ended(*held)
    assert borrower.loans.borrow(offered[0], 0.0) == tuple(offered[1])
    assert predecessor.renew(0.0) == {held[0]}
    assert lender.loans.sweep(1.0) == []


def test_both_may_be_succeeded(lender: House, borrower: House) -> None:
    lease, blocks = lend(lender)
    borrower.loans.borrow(lease, 0.0)
    assert (lender.succeed(), borrower.succeed()) == (0, 1)
    assert lender.loans.sweep(0.0) == ended(lease, blocks)
    fresh, _ = lend(lender)
    assert fresh.generation > lease.generation


def test_check_finds_books_that_differ_from_the_records(arena: Arena) -> None:
    house = House(arena, 1)
    lease, _ = lend(house)
    house.loans.check()
    del house.loans._lent[KEY]
    with pytest.raises(InvariantError, match=rf"filed differ: \[{lease.index}\]"):
        house.loans.check()


# ---- Anything at any time --------

houses = st.integers(0, 1)
pauses = st.sampled_from([0.0, 0.05, 0.2, 2.0, 7.0, 12.0])


class LoansMachine(RuleBasedStateMachine):
    """Two engines that fill blocks, lend, borrow, die and come back. Each fill has a stamp of its own."""

    @initialize()
    def start(self) -> None:
        self.arena = make_arena()
        self.words = self.arena.payload().view(np.uint32)
        self.houses = [House(self.arena, slot) for slot in range(2)]
        self.now, self.last_stamp, self.last_request = 0.0, 0, 0
        self.used: list[list[list[int]]] = [[], []]  # by house: runs of blocks with a reference each
        self.lent: dict[Lease, tuple[int, Key, list[int]]] = {}  # not ended: lender, key, blocks
        self.borrowed: dict[Lease, tuple[int, dict[int, int]]] = {}  # not given back: borrower, stamps

    @rule(which=houses, count=st.integers(1, 3))
    def fill(self, which: int, count: int) -> None:
        pool = self.houses[which].pool
        if not pool.can_allocate(count):
            return
        blocks = pool.allocate(count)
        for _, _, named in self.lent.values():
            assert not set(named) & set(blocks), "a lent block was given away"
        for block in blocks:
            self.last_stamp += 1
            self.words[block] = self.last_stamp
            pool.insert(self.last_stamp.to_bytes(16, "little"), block, None)
        self.used[which].append(blocks)

    @rule(which=houses, data=st.data())
    def free(self, which: int, data: st.DataObject) -> None:
        if self.used[which]:
            blocks = data.draw(st.sampled_from(self.used[which]))
            self.used[which].remove(blocks)
            self.houses[which].pool.free(blocks)

    @rule(which=houses, data=st.data(), is_new=st.booleans())
    def lend(self, which: int, data: st.DataObject, is_new: bool) -> None:
        if not self.used[which]:
            return
        blocks = data.draw(st.sampled_from(self.used[which]))
        self.last_request += is_new
        key = (f"r{self.last_request}", 1)
        try:
            lease = self.houses[which].loans.lend(key, blocks, self.now)
        except Overloaded:
            assert sum(lender == which for lender, _, _ in self.lent.values()) == 3
            return
        assert lease not in self.lent
        self.lent[lease] = (which, key, blocks)

    @precondition(lambda self: self.lent)
    @rule(which=houses, data=st.data())
    def borrow(self, which: int, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.lent)))
        try:
            blocks = self.houses[which].loans.borrow(lease, self.now)
        except LeaseLost:
            return
        assert list(blocks) == self.lent[lease][2]
        assert lease not in self.borrowed
        self.borrowed[lease] = (which, {b: int(self.words[b, 0]) for b in blocks})

    @precondition(lambda self: self.borrowed)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.borrowed)))
        which, _ = self.borrowed.pop(lease)
        self.houses[which].loans.give_back(lease)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        which, key, _ = data.draw(st.sampled_from(list(self.lent.values())))
        self.houses[which].loans.revoke(key)

    @rule(which=houses)
    def renew(self, which: int) -> None:
        lost = self.houses[which].loans.renew(self.now)
        assert lost <= {lease for lease, (borrower, _) in self.borrowed.items() if borrower == which}
        for lease in lost:
            self.houses[which].loans.give_back(lease)
            del self.borrowed[lease]

    @rule(seconds=pauses)
    def pause(self, seconds: float) -> None:
        self.now += seconds

    @rule(which=houses)
    def sweep(self, which: int) -> None:
        for end in self.houses[which].loans.sweep(self.now):
            assert self.lent.pop(end.lease) == (which, (end.request, end.attempt), list(end.blocks))

    @rule(which=houses)
    def succeed(self, which: int) -> None:
        held = [lease for lease, (borrower, _) in self.borrowed.items() if borrower == which]
        assert self.houses[which].succeed() <= len(held)  # lost ones may have ended
        for lease in held:
            del self.borrowed[lease]
        self.used[which] = []

    @invariant()
    def i2_what_is_read_is_neither_changed_nor_given_away(self) -> None:
        for lease, (which, stamps) in getattr(self, "borrowed", {}).items():
            if self.houses[which].loans._holder.is_valid(lease, self.now):
                assert lease in self.lent
                assert {b: int(self.words[b, 0]) for b in stamps} == stamps
        for which, house in enumerate(getattr(self, "houses", [])):
            leased = {b for lender, _, blocks in self.lent.values() if lender == which for b in blocks}
            used = {b for blocks in self.used[which] for b in blocks}
            assert house.pool.num_available == NUM_BLOCKS - len(leased | used)

    @invariant()
    def i5_books_pools_and_records_agree(self) -> None:
        for which, house in enumerate(getattr(self, "houses", [])):
            house.check()
            account = house.pool.account()
            assert account.free + account.cached + account.used + account.leased_out == account.total == NUM_BLOCKS
            lent = {lease: key for lease, (lender, key, _) in self.lent.items() if lender == which}
            assert {live.lease for live in house.loans.live()} == lent.keys()
            assert all(house.loans.is_lent(key, lease) for lease, key in lent.items())
            borrowed = {lease for lease, (borrower, _) in self.borrowed.items() if borrower == which}
            assert house.loans.borrowed == borrowed

    def teardown(self) -> None:
        """However it went, every lease ends soon after its time."""
        if not hasattr(self, "arena"):
            return
        for which in (0, 1):
            while self.used[which]:
                self.houses[which].pool.free(self.used[which].pop())
        for _ in range(3):
            self.now += 100.0
            for which in (0, 1):
                self.sweep(which)
        assert self.lent == {}
        for house in self.houses:
            account = house.pool.account()
            assert account.free + account.cached == NUM_BLOCKS
        del self.words
        self.arena.close()


LoansMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestLoansAtAnyTime = LoansMachine.TestCase
