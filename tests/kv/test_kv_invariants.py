"""The memory's invariants under random interleavings of everything that engines of one node do to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)

from pdactors.errors import Overloaded
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool, NoBlocks
from pdactors.kv.layout import KVLayout
from pdactors.kv.lease_table import LeaseTable, record_dtype
from pdactors.kv.leases import Holder, LeaseLost, Lessor
from pdactors.kv.prefix import cache_key, chain
from pdactors.messages import Lease

LAYOUT = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=2, dtype="float32")
KEY = cache_key("model", LAYOUT.fingerprint)
NUM_ENGINES = 3
SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)

engines = st.integers(0, NUM_ENGINES - 1)
prompts = st.lists(st.integers(0, 1), min_size=1, max_size=9)
pauses = st.sampled_from([0.0, 0.05, 0.2, 3.0, 12.0])


@dataclass(eq=False)
class Sequence:
    """A sequence of one engine: its own blocks, and what each must contain."""

    engine: int
    tokens: list[int]
    blocks: list[int]
    stamps: dict[int, int]


@dataclass
class Engine:
    pool: BlockPool
    lessor: Lessor
    holder: Holder
    incarnation: int
    sequences: list[Sequence] = field(default_factory=list)


class NodeMachine(RuleBasedStateMachine):
    """Engines that compute, cache, lend and borrow over one arena, with a migrator that moves extents between them.

    Every block that is written gets a stamp nobody else uses; whoever may read a block expects the stamp it had then.
    """

    @initialize()
    def start(self) -> None:
        self.arena = Arena.create(
            LAYOUT, 19, extent_blocks=4, num_slots=NUM_ENGINES, leases_per_slot=3, max_lease_blocks=8
        )
        self.words = self.arena.payload().view(np.uint32)
        self.now = 0.0
        self.last_stamp = 0
        self.by_digest: dict[tuple[int, bytes], int] = {}  # (engine, digest) -> stamp
        self.lent: dict[Lease, tuple[int, Sequence]] = {}  # not ended, as the test knows: lessor and what was lent
        self.borrowed: dict[Lease, tuple[int, dict[int, int]]] = {}  # accepted and not released: holder, stamps
        self.engines = [self.new_engine(slot, 1) for slot in range(NUM_ENGINES)]
        for extent in range(self.arena.num_extents - 1):
            self.give_extent(extent % NUM_ENGINES)

    def new_engine(self, slot: int, incarnation: int) -> Engine:
        table = self.arena.leases()
        return Engine(
            BlockPool(), Lessor(table, slot, incarnation), Holder(table, slot, incarnation), incarnation=incarnation
        )

    def teardown(self) -> None:
        if not hasattr(self, "arena"):
            return
        for engine in self.engines:
            for sequence in list(engine.sequences):
                self.drop(sequence)
        for lease, (slot, _) in list(self.borrowed.items()):
            self.engines[slot].holder.release(lease)
        self.borrowed.clear()
        for _ in range(3):
            self.pause(100.0)
        for engine in self.engines:
            assert engine.lessor.live() == []
            account = engine.pool.account()
            assert account.free + account.cached == account.total
        del self.words
        self.arena.close()

    def write(self, block: int) -> int:
        self.last_stamp += 1
        self.words[block] = self.last_stamp
        return self.last_stamp

    def named_by_somebody(self) -> set[int]:
        named = {b for engine in self.engines for s in engine.sequences for b in s.blocks}
        return named.union(*(s.blocks for _, s in self.lent.values()))

    @rule(slot=engines)
    def give_extent(self, slot: int) -> None:
        for extent in range(self.arena.num_extents):
            if self.arena.extent_owner(extent) is None:
                self.arena.set_extent_owner(extent, slot)
                self.engines[slot].pool.add_extent(self.arena.blocks_of_extent(extent))
                return

    @rule(slot=engines)
    def take_extent(self, slot: int) -> None:
        pool = self.engines[slot].pool
        for blocks in pool.removable_extents()[:1]:
            pool.remove_extent(blocks)
            assert self.named_by_somebody().isdisjoint(blocks)
            self.arena.set_extent_owner(blocks.start // self.arena.extent_blocks, None)

    @rule(slot=engines, tokens=prompts)
    def compute(self, slot: int, tokens: list[int]) -> None:
        pool, digests = self.engines[slot].pool, chain(tokens, LAYOUT.block_tokens, KEY)
        blocks = pool.match(digests)
        stamps = {b: self.by_digest[slot, d] for b, d in zip(blocks, digests, strict=False)}
        missing = LAYOUT.num_blocks(len(tokens)) - len(blocks)
        busy = self.named_by_somebody()
        try:
            fresh = pool.allocate(missing)
        except NoBlocks:
            pool.free(blocks)
            return
        assert busy.isdisjoint(fresh)
        stamps |= {b: self.write(b) for b in fresh}
        sequence = Sequence(slot, tokens, blocks + fresh, stamps)
        self.engines[slot].sequences.append(sequence)
        self.publish(sequence)

    def publish(self, sequence: Sequence) -> None:
        parent, pool = None, self.engines[sequence.engine].pool
        for digest, block in zip(chain(sequence.tokens, LAYOUT.block_tokens, KEY), sequence.blocks, strict=False):
            if pool.insert(digest, block, parent):
                self.by_digest[sequence.engine, digest] = sequence.stamps[block]
            parent = digest

    @rule(slot=engines, data=st.data(), token=st.integers(0, 1))
    def decode(self, slot: int, data: st.DataObject, token: int) -> None:
        lent = {id(s) for _, s in self.lent.values()}
        own = [s for s in self.engines[slot].sequences if id(s) not in lent]
        if not own:
            return
        sequence = data.draw(st.sampled_from(own))
        if len(sequence.tokens) % LAYOUT.block_tokens == 0:
            busy = self.named_by_somebody()
            if not self.engines[slot].pool.can_allocate(1):
                return
            sequence.blocks += self.engines[slot].pool.allocate(1)
            assert sequence.blocks[-1] not in busy
        sequence.tokens = [*sequence.tokens, token]
        sequence.stamps[sequence.blocks[-1]] = self.write(sequence.blocks[-1])
        self.publish(sequence)

    @rule(slot=engines, data=st.data())
    def finish(self, slot: int, data: st.DataObject) -> None:
        if self.engines[slot].sequences:
            self.drop(data.draw(st.sampled_from(self.engines[slot].sequences)))

    def drop(self, sequence: Sequence) -> None:
        self.engines[sequence.engine].pool.free(sequence.blocks)
        self.engines[sequence.engine].sequences.remove(sequence)

    @rule(slot=engines, data=st.data())
    def lend(self, slot: int, data: st.DataObject) -> None:
        engine = self.engines[slot]
        if not engine.sequences:
            return
        sequence = data.draw(st.sampled_from(engine.sequences))
        if len(sequence.blocks) > 8:
            return
        try:
            lease = engine.lessor.grant("r", 1, sequence.blocks, self.now + 10.0)
        except Overloaded:
            return
        engine.pool.lease(sequence.blocks)
        self.lent[lease] = (slot, sequence)

    @precondition(lambda self: self.lent)
    @rule(slot=engines, data=st.data())
    def accept(self, slot: int, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.lent)))
        sequence = self.lent[lease][1]
        try:
            blocks = self.engines[slot].holder.accept(lease, self.now, self.now + 5.0)
        except LeaseLost:
            return
        assert list(blocks) == sequence.blocks[: len(blocks)]
        self.borrowed[lease] = (slot, {b: sequence.stamps[b] for b in blocks})

    @precondition(lambda self: self.borrowed)
    @rule(data=st.data(), renew=st.booleans())
    def renew_or_release(self, data: st.DataObject, renew: bool) -> None:
        lease = data.draw(st.sampled_from(list(self.borrowed)))
        holder = self.engines[self.borrowed[lease][0]].holder
        if not renew or not holder.is_valid(lease, self.now):
            holder.release(lease)
            del self.borrowed[lease]
        else:
            holder.renew(lease, self.now + 10.0)

    @precondition(lambda self: self.lent)
    @rule(data=st.data())
    def revoke(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(list(self.lent)))
        self.engines[self.lent[lease][0]].lessor.revoke(lease)

    @rule(seconds=pauses)
    def pause(self, seconds: float) -> None:
        self.now += seconds
        for engine in self.engines:
            for ended in engine.lessor.sweep(self.now):
                self.lent.pop(ended.lease)
                engine.pool.unlease(ended.blocks)

    @rule(slot=engines)
    def restart(self, slot: int) -> None:
        self.borrowed = {lease: held for lease, held in self.borrowed.items() if held[0] != slot}
        self.by_digest = {key: stamp for key, stamp in self.by_digest.items() if key[0] != slot}
        engine = self.engines[slot] = self.new_engine(slot, self.engines[slot].incarnation + 1)
        engine.holder.end_predecessor()
        for extent in self.arena.extents_of(slot):
            engine.pool.add_extent(self.arena.blocks_of_extent(extent))
        for live in engine.lessor.rebuild():
            engine.pool.restore_lease(live.blocks)

    @invariant()
    def i1_no_block_changes_under_its_readers(self) -> None:
        readers = [s.stamps for engine in getattr(self, "engines", []) for s in engine.sequences]
        for lease, (slot, stamps) in getattr(self, "borrowed", {}).items():
            if self.engines[slot].holder.is_valid(lease, self.now):
                readers.append(stamps)
        for stamps in readers:
            assert {b: int(self.words[b, 0]) for b in stamps} == stamps

    @invariant()
    def i2_nothing_named_by_anybody_can_be_allocated_or_moved(self) -> None:
        for engine in getattr(self, "engines", []):
            leased = {b for live in engine.lessor.live() for b in live.blocks}
            used = {b for s in engine.sequences for b in s.blocks}
            account = engine.pool.account()
            assert account.leased_out == len(leased)
            assert account.used == len(used - leased)
            assert engine.pool.num_available == account.total - len(leased | used)

    @invariant()
    def i5_every_account_adds_up(self) -> None:
        for slot, engine in enumerate(getattr(self, "engines", [])):
            engine.pool.check()
            engine.lessor.check()
            account = engine.pool.account()
            assert account.free + account.cached + account.used + account.leased_out == account.total
            assert account.total == sum(len(self.arena.blocks_of_extent(e)) for e in self.arena.extents_of(slot))


@dataclass(eq=False)
class Attempt:
    """A holder half way through `accept`."""

    holder: Holder
    lease: Lease
    is_claimed: bool = False


class LeaseMachine(RuleBasedStateMachine):
    """The lease protocol with `accept` cut into its three steps, so that everything can come between them."""

    leases = Bundle("leases")
    attempts = Bundle("attempts")

    @initialize()
    def start(self) -> None:
        self.table = LeaseTable(np.zeros(6, record_dtype(4)), 2)
        self.now = 0.0
        self.incarnations = [1, 1, 1]
        self.lessor = Lessor(self.table, 0, 1)
        self.holders = [Holder(self.table, slot, 1) for slot in (1, 2)]
        self.granted: dict[Lease, tuple[int, ...]] = {}
        self.ended: set[Lease] = set()

    @rule(target=leases, blocks=st.lists(st.integers(0, 99), max_size=4))
    def grant(self, blocks: list[int]) -> object:
        try:
            lease = self.lessor.grant("r", 1, blocks, self.now + 10.0)
        except Overloaded:
            assert len(self.granted) - len(self.ended) == 2
            return multiple()
        assert lease not in self.granted
        self.granted[lease] = tuple(blocks)
        return lease

    @rule(target=attempts, lease=leases, which=st.integers(0, 1))
    def begin_to_accept(self, lease: Lease, which: int) -> object:
        try:
            blocks = self.holders[which]._inspect(lease, self.now)
        except LeaseLost:
            return multiple()
        assert lease not in self.ended
        assert blocks == self.granted[lease]
        return Attempt(self.holders[which], lease)

    @rule(target=attempts, attempt=consumes(attempts), until=pauses)
    def go_on_accepting(self, attempt: Attempt, until: float) -> object:
        if attempt.holder not in self.holders:  # its process died; it does nothing more
            return multiple()
        if not attempt.is_claimed:
            attempt.holder._claim(attempt.lease, self.now + until)
            attempt.is_claimed = True
            return attempt
        try:
            attempt.holder._confirm(attempt.lease)
        except LeaseLost:
            assert attempt.lease not in attempt.holder.held
        else:
            assert attempt.lease not in self.ended
        return multiple()

    @rule(lease=leases, which=st.integers(0, 1), until=pauses)
    def renew(self, lease: Lease, which: int, until: float) -> None:
        try:
            self.holders[which].renew(lease, self.now + until)
        except LeaseLost:
            return
        assert lease not in self.ended

    @rule(lease=leases, which=st.integers(0, 1))
    def release(self, lease: Lease, which: int) -> None:
        self.holders[which].release(lease)
        assert not self.holders[which].is_valid(lease, self.now)

    @rule(lease=leases)
    def revoke(self, lease: Lease) -> None:
        self.lessor.revoke(lease)

    @rule(seconds=pauses)
    def pause(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def sweep(self) -> None:
        for ended in self.lessor.sweep(self.now):
            assert ended.lease not in self.ended
            assert ended.blocks == self.granted[ended.lease]
            self.ended.add(ended.lease)

    @rule()
    def restart_the_lessor(self) -> None:
        self.incarnations[0] += 1
        before = self.lessor.live()
        self.lessor = Lessor(self.table, 0, self.incarnations[0])
        assert sorted(self.lessor.rebuild(), key=repr) == sorted(before, key=repr)

    @rule(which=st.integers(0, 1))
    def restart_a_holder(self, which: int) -> None:
        self.incarnations[which + 1] += 1
        self.holders[which] = Holder(self.table, which + 1, self.incarnations[which + 1])
        self.holders[which].end_predecessor()

    @invariant()
    def i2_nobody_reads_under_a_lease_that_ended(self) -> None:
        for lease in self.granted if hasattr(self, "granted") else ():
            readers = [holder for holder in self.holders if holder.is_valid(lease, self.now)]
            assert len(readers) <= 1
            assert not readers or lease not in self.ended

    @invariant()
    def i5_every_record_is_free_or_given(self) -> None:
        if hasattr(self, "lessor"):
            self.lessor.check()
            assert {live.lease for live in self.lessor.live()} == self.granted.keys() - self.ended

    def teardown(self) -> None:
        """However it went, every lease ends by itself soon after its time."""
        if hasattr(self, "lessor"):
            for _ in range(3):
                self.now += 100.0
                self.sweep()
            assert self.ended == self.granted.keys()


NodeMachine.TestCase.settings = SETTINGS
LeaseMachine.TestCase.settings = settings(SETTINGS, max_examples=150)
TestEnginesOfOneNode = NodeMachine.TestCase
TestLeaseProtocol = LeaseMachine.TestCase
