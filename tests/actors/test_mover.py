"""KV on the move: migrators of several nodes in one process, among a router and engines that do what a test wants."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from moving import BLOCK, DECODE, LAYOUT, MAX_TOKENS, MIGRATOR, NUM_EXTENTS, World, headers, payloads

from pdactors.messages import (
    CacheChanged,
    Migrate,
    Migrated,
    Offer,
    Pin,
    Pinned,
)
from pdactors.policy.transfer import MAX_IN_FLIGHT


def transfers(node):
    """Return what a migrator counted; in these tests of one kind."""
    (counts,) = node.migrator.report().transfers
    return counts


# ---- A migration --------


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 100, 128, 129, MAX_TOKENS])
async def test_a_sequence_arrives_whole_and_everything_is_given_back(world_of, num_tokens):
    async with world_of() as world:
        world.migrate(world.handle(num_tokens))
        message = await world.arrives()
        assert message.num_bytes == LAYOUT.num_blocks(num_tokens) * LAYOUT.block_bytes
        assert world[0].migrator.counts["migrations"] == 1
        for node, direction in zip(world, ("send", "receive"), strict=True):
            counts = transfers(node)
            assert (counts.direction, counts.path, counts.codec, counts.num_failed) == (direction, "ucx", "none", 0)
            assert (counts.num_stored, counts.num_bytes) == (-(-message.handle.num_tokens // 128), message.num_bytes)
            assert 0 < counts.seconds < 10
        world.release()
        await world.all_is_back()


async def test_the_source_lets_go_once_all_has_arrived(world_of, until):
    """I3: and not before."""
    async with world_of() as world:
        world[1].port.holds = payloads
        world.migrate(world.handle())
        await until(lambda: world[1].port.held)
        (move,) = world[0].migrator.report().moves
        assert (move.request, move.to, move.codec, move.num_stored) == ("r", "n1/migrator", "none", 0)
        assert move.num_blocks == LAYOUT.num_blocks(100)
        world[0].prefill.loans.sweep(world[0].migrator.clock())
        (lease,) = world[0].prefill.loans.live()
        assert lease.holder_slot == MIGRATOR
        world[1].port.let_go()
        await world.arrives()
        await until(lambda: world[0].prefill.loans.sweep(world[0].migrator.clock()))
        assert not world[0].mover.loans.borrowed
        assert not world[0].migrator.report().moves


async def test_what_is_stored_counts_although_the_wire_has_not_said_that_it_was_sent(world_of, until):
    """The receiver's word may be faster, and its memory stays borrowed until the wire's word is here."""
    async with world_of() as world:
        send, sent = world[0].port.send, []

        def send_slowly(peer, tag, buffers, ended):
            send(peer, tag, buffers, lambda error: sent.append(lambda: ended(error)))

        world[0].port.send = send_slowly
        world.migrate(world.handle())
        message = await world.arrives()
        counts = world[0].migrator.counts
        await until(lambda: counts["migrations"])
        assert counts["migrated_bytes"] == message.num_bytes == LAYOUT.num_blocks(100) * LAYOUT.block_bytes
        assert world[0].mover.loans.borrowed
        for ended in sent:
            ended()
        assert not world[0].mover.loans.borrowed
        world.release()
        await world.all_is_back()


async def test_what_has_arrived_once_is_not_sent_again(world_of):
    async with world_of() as world:
        world.migrate(world.handle(100, "a"), "a")
        first = await world.arrives("a")
        world.release("a")
        await world.all_is_back()
        world.migrate(world.handle(200, "b"), "b")
        second = await world.arrives("b")
        shared = 99 // BLOCK
        assert first.num_bytes == LAYOUT.num_blocks(100) * LAYOUT.block_bytes
        assert second.num_bytes == (LAYOUT.num_blocks(200) - shared) * LAYOUT.block_bytes
        world.release("b")
        await world.all_is_back()
        added = {digest for _, m in world.hub.got if isinstance(m, CacheChanged) for digest in m.added}
        assert {*world.digests("a"), *world.digests("b")} <= added


async def test_what_has_arrived_can_be_lent_to_a_prefill_there(world_of, until):
    async with world_of() as world:
        world.migrate(world.handle(100, "a"), "a")
        await world.arrives("a")
        world.release("a")
        world.hub.tell(world[1].name, Pin("b", 1, 0, world.digests("a")))
        await until(lambda: world.hub.of(Pinned, "b"))
        (pinned,) = world.hub.of(Pinned, "b")
        blocks = list(pinned.segment.blocks)
        assert len(blocks) == 12
        world.handle(100, "b")
        ours, theirs = world[1].arena.payload()[blocks], world[0].arena.payload()[world.blocks["b"][:12]]
        assert np.array_equal(ours, theirs)
        world.release("b")
        await world.all_is_back()


async def test_what_was_pruned_arrives_as_that_and_is_found_by_nobody(world_of):
    async with world_of() as world:
        handle = msgspec.structs.replace(world.handle(100), num_pruned=40)
        world.hub.tell(world[0].name, Migrate("r", 1, handle, world[1].name))
        message = await world.arrives()
        assert (message.handle.num_tokens, message.handle.num_pruned) == (100, 40)
        assert (world[0].migrator.counts["migrations"], world[0].migrator.counts["migrations_pruned"]) == (1, 1)
        world.release()
        await world.all_is_back()
        assert world[1].mover.pool.account().cached == 0
        assert not [message for _, message in world.hub.got if isinstance(message, CacheChanged)]


async def test_many_at_once_all_arrive(world_of):
    async with world_of() as world:
        for i in range(6):
            world.migrate(world.handle(30 + i, f"r{i}", family=i), f"r{i}", priority=["batch", "interactive"][i % 2])
        for i in range(6):
            await world.arrives(f"r{i}")
            world.release(f"r{i}")
        await world.all_is_back()


# ---- Sent ahead --------


async def test_what_is_announced_is_there_before_the_rest_is_known(world_of, until):
    async with world_of() as world:
        handle = world.handle(100)
        await world.announce(world.blocks["r"][:4], 100)
        await until(lambda: world[1].port.num_payloads == 1)
        await world.announce(world.blocks["r"][4:8], 100, start=4)
        await until(lambda: world[1].port.num_payloads == 2)
        await asyncio.sleep(0.02)
        assert not world.hub.of(Migrated)
        world.migrate(handle)
        await world.arrives()
        assert world[1].port.num_payloads == 3
        world.release()
        await world.all_is_back()


async def test_what_was_announced_for_one_node_may_go_to_another(world_of, until):
    async with world_of(3) as world:
        handle = world.handle(100)
        await world.announce(world.blocks["r"][:4], 100)
        await until(lambda: world[1].port.num_payloads == 1)
        world.migrate(handle, target=2)
        assert (await world.arrives(node=2)).handle.node == "n2"
        await until(lambda: not World.held(world[1]))
        world.release()
        await world.all_is_back()


async def test_what_was_announced_and_never_handed_over_is_given_back(world_of, until):
    async with world_of() as world:
        world.handle(100)
        await world.announce(world.blocks["r"][:4], 100)
        await until(lambda: world[1].port.num_payloads == 1)
        world.release()
        await world.all_is_back()


# ---- A bad wire --------


async def test_a_damaged_byte_is_caught_and_sent_again(world_of):
    async with world_of() as world:
        spoiled = []
        world[1].port.spoils = lambda tag: payloads(tag) and not spoiled and not spoiled.append(tag)
        world.migrate(world.handle(100))
        message = await world.arrives()
        assert world[1].port.num_payloads == 2
        assert spoiled
        assert [(t.num_stored, t.num_failed) for t in map(transfers, world)] == [(1, 1), (1, 1)]
        assert {transfers(node).num_bytes for node in world} == {message.num_bytes}
        assert world[0].migrator.counts["migrated_bytes"] == message.num_bytes
        assert message.num_bytes == LAYOUT.num_blocks(100) * LAYOUT.block_bytes
        world.release()
        await world.all_is_back()


async def test_the_fault_that_is_asked_for_is_caught_too(world_of):
    async with world_of(kv={"damage_every": 2}) as world:
        world.migrate(world.handle(MAX_TOKENS))
        await world.arrives()
        assert world[1].port.num_payloads > 3
        world.release()
        await world.all_is_back()


async def test_what_is_damaged_again_and_again_is_given_up(world_of):
    async with world_of(kv={"damage_every": 1}) as world:
        world.migrate(world.handle(MAX_TOKENS))
        await world.strands("failed 4 times: checksum")
        assert world[0].migrator.report().counts["migrations_failed"] == 1
        assert transfers(world[0]).num_failed >= 4
        assert not world.hub.of(Migrated)
        await asyncio.sleep(0.02)
        world.release()
        await world.all_is_back()


async def test_without_checksums_nothing_is_looked_at(world_of):
    async with world_of(kv={"checksum": False}) as world:
        world.migrate(world.handle(100))
        await world.arrives()
        world.release()
        await world.all_is_back()


async def test_a_wrong_header_drops_the_connection_and_a_new_one_serves(world_of):
    async with world_of() as world:
        spoiled = []
        world[1].port.spoils = lambda tag: headers(tag) and not spoiled and not spoiled.append(tag)
        world.migrate(world.handle(MAX_TOKENS))
        await world.strands("n1/migrator was lost: it has a new data port, or connects anew")
        assert not world.hub.of(Migrated)
        await world.until(lambda: world[0].mover.can_reach(world[1].name))
        world.release()
        await world.all_is_back()
        world.migrate(world.handle(100, "again"), "again")
        await world.arrives("again")
        world.release("again")
        await world.all_is_back()


# ---- Endings on the way --------


@pytest.mark.parametrize("holds", [headers, payloads])
async def test_a_cancel_in_mid_transfer_gives_all_back(world_of, until, holds):
    async with world_of() as world:
        world[1].port.holds = holds
        world.migrate(world.handle(MAX_TOKENS, "a"), "a")
        await until(lambda: len({tag for _, tag in world[1].port.held}) >= min(MAX_IN_FLIGHT, 3))
        world.release("a")
        world[1].port.let_go()
        await world.all_is_back()
        assert not world.hub.of(Migrated, "a")
        world.migrate(world.handle(50, "b"), "b")
        await world.arrives("b")


async def test_blocks_that_may_still_be_written_are_not_used_for_anything(world_of, until):
    """I2: they are quarantined until their transfer has ended."""
    async with world_of() as world:
        world[1].port.holds = payloads
        world.migrate(world.handle(MAX_TOKENS, "a"), "a")
        await until(lambda: len(world[1].port.held) >= 1)
        world.release("a")
        await until(lambda: not world[1].mover.inbound._coming)
        landing = [b for each in world[1].mover.inbound._landing for b in each.blocks]
        assert landing  # those whose header had not come are void
        free = world[1].mover.pool.allocate(world[1].mover.pool.num_available)
        assert set(free).isdisjoint(landing)
        world[1].mover.pool.free(free)
        world[1].port.let_go()
        await world.all_is_back()


@pytest.mark.parametrize("lost", [0, 1])
@pytest.mark.parametrize("step", ["offered", "granted", "landing"])
async def test_a_migrator_that_is_lost_on_the_way_leaves_nothing_behind(world_of, until, lost, step):
    async with world_of() as world:
        port, inbound = world[1].port, world[1].mover.inbound
        port.holds = {"offered": lambda tag: False, "granted": headers, "landing": payloads}[step]
        if step == "offered":
            world[1].mover.inbound.serve = lambda: None
        world.migrate(world.handle(MAX_TOKENS))
        await until(lambda: inbound.keys and (step == "offered" or port.held))
        await world.stop(lost)
        if lost == 1:
            await world.strands("n1/migrator was lost")
            if step == "landing":
                assert transfers(world[0]).num_failed > 0
            world.release()
            await world.all_is_back()
        else:
            await until(lambda: not World.held(world[1]), lambda: f"{World.held(world[1])}")
            world.check()
        assert not world.hub.of(Migrated)


async def test_a_peer_that_falls_silent_is_given_up_and_taken_back(world_of, until):
    async with world_of(dead_after_ms=200) as world:
        world[1].port.holds = payloads
        world.migrate(world.handle(MAX_TOKENS, "a"), "a")
        await until(lambda: world[1].port.held)
        world[1].migrator.state = "starting"  # so it gives no sign of life
        await world.strands("n1/migrator was lost: silent for 200 ms", "a")
        world.release("a")
        world[1].migrator.state = "ready"
        await until(lambda: world[0].mover.can_reach(world[1].name) and world[1].mover.can_reach(world[0].name))
        world[1].port.let_go()
        await world.all_is_back()
        world.migrate(world.handle(50, "b"), "b")
        await world.arrives("b")
        world.release("b")
        await world.all_is_back()


async def test_what_is_overdue_is_sent_no_further_and_others_go_on(world_of, until):
    async with world_of() as world:
        world[1].port.holds = payloads
        world.migrate(world.handle(MAX_TOKENS, "a"), "a", time_left_s=0.2)
        await until(lambda: len(world[1].port.held) >= MAX_IN_FLIGHT)
        world.migrate(world.handle(60, "b", family=1), "b", priority="batch")
        await world.strands("deadline", "a")
        world[1].port.let_go()
        await world.arrives("b")
        for name in "ab":
            world.release(name)
        await world.all_is_back()


async def test_kv_that_its_owner_took_back_is_not_sent_as_what_it_was(world_of, until):
    async with world_of() as world:
        world[1].port.holds = headers
        handle = world.handle(MAX_TOKENS)
        lease = handle.segments[0].lease
        world[1].mover.inbound.serve, serve = lambda: None, world[1].mover.inbound.serve
        world.migrate(handle)
        await until(lambda: world[0].mover.loans.borrowed)
        world[0].arena.leases().closing[lease.index] = lease.generation  # as its owner does when it expires
        world[1].mover.inbound.serve = serve
        await world.strands("the KV was taken back")
        world[1].port.let_go()
        world.release()
        await asyncio.sleep(0.05)
        assert not world.hub.of(Migrated)


# ---- Room --------


async def test_an_offer_waits_for_room_and_goes_when_there_is_some(world_of, until):
    async with world_of() as world:
        arena, migrator = world[1].arena, world[1].migrator
        taken = [e for e in range(NUM_EXTENTS) if arena.extent_owner(e) is None]
        for extent in taken:
            arena.set_extent_owner(extent, DECODE)
        world.migrate(world.handle(MAX_TOKENS))
        await until(lambda: world[1].mover.inbound.blocks_lacking)
        await asyncio.sleep(0.05)
        assert not world.hub.of(Migrated)
        assert world[1].port.num_payloads == 0  # nothing is sent that cannot be stored
        for extent in taken:
            arena.set_extent_owner(extent, None)
        migrator._serve()
        await world.arrives()
        world.release()
        await world.all_is_back()


async def test_an_offer_that_waits_can_be_cancelled(world_of, until):
    async with world_of() as world:
        for extent in [e for e in range(NUM_EXTENTS) if world[1].arena.extent_owner(e) is None]:
            world[1].arena.set_extent_owner(extent, DECODE)
        world.migrate(world.handle(MAX_TOKENS))
        await until(lambda: world[1].mover.inbound.blocks_lacking)
        world.release()
        await world.all_is_back()


async def test_what_is_cached_makes_room_for_what_comes(world_of):
    async with world_of() as world:
        for i in range(4):  # 64 blocks hold one and a half of them
            world.migrate(world.handle(MAX_TOKENS, f"r{i}", family=i), f"r{i}")
            await world.arrives(f"r{i}")
            world.release(f"r{i}")
            await world.all_is_back()


# ---- Refusals --------


async def test_kv_of_another_layout_is_refused_with_both_values(world_of):
    async with world_of() as world:
        handle = msgspec.structs.replace(world.handle(), layout="f" * 16)
        world.migrate(handle)
        message = await world.strands("KV layout")
        assert "f" * 16 in message.reason
        assert LAYOUT.fingerprint in message.reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"layout": "f" * 16}, f"KV layout: theirs is {'f' * 16}, ours is {LAYOUT.fingerprint}"),
        ({"num_tokens": 0}, "0 tokens and 0 left out; model.max_model_len is 320"),
        ({"num_tokens": MAX_TOKENS + 1}, "321 tokens and 0 left out; model.max_model_len is 320"),
        ({"num_pruned": MAX_TOKENS - 8}, "9 tokens and 312 left out; model.max_model_len is 320"),
        ({"num_pruned": 1, "digests": (b"x",)}, "1 tokens are left out, so no digest says what a block holds"),
        ({"digests": (b"x",) * 3}, "3 digests of 2 blocks"),
    ],
)
async def test_an_offer_that_cannot_be_right_is_refused(world_of, until, changes, reason):
    async with world_of() as world:
        got = []
        world[0].mover.outbound.abandoned = lambda _, message: got.append(message.reason)
        world[0].mover.tell(world[1].name, Offer(**{"request": "x", "attempt": 1, "layout": LAYOUT.fingerprint,
                                                     "num_tokens": 9, "digests": (), **changes}))  # fmt: skip
        await until(lambda: got)
        assert got == [reason]


async def test_a_handle_that_names_too_few_blocks_is_refused(world_of):
    async with world_of() as world:
        handle = world.handle(100)
        segment = msgspec.structs.replace(handle.segments[0], blocks=handle.segments[0].blocks[:-1])
        world.migrate(msgspec.structs.replace(handle, segments=(segment,)))
        await world.strands("12 blocks are named for 100 tokens")
        world.release()
        await world.all_is_back()


async def test_a_handle_whose_lease_names_other_blocks_is_refused(world_of):
    async with world_of() as world:
        handle = world.handle(16)
        segment = msgspec.structs.replace(handle.segments[0], blocks=(60, 61))
        world.migrate(msgspec.structs.replace(handle, segments=(segment,)))
        await world.strands("names other blocks than the message")
        world.release()
        await world.all_is_back()


async def test_a_lease_that_has_ended_is_refused(world_of):
    async with world_of() as world:
        handle = world.handle(16)
        world[0].prefill.loans.revoke(("r", 1))
        world.migrate(handle)
        await world.strands("was revoked")
        world.release()
        await world.all_is_back()


async def test_a_migrator_that_is_not_there_cannot_be_reached(world_of):
    async with world_of() as world:
        await world.stop(1)
        await world.until(lambda: not world[0].mover.can_reach("n1/migrator"))
        world.migrate(world.handle())
        await world.strands("n1/migrator cannot be reached")
        world.release()
        await world.all_is_back()


@pytest.mark.parametrize("both", [False, True])
async def test_ends_that_drop_their_connection_agree_on_a_new_one(world_of, until, both):
    """Also when an offer of the former one is still on its way."""
    async with world_of() as world:
        a, b = world[0].mover, world[1].mover
        for _ in range(3):
            b.offer_port(world[0].name)
            a.reconnect(world[1].name, "the test says so")
            if both:
                b.reconnect(world[0].name, "the test says so")
            await until(lambda: a.can_reach(world[1].name) and b.can_reach(world[0].name))
        await asyncio.sleep(0.05)
        known = a._known[world[1].name], b._known[world[0].name], a._num_dropped.total(), b._num_dropped.total()
        await asyncio.sleep(0.05)
        assert known == (
            a._known[world[1].name],
            b._known[world[0].name],
            a._num_dropped.total(),
            b._num_dropped.total(),
        )
        world.migrate(world.handle(50))
        await world.arrives()
        world.release()
        await world.all_is_back()
