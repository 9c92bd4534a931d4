from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from pdactors.errors import InvariantError, Overloaded
from pdactors.kv.arena import Arena
from pdactors.kv.layout import KVLayout
from pdactors.kv.lease_table import GRACE_S, MARGIN_S, LeaseTable, record_dtype
from pdactors.kv.leases import Ended, Holder, LeaseLost, Lessor, LiveLease
from pdactors.messages import Lease

BLOCKS = (7, 3, 9)


def make_table(leases_per_slot: int = 2, num_slots: int = 3) -> LeaseTable:
    return LeaseTable(np.zeros(leases_per_slot * num_slots, record_dtype(5)), leases_per_slot)


@pytest.fixture
def table() -> LeaseTable:
    return make_table()


@pytest.fixture
def lessor(table: LeaseTable) -> Lessor:
    return Lessor(table, 1, 100)


@pytest.fixture
def holder(table: LeaseTable) -> Holder:
    return Holder(table, 2, 200)


def grant(lessor: Lessor, deadline: float = 30.0) -> Lease:
    return lessor.grant("r", 2, BLOCKS, deadline)


def end_of(lease: Lease, *, expired: bool) -> list[Ended]:
    return [Ended(lease, "r", 2, BLOCKS, expired)]


def test_a_record_has_a_cache_line_for_each_writer() -> None:
    dtype = record_dtype(5)
    assert dtype.itemsize == 256
    assert record_dtype(17).itemsize == 320
    offsets = {name: field[1] for name, field in dtype.fields.items()}
    assert offsets["accepted"] == 128
    assert offsets["holder_slot"] < 192 <= offsets["blocks"]
    words = ("generation", "revoked", "closing", "accepted", "released", "renewed_until", "deadline")
    assert all(offsets[name] % 8 == 0 for name in words)


def test_a_lease_is_accepted_released_and_ended(table: LeaseTable, lessor: Lessor, holder: Holder) -> None:
    lease = grant(lessor)
    assert table.records_of(1) == range(2, 4)
    assert lease.index in table.records_of(1)
    assert lessor.live() == [LiveLease(lease, "r", 2, BLOCKS, None, False, 30.0)]
    assert holder.accept(lease, 0.0, 40.0) == BLOCKS
    assert holder.held == {lease}
    assert lessor.live() == [LiveLease(lease, "r", 2, BLOCKS, 2, False, 40.0)]
    assert lessor.sweep(1.0) == []
    holder.release(lease)
    holder.release(lease)
    assert lessor.sweep(1.0) == end_of(lease, expired=False)
    assert lessor.sweep(1.0) == []
    assert lessor.live() == []
    lessor.check()


def test_records_are_reused_first_in_first_out_with_new_generations(lessor: Lessor, holder: Holder) -> None:
    seen = []
    for _ in range(6):
        lease = grant(lessor)
        seen.append(lease)
        holder.accept(lease, 0.0, 30.0)
        holder.release(lease)
        lessor.sweep(0.0)
    assert [lease.index for lease in seen] == [2, 3, 2, 3, 2, 3]
    assert len({lease.generation for lease in seen}) == 6


def test_a_full_table_is_overloaded(lessor: Lessor) -> None:
    grant(lessor)
    grant(lessor)
    with pytest.raises(Overloaded, match="all 2 lease records of slot 1"):
        grant(lessor)
    lessor.check()


def test_what_does_not_fit_in_a_record_is_refused(lessor: Lessor) -> None:
    with pytest.raises(ValueError, match="at most 5 blocks, got 6"):
        lessor.grant("r", 0, range(6), 30.0)
    with pytest.raises(ValueError, match="at most 32 characters, got 33"):
        lessor.grant("r" * 33, 0, [1], 30.0)
    assert lessor.grant("r" * 32, 0, [], 30.0).generation == 1


