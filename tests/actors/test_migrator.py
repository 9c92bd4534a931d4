"""The migrator of a node on a real arena, among engines and a router that say what the test wants."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from pdactors.actors.migrator import Migrator
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.kv.leases import Holder, LeaseLost, Lessor
from pdactors.kv.loans import Loans
from pdactors.messages import (
    Extents,
    RecallExtents,
    Retired,
    ReturnExtents,
    Stranger,
    WantExtents,
    Welcome,
)
from pdactors.transport.inproc import InprocTransport

ADDRESS = "tcp://127.0.0.1:0"  # only a name to the transport of these tests
LAYOUT = KVLayout(2, 2, 8, 8, "float32")  # 8 tokens in a block: the longest sequence, 64 tokens, has 8 blocks
EXTENT_BLOCKS, NUM_EXTENTS, NUM_SLOTS = 4, 10, 4
MINIMUM = 2  # extents of the longest sequence


@pytest.fixture
def arena():
    num_blocks = EXTENT_BLOCKS * NUM_EXTENTS - 1  # the last extent is short
    with Arena.create(
        LAYOUT,
        num_blocks,
        extent_blocks=EXTENT_BLOCKS,
        num_slots=NUM_SLOTS,
        leases_per_slot=2,
        max_lease_blocks=8,
    ) as made:
        yield made


class Node:
    """A migrator, its router, and engines that join it."""

    def __init__(self, router, migrator, arena, fake_peer) -> None:
        self.router, self.migrator, self.arena = router, migrator, arena
        self._fake_peer = fake_peer

    async def join(self, slot, role="prefill", name="", **spec):
        peer = self._fake_peer(role, name or f"n0/{role}-{slot}", slot=slot, address=ADDRESS, **spec)
        await peer.join()
        return peer

    async def say(self, peer, message):
        """Say something, and wait until it was handled."""
        peer.send(message)
        peer.send(peer.hello())
        await peer.expect(Welcome)

    async def want(self, peer, count):
        """Ask for extents and return those that were granted at once."""
        await self.say(peer, WantExtents(count))
        return granted(peer)

    async def retire(self, slot, witness):
        assert self.router.tell(self.migrator.spec.name, Retired(slot))
        await self.say(witness, ReturnExtents(()))

    @property
    def owned(self):
        """Return the extents of each slot, as the table in shared memory has them."""
        return [self.arena.extents_of(slot) for slot in range(NUM_SLOTS)]

    @property
    def counts(self):
        return [len(extents) for extents in self.owned]


def granted(peer):
    """Return what a peer was granted since it was last asked."""
    extents = [extent for message in peer.of(Extents) for extent in message.extents]
    peer.got = [message for message in peer.got if not isinstance(message, Extents)]
    return extents


def recalled(peer):
    counts = [message.count for message in peer.of(RecallExtents)]
    peer.got = [message for message in peer.got if not isinstance(message, RecallExtents)]
    return counts


@pytest.fixture
def node_of(make_spec, fake_peer, living, until, arena, cluster_of):
    @asynccontextmanager
    async def node_of(num_engines=2, incarnation=1):
        spec = make_spec(
            "migrator",
            "n0/migrator",
            arena=arena.fileno(),
            num_engines=num_engines,
            incarnation=incarnation,
            transport="lease",  # it has no blocks of its own
        )
        migrator = Migrator(spec, InprocTransport())
        async with cluster_of() as cluster, living(migrator):
            await until(lambda: "n0/migrator" in cluster.router.members)
            yield Node(cluster.router, migrator, arena, fake_peer)
        migrator.arena.close()

    return node_of


# ---- Asking and giving back --------


async def test_an_engine_gets_what_it_asks_for_and_the_table_says_the_same(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        extents = await node.want(a, 3)
        assert len(extents) == 3
        assert node.owned == [sorted(extents), [], [], []]
        more = await node.want(b, 1)
        assert node.owned == [sorted(extents), more, [], []]


async def test_nobody_gets_what_others_lack_to_their_minimum(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        assert len(await node.want(a, 99)) == NUM_EXTENTS - MINIMUM
        assert len(await node.want(b, MINIMUM)) == MINIMUM
        assert await node.want(a, 1) == []


async def test_an_engine_of_the_plan_that_has_not_come_yet_has_its_minimum(node_of):
    async with node_of(num_engines=3) as node:
        a = await node.join(0)
        assert len(await node.want(a, 99)) == NUM_EXTENTS - 2 * MINIMUM


async def test_an_engine_beyond_the_plan_has_its_minimum_as_soon_as_it_joins(node_of):
    async with node_of(num_engines=1) as node:
        a = await node.join(0)
        await node.join(3)
        assert len(await node.want(a, 99)) == NUM_EXTENTS - MINIMUM


async def test_what_is_missing_is_asked_back_from_whoever_can_spare_it_and_handed_on(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        extents = await node.want(a, 8)
        assert len(await node.want(b, 5)) == MINIMUM
        assert recalled(a) == [3]
        await node.say(a, ReturnExtents(tuple(extents[:2])))
        assert sorted(granted(b)) == sorted(extents[:2])
        assert recalled(a) == [1], "the rest is asked for again"
        await node.say(a, ReturnExtents(tuple(extents[2:4])))
        assert granted(b) == extents[2:3]
        assert node.counts == [4, 5, 0, 0]
        assert recalled(a) == []


async def test_a_wish_for_idle_memory_takes_nothing_from_anybody_and_is_forgotten(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        await node.say(a, WantExtents(0, idle=2))
        assert len(granted(a)) == 2
        await node.say(a, WantExtents(0, idle=99))
        assert len(granted(a)) == NUM_EXTENTS - MINIMUM - 2
        await node.want(b, MINIMUM)
        await node.say(b, WantExtents(0, idle=1))
        await node.say(a, ReturnExtents((node.owned[0][0],)))
        assert recalled(a) == granted(b) == []
        assert node.counts[:2] == [NUM_EXTENTS - MINIMUM - 1, MINIMUM]


async def test_an_idle_wish_says_that_nothing_is_missed_any_more(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        await node.want(a, 99)
        await node.want(b, MINIMUM + 1)
        await node.say(b, WantExtents(0, idle=1))
        await node.say(a, ReturnExtents((node.owned[0][0],)))
        assert node.counts[1] == MINIMUM


async def test_caches_leave_a_reserve_which_is_filled_up_again_out_of_them(node_of, monkeypatch):
    monkeypatch.setattr("pdactors.policy.extents.reserve", lambda num_extents, owners: 3)
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        assert len(await node.want(b, MINIMUM)) == MINIMUM
        await node.say(a, WantExtents(0, idle=99))
        assert node.counts[:2] == [NUM_EXTENTS - MINIMUM - 3, MINIMUM]
        assert len(await node.want(b, 1)) == 1  # at once
        assert a.of(RecallExtents) == [RecallExtents(1, idle=True)]
        await node.say(a, ReturnExtents((node.owned[0][0],)))
        await node.say(a, WantExtents(0, idle=1))
        assert node.counts[:2] == [NUM_EXTENTS - MINIMUM - 4, MINIMUM + 1]
        assert b.of(RecallExtents) == []


async def test_who_gives_nothing_back_is_asked_after_the_others(node_of):
    async with node_of(num_engines=3) as node:
        a, b, c = [await node.join(slot) for slot in range(3)]
        await node.want(a, 4)
        await node.want(b, 4)
        await node.want(c, MINIMUM + 1)
        assert (recalled(a), recalled(b)) == ([1], [])
        await node.want(c, 1)
        assert (recalled(a), recalled(b)) == ([], [1])
        await node.say(b, ReturnExtents((node.owned[1][0],)))
        assert node.counts[:3] == [4, 3, MINIMUM + 1]
        await node.want(c, 1)
        assert (recalled(a), recalled(b)) == ([], [1])


async def test_what_comes_back_is_shared_out_among_all_who_wait(node_of):
    async with node_of(num_engines=3) as node:
        a, b, c = [await node.join(slot) for slot in range(3)]
        extents = await node.want(c, 99)
        assert len(await node.want(a, MINIMUM + 1)) == len(await node.want(b, MINIMUM + 1)) == MINIMUM
        await node.say(c, ReturnExtents(tuple(extents[:2])))
        assert sorted(granted(a) + granted(b)) == sorted(extents[:2])
        assert node.counts == [MINIMUM + 1, MINIMUM + 1, len(extents) - 2, 0]


async def test_nobody_is_asked_below_its_minimum(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        await node.want(a, 8)
        await node.want(b, 99)
        assert recalled(a) == [8 - MINIMUM]
        assert recalled(b) == []


async def test_a_wish_that_is_repeated_is_not_added_up(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        extents = await node.want(a, 8)
        assert len(await node.want(b, MINIMUM)) == MINIMUM
        for _ in range(3):
            await node.want(b, 3)
        await node.say(a, ReturnExtents(tuple(extents)))
        assert node.counts == [0, MINIMUM + 3, 0, 0]
        assert not node.migrator.dropped


@pytest.mark.parametrize("extents", [(4,), (9,), (-1,), (NUM_EXTENTS,), (2**40,)])
async def test_only_what_the_sender_owns_can_be_given_back(node_of, extents):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        assert await node.want(a, 4) == [0, 1, 2, 3]
        assert await node.want(b, 1) == [4]
        await node.say(a, ReturnExtents((*extents, 0)))
        assert node.counts == [3, 1, 0, 0]
        assert node.migrator.dropped == {"foreign extent": 1}


async def test_what_is_given_back_twice_is_given_back_once(node_of):
    async with node_of() as node:
        a = await node.join(0)
        await node.want(a, 2)
        await node.say(a, ReturnExtents((0, 0)))
        assert node.counts == [1, 0, 0, 0]
        assert node.migrator.dropped == {"foreign extent": 1}


@pytest.mark.parametrize("slot", [-1, NUM_SLOTS, 2**40])
async def test_a_sender_without_a_slot_gets_nothing_and_can_return_nothing(node_of, slot):
    async with node_of() as node:
        stranger, a = await node.join(slot), await node.join(0)
        await node.want(a, 1)
        assert await node.want(stranger, 3) == []
        await node.say(stranger, ReturnExtents((0, 5)))
        assert node.counts == [1, 0, 0, 0]
        assert node.migrator.dropped == {"engine without a slot": 1, "foreign extent": 2}


async def test_only_engines_are_heard(node_of):
    async with node_of() as node:
        gateway = await node.join(0, "gateway", "gateway")
        await node.want(gateway, 3)
        await node.say(gateway, Retired(0))
        assert node.counts == [0, 0, 0, 0]
        assert node.migrator.dropped == {"unexpected": 2}


# ---- Engines that go --------


async def test_what_a_retired_engine_owned_goes_to_those_who_wait(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        extents = await node.want(a, 8)
        assert len(await node.want(b, 99)) == MINIMUM
        await node.retire(0, b)
        assert sorted(granted(b)) == sorted(extents)
        assert node.counts == [0, NUM_EXTENTS, 0, 0], "nothing is set aside for one that is gone"


async def test_what_a_retired_engine_had_not_taken_back_is_nobodys(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        block = EXTENT_BLOCKS * (await node.want(a, 1))[0]
        table = node.arena.leases()
        lease = Lessor(table, 0, 1).grant("r", 1, [block], 1e9)
        await node.retire(0, b)
        with pytest.raises(LeaseLost):
            Holder(table, 1, 1).accept(lease, 0.0, 1e9)
        successor = Loans(BlockPool(), table, 0, 2, 1.0)
        successor.take_over()
        assert not successor.live()
        assert successor.num_left == 2


async def test_what_a_retired_engine_still_asked_for_is_void(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        assert len(await node.want(a, 8)) == 8
        await node.want(b, 5)
        await node.retire(1, a)
        await node.say(a, ReturnExtents((0, 1, 2)))
        assert node.counts == [5, 0, 0, 0]
        b.send(WantExtents(1))  # it was under way when the engine died
        await b.expect(Stranger)
        assert node.counts == [5, 0, 0, 0]


async def test_another_engine_can_take_the_slot_of_a_retired_one(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        await node.want(b, 3)
        await node.retire(1, a)
        c = await node.join(1, "decode", "n0/decode-7")
        assert len(await node.want(a, 99)) == NUM_EXTENTS - MINIMUM
        assert len(await node.want(c, 99)) == MINIMUM
        assert recalled(a) == [NUM_EXTENTS - 2 * MINIMUM]


@pytest.mark.parametrize("slot", [-1, 3, 99])
async def test_the_retirement_of_a_slot_that_nobody_has_changes_nothing(node_of, slot):
    async with node_of() as node:
        a = await node.join(0)
        await node.want(a, 3)
        await node.retire(slot, a)
        assert node.counts == [3, 0, 0, 0]


async def test_the_successor_of_an_engine_that_crashed_has_its_extents(node_of):
    async with node_of() as node:
        a, b = await node.join(0), await node.join(1, "decode")
        extents = await node.want(a, 8)
        successor = await node.join(0, incarnation=2)
        assert node.owned[0] == sorted(extents)
        await node.want(b, 99)
        assert recalled(successor) == [6]
        assert recalled(a) == []
        await node.say(successor, ReturnExtents(tuple(extents[:6])))
        assert len(granted(b)) == 6


# ---- The migrator's own end --------


async def test_a_successor_goes_on_where_its_predecessor_stopped(node_of):
    async with node_of() as node:
        a = await node.join(0)
        await node.want(a, 8)
        a.close()
        before = node.owned
    async with node_of(incarnation=2) as node:
        assert node.owned == before
        a, b = await node.join(0), await node.join(1, "decode")
        assert len(await node.want(b, 5)) == MINIMUM
        assert recalled(a) == [3], "a is known although it never asked this one for anything"
        await node.say(a, ReturnExtents(tuple(before[0][:3])))
        assert len(granted(b)) == 3


# ---- Accounts --------


async def test_it_accounts_for_the_blocks_that_nobody_owns(node_of):
    async with node_of() as node:
        a = await node.join(0)
        blocks = node.migrator.report().load.blocks
        assert blocks.total == blocks.free == node.arena.num_blocks
        await node.want(a, 8)
        blocks = node.migrator.report().load.blocks
        assert blocks.total == blocks.free == 2 * EXTENT_BLOCKS - 1


async def test_an_extent_of_no_known_owner_is_a_fault(node_of):
    async with node_of() as node:
        assert node.migrator.report().faults == ()
        node.arena._extents[5] = NUM_SLOTS + 7
        assert node.migrator.report().faults == ("1 extents have no known owner",)
