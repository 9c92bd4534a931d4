"""An owner's extents against the table in the arena, whatever a lost migrator left undone."""

from __future__ import annotations

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
def keeper(arena):
    asked = []
    made = ExtentKeeper(arena, BlockPool(), 0, 2, 8, asked.append)
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
