"""What engines publish to the migrator of their node, on a real arena."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest

from pdactors.actors.migrator import Migrator
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.kv.loans import Loans
from pdactors.messages import Extents, KVHandle, Lease, Prefilled, Publish, Segment, WantExtents, Welcome
from pdactors.transport.inproc import InprocTransport

ADDRESS = "tcp://127.0.0.1:0"
LAYOUT = KVLayout(2, 2, 8, 8, "float32")  # 8 tokens in a block: the longest sequence, 64 tokens, has 8 blocks
NUM_BLOCKS = 40
PREFILL, DECODE, STORE = 0, 1, 2
DIGESTS = tuple(bytes([i]) * 16 for i in range(8))


class Node:
    def __init__(self, cluster, migrator, arena, fake_peer) -> None:
        self.cluster, self.migrator, self.arena, self._fake_peer = cluster, migrator, arena, fake_peer
        self.told = []  # what the router was told
        for kind in (Prefilled,):
            cluster.router.accept(kind, lambda _, message: self.told.append(message), "migrator")
        self.reader = Loans(BlockPool(), arena.leases(), DECODE, 1, 30.0)

    async def join(self, slot, role, **spec):
        peer = self._fake_peer(role, f"n0/{role}", slot=slot, address=ADDRESS, mode="kvstore", **spec)
        await peer.join()
        return peer

    async def say(self, peer, message):
        """Say something, wait until it was handled, and return the extents that were granted."""
        peer.send(message)
        peer.send(peer.hello())
        await peer.expect(Welcome)
        granted = [extent for message in peer.of(Extents) for extent in message.extents]
        peer.got = [message for message in peer.got if not isinstance(message, Extents)]
        return granted

    @property
    def account(self):
        self.migrator.holdings.check()
        assert self.migrator.report().faults == ()
        return self.migrator.holdings.pool.account()


@pytest.fixture
def node_of(make_spec, fake_peer, living, until, cluster_of):
    @asynccontextmanager
    async def node_of():
        with Arena.create(
            LAYOUT, NUM_BLOCKS, extent_blocks=1, num_slots=3, leases_per_slot=4, max_lease_blocks=8
        ) as arena:
            spec = make_spec(
                "migrator",
                "n0/migrator",
                mode="kvstore",
                slot=STORE,
                arena=arena.fileno(),
                num_engines=2,
                transport="lease",
            )
            migrator = Migrator(spec, InprocTransport())
            async with cluster_of(mode="kvstore") as cluster, living(migrator):
                await until(lambda: "n0/migrator" in cluster.router.members)
                yield Node(cluster, migrator, arena, fake_peer)
            migrator.arena.close()

    return node_of


def done(num_tokens, *before, request="r"):
    handle = KVHandle("n0", "n0/prefill", LAYOUT.fingerprint, before, num_tokens)
    return Prefilled(request, 1, 42, handle, 1.0)


async def test_published_blocks_change_hands_and_a_prompt_is_handed_over(node_of, until):
    async with node_of() as node:
        prefill = await node.join(PREFILL, "prefill")
        blocks = (await node.say(prefill, WantExtents(5)))[:3]
        await node.say(prefill, Publish("r", 1, tuple(blocks), DIGESTS[:2], done=done(20)))
        assert len(node.arena.extents_of(PREFILL)) == 2
        await until(lambda: node.told)
        (message,) = node.told
        (segment,) = message.handle.segments
        assert (message.handle.owner, message.first_token, segment.blocks) == ("n0/migrator", 42, tuple(blocks))
        assert node.reader.borrow(segment.lease, node.migrator.clock()) == tuple(blocks)
        assert node.account.leased_out == 3
        node.reader.give_back(segment.lease)
        node.migrator.holdings.tick()
        assert (node.account.cached, node.account.free) == (2, 1)


async def test_a_prompt_whose_beginning_was_borrowed_is_handed_over_whole(node_of, until):
    async with node_of() as node:
        prefill = await node.join(PREFILL, "prefill")
        blocks = await node.say(prefill, WantExtents(4))
        await node.say(prefill, Publish("a", 1, tuple(blocks[:2]), DIGESTS[:2]))
        holdings = node.migrator.holdings
        lease = holdings.loans.lend(("r", 1), blocks[:2], node.migrator.clock())
        before = Segment("n0/migrator", lease, 0, tuple(blocks[:2]))
        await node.say(prefill, Publish("r", 1, tuple(blocks[2:]), DIGESTS[2:3], None, DIGESTS[1], done(30, before)))
        await until(lambda: node.told)
        assert node.told[0].handle.segments[0].blocks == tuple(blocks)
        assert holdings.store.contains(DIGESTS[:4]) == 3


@pytest.mark.parametrize(
    "fault", ["foreign", "free", "out of range", "twice", "too many digests", "another lease", "too few blocks"]
)
async def test_what_does_not_fit_is_refused_and_changes_nothing(node_of, fault):
    async with node_of() as node:
        prefill, decode = await node.join(PREFILL, "prefill"), await node.join(DECODE, "decode")
        blocks = tuple(await node.say(prefill, WantExtents(2)))
        foreign = await node.say(decode, WantExtents(1))
        digests, hand_over = DIGESTS[:2], done(16)
        if fault == "too many digests":
            digests = DIGESTS[:3]
        elif fault == "another lease":
            hand_over = done(24, Segment("n0/migrator", Lease(0, 1), 0, (0,)))
        elif fault == "too few blocks":
            hand_over = done(17)
        else:
            wrong = {"foreign": foreign[0], "free": NUM_BLOCKS - 1, "out of range": 2**31, "twice": blocks[0]}[fault]
            blocks = (blocks[0], wrong)
        before = node.arena.extents_of(PREFILL)
        await node.say(prefill, Publish("r", 1, blocks, digests, done=hand_over))
        assert node.arena.extents_of(PREFILL) == before
        assert (node.account.total, node.told) == (0, [])
        assert node.migrator.dropped == {"unfit blocks published": 1}


async def test_a_full_store_evicts_what_nobody_reads_for_whoever_lacks_memory(node_of):
    async with node_of() as node:
        prefill, decode = await node.join(PREFILL, "prefill"), await node.join(DECODE, "decode")
        minimum = LAYOUT.num_blocks(64)
        for i in range(6):
            blocks = await node.say(prefill, WantExtents(4))
            await node.say(prefill, Publish(f"r{i}", 1, tuple(blocks), tuple(bytes([i, j] * 8) for j in range(4))))
        assert node.account.cached == 24
        assert len(await node.say(decode, WantExtents(NUM_BLOCKS - 2 * minimum))) == NUM_BLOCKS - 2 * minimum
        assert node.account.cached == minimum
        assert node.migrator.holdings.store.contains([bytes([0, 0] * 8)]) == 0
        assert node.migrator.holdings.store.contains([bytes([5, 0] * 8)]) == 1
        assert len(await node.say(prefill, WantExtents(99))) == 2 * minimum
        assert node.account.cached == 0


async def test_what_is_read_stays_however_much_memory_is_missed(node_of):
    async with node_of() as node:
        prefill, decode = await node.join(PREFILL, "prefill"), await node.join(DECODE, "decode")
        blocks = await node.say(prefill, WantExtents(20))
        await node.say(prefill, Publish("r", 1, tuple(blocks), DIGESTS))
        node.migrator.holdings.loans.lend(("r", 1), blocks[:8], node.migrator.clock())
        await node.say(decode, WantExtents(99))
        assert node.account.leased_out == 8
        assert node.migrator.holdings.store.contains(DIGESTS) == 8
