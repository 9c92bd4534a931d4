"""An owner's extents against the table in the arena, whatever a lost migrator left undone."""

from __future__ import annotations

import pytest

from pdactors.actors.extent_keeper import ExtentKeeper
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


def test_a_cache_asks_for_idle_memory_before_it_evicts(arena, keeper, pool):
    keeper.mind(0, 64, 1.0, caches=False)
    assert keeper.asked == []
    keeper.mind(0, 64, 1.0, caches=True)
    keeper.mind(0, 64, 1.001, caches=True)
    assert keeper.asked == [WantExtents(0, 2)]
    pool.add_extent(arena.blocks_of_extent(0))
    keeper.mind(0, 64, 2.0, caches=True)
    assert keeper.asked == [WantExtents(0, 2)]
    pool.allocate(pool.num_free)
    keeper.mind(3, 0, 3.0, caches=True)  # what is missed is more than a wish
    assert keeper.asked[1:] == [WantExtents(3)]
