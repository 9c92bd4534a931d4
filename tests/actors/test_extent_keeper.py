"""An owner's extents against the table in the arena, whatever a lost migrator left undone."""

from __future__ import annotations

import asyncio

import pytest

from pdactors.actors.extent_keeper import ExtentKeeper
from pdactors.errors import InvariantError
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.messages import ReturnExtents, WantExtents


@pytest.fixture
def arena():
    with Arena.create(
        KVLayout(1, 1, 8, 8, "float32"), 64, extent_blocks=1, num_slots=3, leases_per_slot=2, max_lease_blocks=8
    ) as made:
        yield made


@pytest.fixture
def pool():
    return BlockPool()


@pytest.fixture
def keeper(arena, pool):
    asked = []
    made = ExtentKeeper(arena, pool, 0, 2, 8, asked.append)
    made.asked = asked
    return made


def own(arena, *extents, slot=0):
    for extent in extents:
        arena.set_extent_owner(extent, slot)


async def test_what_the_table_says_is_ours_and_nobody_told_us_is_returned(arena, keeper):
    own(arena, 1, 2, 3)
    await keeper.add((1, 2))
    own(arena, 9, slot=1)
    keeper.reconcile()
    assert keeper.asked == [ReturnExtents((3,))]
    own(arena, 3, slot=None)
    keeper.reconcile()
    assert len(keeper.asked) == 1


async def test_what_is_just_arriving_is_not_returned(arena, keeper):
    own(arena, 1, 2)
    arriving = keeper.add((1, 2))
    arriving.send(None)  # up to where the kernel backs the memory
    keeper.reconcile()
    assert keeper.asked == []
    arriving.close()


def test_small_extents_are_asked_for_in_steps(arena, keeper):
    keeper.mind(0, 0, 1.0)
    keeper.mind(7, 64, 2.0)
    assert keeper.asked == [WantExtents(2), WantExtents(7)]
    keeper.mind(0, 1, 3.0)
    assert len(keeper.asked) == 2


async def test_whoever_uses_what_the_table_gives_to_others_stops(arena, keeper):
    own(arena, 1, 2)
    await keeper.add((1, 2))
    keeper.check()
    own(arena, 2, slot=1)
    with pytest.raises(InvariantError, match=r"belong to others: \[2\]"):
        keeper.check()


def cache(pool, count):
    blocks = pool.allocate(count)
    for block in blocks:
        pool.insert(b"%16d" % block, block, None)
    pool.free(blocks)


async def test_a_cache_asks_for_idle_memory_before_it_evicts(arena, keeper, pool):
    own(arena, *range(8))
    await keeper.add(tuple(range(8)))
    cache(pool, 6)
    keeper.mind(0, 8, 1.0, caches=True)
    assert keeper.asked == []  # a step is empty
    cache(pool, 8)
    keeper.mind(0, 8, 1.0)
    assert keeper.asked == []
    keeper.mind(0, 8, 1.0, caches=True)
    keeper.mind(0, 8, 1.05, caches=True)
    assert keeper.asked == [WantExtents(0, 4)]
    keeper.mind(0, 3, 1.2, caches=True)  # five are set aside, and would evict as many
    assert keeper.asked[1:] == [WantExtents(0, 9)]
    keeper.mind(3, 0, 1.21, caches=True)  # what is missed is more than a wish
    keeper.mind(0, 8, 1.4, caches=True)
    keeper.mind(3, 0, 1.41, caches=True)
    assert keeper.asked[2:] == [WantExtents(3), WantExtents(0, 4), WantExtents(3)]


async def test_a_wish_is_followed_by_the_next_once_it_is_granted(arena, keeper, pool):
    own(arena, 0, 1)
    await keeper.add((0,))
    cache(pool, 1)
    keeper.mind(0, 1, 1.0, caches=True)
    arriving = asyncio.create_task(keeper.add((1,)))
    await asyncio.sleep(0)  # up to where the kernel backs the memory
    keeper.mind(0, 1, 2.0, caches=True)
    assert keeper.asked == [WantExtents(0, 4)]
    await arriving
    cache(pool, 2)
    keeper.mind(0, 2, 2.0, caches=True)
    assert keeper.asked == [WantExtents(0, 4)] * 2


async def test_what_nobody_misses_is_given_back_only_beyond_what_would_be_asked_for_again(arena, keeper, pool):
    own(arena, *range(20))
    await keeper.add(tuple(range(20)))
    cache(pool, 20)
    keeper.give_back(99, 5, idle=True)
    assert len(keeper.asked.pop().extents) == 3
    keeper.give_back(99, 2, idle=True)
    assert keeper.asked == []
    keeper.give_back(99, 5)
    assert len(keeper.asked.pop().extents) == 5