def test_an_unaccepted_lease_ends_a_grace_after_a_sweep_saw_it_revoked(lessor: Lessor, holder: Holder) -> None:
    lease = grant(lessor)
    lessor.revoke(lease)
    lessor.revoke(lease)
    with pytest.raises(LeaseLost, match="was revoked"):
        holder.accept(lease, 0.0, 30.0)
    assert lessor.sweep(5.0) == []
    assert lessor.sweep(5.0 + 0.9 * GRACE_S) == []
    assert lessor.sweep(5.0 + 1.1 * GRACE_S) == end_of(lease, expired=False)
    lessor.revoke(lease)
    lessor.check()


def test_an_accepted_lease_outlives_its_revocation(lessor: Lessor, holder: Holder) -> None:
    lease = grant(lessor)
    holder.accept(lease, 0.0, 30.0)
    lessor.revoke(lease)
    for now in (1.0, 2.0, 3.0):
        assert lessor.sweep(now) == []
    holder.renew(lease, 50.0)
    assert holder.is_valid(lease, 45.0)
    assert lessor.sweep(45.0) == []
    holder.release(lease)
    assert lessor.sweep(46.0) == end_of(lease, expired=False)


def test_a_holder_stops_a_margin_before_the_lessor_may_end_the_lease(lessor: Lessor, holder: Holder) -> None:
    lease = grant(lessor)
    holder.accept(lease, 0.0, 10.0)
    assert holder.is_valid(lease, 30.0 - MARGIN_S)
    assert not holder.is_valid(lease, 30.1 - MARGIN_S)
    holder.renew(lease, 60.0)
    assert holder.is_valid(lease, 60.0 - MARGIN_S)
    assert lessor.sweep(60.0) == []
    assert lessor.sweep(60.1) == []
    assert lessor.sweep(60.1 + GRACE_S + 0.01) == end_of(lease, expired=True)
    assert not holder.is_valid(lease, 0.0)


def test_an_unaccepted_lease_expires_at_its_deadline(lessor: Lessor, holder: Holder) -> None:
    lease = grant(lessor)
    with pytest.raises(LeaseLost, match=r"expires in 0\.500 s"):
        holder.accept(lease, 29.5, 60.0)
    lessor.sweep(31.0)
    assert lessor.sweep(32.0) == end_of(lease, expired=True)
    with pytest.raises(LeaseLost, match="has ended"):
        holder.accept(lease, 0.0, 60.0)


def test_a_lease_whose_end_has_begun_can_be_neither_renewed_nor_accepted(lessor: Lessor, holder: Holder) -> None:
    held, offered = grant(lessor), grant(lessor)
    holder.accept(held, 0.0, 30.0)
    lessor.sweep(30.1)
    with pytest.raises(LeaseLost):
        holder.renew(held, 60.0)
    with pytest.raises(LeaseLost):
        holder.accept(offered, 0.0, 60.0)
    assert not holder.is_valid(held, 0.0)
    assert held in holder.held
    holder.release(held)
    assert lessor.sweep(30.1) == end_of(held, expired=False)
    assert lessor.sweep(31.0) == end_of(offered, expired=True)


def test_a_renewal_just_before_the_end_began_keeps_the_lease(table: LeaseTable, lessor: Lessor, holder: Holder) -> None:
    lease = grant(lessor)
    holder.accept(lease, 0.0, 30.0)
    lessor.sweep(30.1)
    table.renewed_until[lease.index] = 60.0  # the store that was on its way
    assert lessor.sweep(31.0) == []
    assert holder.is_valid(lease, 31.0)
    lessor.sweep(61.0)
    assert lessor.sweep(61.05) == []
    assert lessor.sweep(61.2) == end_of(lease, expired=True)


def test_accepting_while_the_lessor_revokes_is_either_held_or_lost(lessor: Lessor, holder: Holder) -> None:
    lease = grant(lessor)
    holder._inspect(lease, 0.0)
    lessor.revoke(lease)
    lessor.sweep(0.0)
    holder._claim(lease, 30.0)
    assert lessor.sweep(0.05) == []
    with pytest.raises(LeaseLost, match="ended while it was accepted"):
        holder._confirm(lease)
    assert lessor.sweep(0.06) == end_of(lease, expired=False)


def test_a_holder_that_wakes_after_the_end_gets_nothing(lessor: Lessor, holder: Holder) -> None:
    lease = grant(lessor)
    holder._inspect(lease, 0.0)
    lessor.revoke(lease)
    lessor.sweep(0.0)
    assert lessor.sweep(1.0) == end_of(lease, expired=False)
    holder._claim(lease, 30.0)
    with pytest.raises(LeaseLost):
        holder._confirm(lease)
    assert holder.held == frozenset()
    lessor.check()


def test_of_two_holders_that_accept_at_once_the_last_to_write_holds(
    table: LeaseTable, lessor: Lessor, holder: Holder
) -> None:
    lease, other = grant(lessor), Holder(table, 0, 300)
    for one in (holder, other):
        one._inspect(lease, 0.0)
    for one in (holder, other):
        one._claim(lease, 30.0)
    with pytest.raises(LeaseLost):
        holder._confirm(lease)
    other._confirm(lease)
    assert lessor.sweep(0.0) == []
    assert other.is_valid(lease, 0.0)
    assert not holder.is_valid(lease, 0.0)


def test_a_lease_is_accepted_once(table: LeaseTable, lessor: Lessor, holder: Holder) -> None:
    lease = grant(lessor)
    holder.accept(lease, 0.0, 30.0)
    for late in (holder, Holder(table, 0, 300)):
        with pytest.raises(LeaseLost, match="accepted already, by slot 2"):
            late.accept(lease, 0.0, 30.0)
    assert holder.is_valid(lease, 0.0)


def test_who_holds_nothing_cannot_renew_or_release(lessor: Lessor, holder: Holder, table: LeaseTable) -> None:
    lease, other = grant(lessor), Holder(table, 0, 300)
    holder.accept(lease, 0.0, 30.0)
    with pytest.raises(LeaseLost, match="not held"):
        other.renew(lease, 99.0)
    other.release(lease)
    assert lessor.sweep(0.0) == []
    assert holder.is_valid(lease, 0.0)


@pytest.mark.parametrize("lease", [Lease(-1, 1), Lease(6, 1), Lease(0, 0), Lease(2**40, 1), Lease(0, 2**70)])
def test_a_reference_to_nowhere_is_lost(holder: Holder, lease: Lease) -> None:
    with pytest.raises(LeaseLost):
        holder.accept(lease, 0.0, 30.0)
    assert not holder.is_valid(lease, 0.0)
    holder.release(lease)


def test_a_new_lessor_takes_over_what_its_predecessor_published(table: LeaseTable, holder: Holder) -> None:
    old = Lessor(table, 1, 100)
    held, offered = grant(old), grant(old)
    holder.accept(held, 0.0, 30.0)
    new = Lessor(table, 1, 101)
    with pytest.raises(Overloaded):
        grant(new)
    with pytest.raises(InvariantError):
        new.check()
    assert [live.lease for live in new.rebuild()] == [held, offered]
    assert new.live() == [
        LiveLease(held, "r", 2, BLOCKS, 2, False, 30.0),
        LiveLease(offered, "r", 2, BLOCKS, None, False, 30.0),
    ]
    assert set(table.lessor_incarnation[2:4].tolist()) == {101}
    new.check()
    assert Holder(table, 0, 1).accept(offered, 0.0, 30.0) == BLOCKS
    holder.release(held)
    assert new.sweep(0.0) == end_of(held, expired=False)


def test_generations_do_not_repeat_after_a_restart(table: LeaseTable, holder: Holder) -> None:
    old = Lessor(table, 1, 100)
    stale = grant(old)
    old.revoke(stale)
    old.sweep(0.0)
    old.sweep(1.0)
    new = Lessor(table, 1, 101)
    new.rebuild()
    fresh = {grant(new), grant(new)}
    assert stale.generation not in {lease.generation for lease in fresh}
    with pytest.raises(LeaseLost, match="has ended"):
        holder.accept(stale, 0.0, 30.0)


def test_a_new_holder_ends_what_its_predecessor_held(table: LeaseTable, lessor: Lessor) -> None:
    lost = grant(lessor)
    Holder(table, 2, 200).accept(lost, 0.0, 30.0)
    new = Holder(table, 2, 201)
    assert not new.is_valid(lost, 0.0)
    assert new.end_predecessor() == 1
    assert new.end_predecessor() == 0
    assert lessor.sweep(0.0) == end_of(lost, expired=False)


def test_other_holders_keep_theirs_when_a_predecessor_is_ended(table: LeaseTable, lessor: Lessor) -> None:
    mine, theirs = grant(lessor), grant(lessor)
    holder, other = Holder(table, 2, 201), Holder(table, 0, 200)
    holder.accept(mine, 0.0, 30.0)
    other.accept(theirs, 0.0, 30.0)
    assert holder.end_predecessor() == 0
    assert holder.is_valid(mine, 0.0)
    assert other.is_valid(theirs, 0.0)


def test_check_finds_a_record_that_somebody_overwrote(table: LeaseTable, lessor: Lessor) -> None:
    lease = grant(lessor)
    table.generation[lease.index] = 77
    with pytest.raises(InvariantError, match="generation is 77, not 1"):
        lessor.check()


def test_a_slot_out_of_range_is_refused(table: LeaseTable) -> None:
    for kind in (Lessor, Holder):
        with pytest.raises(ValueError, match=r"slot must be in 0\.\.2, got 3"):
            kind(table, 3, 1)


def test_unaligned_records_are_refused() -> None:
    raw = np.zeros(257, np.uint8)[1:].view(record_dtype(5))
    with pytest.raises(ValueError, match="aligned"):
        LeaseTable(raw, 1)


def test_a_lease_crosses_processes() -> None:
    layout = KVLayout(1, 1, 1, 8, "float32")
    child = (
        "import sys\nfrom pdactors.kv.arena import Arena\nfrom pdactors.kv.layout import KVLayout\n"
        "from pdactors.kv.leases import Holder\nfrom pdactors.messages import Lease\n"
        "fd, index, generation = map(int, sys.argv[1:])\n"
        "arena = Arena.attach(fd, KVLayout(1, 1, 1, 8, 'float32'))\n"
        "holder = Holder(arena.leases(), 1, 5)\n"
        "print(holder.accept(Lease(index, generation), 0.0, 30.0))\n"
    )
    with Arena.create(layout, 4, extent_blocks=2, num_slots=2, leases_per_slot=2, max_lease_blocks=5) as arena:
        lessor = Lessor(arena.leases(), 0, 1)
        lease, fd = grant(lessor), arena.fileno()
        arguments = [sys.executable, "-c", child, str(fd), str(lease.index), str(lease.generation)]
        done = subprocess.run(arguments, pass_fds=[fd], capture_output=True, check=True, timeout=60)
        assert done.stdout == b"(7, 3, 9)\n"
        assert lessor.live()[0].holder_slot == 1
        assert Holder(arena.leases(), 1, 6).end_predecessor() == 1
        assert lessor.sweep(0.0) == end_of(lease, expired=False)


def test_all_leases_of_one_that_is_gone_can_be_ended(table: LeaseTable, lessor: Lessor, holder: Holder) -> None:
    held, waiting = grant(lessor), grant(lessor)
    holder.accept(held, 0.0, 30.0)
    undertaker = Lessor(table, 1, 300)
    undertaker.rebuild()
    undertaker.end_all()
    undertaker.check()
    assert undertaker.num_left == 2
    assert not table.stands(held)
    with pytest.raises(LeaseLost):
        holder.renew(held, 60.0)
    with pytest.raises(LeaseLost):
        holder.accept(waiting, 0.0, 30.0)
    assert Lessor(table, 1, 400).grant("r", 3, BLOCKS, 60.0).generation > waiting.generation
