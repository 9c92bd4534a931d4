from __future__ import annotations

import pytest

from pdactors.errors import InvariantError
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.layout import KVLayout
from pdactors.kv.leases import GRACE_S
from pdactors.kv.loans import Loans
from pdactors.kv.store import ArenaStore
from pdactors.messages import Blocks

STORE, READER, OTHER = 0, 1, 2  # slots
KEY = "r", 1


class World:
    """A store, and engines that read from it."""

    def __init__(self, arena: Arena) -> None:
        self.pool = BlockPool()
        self.loans = Loans(self.pool, arena.leases(), STORE, 1, 30.0)
        self.store = ArenaStore(self.pool, self.loans)
        self.readers = [Loans(BlockPool(), arena.leases(), slot, 1, 30.0) for slot in (READER, OTHER)]

    def put(self, blocks: list[int], text: str, part: bytes | None = None) -> list[int]:
        held = self.store.put(blocks, digests(text), part, None)
        self.store.free(held)
        self.pool.check()
        return held


def digests(text: str) -> list[bytes]:
    return [text[: i + 1].encode() for i in range(len(text))]


@pytest.fixture
def world():
    with Arena.create(
        KVLayout(1, 1, 8, 8, "float32"), 16, extent_blocks=1, num_slots=3, leases_per_slot=4, max_lease_blocks=8
    ) as arena:
        yield World(arena)


def test_what_was_put_is_found_by_digest(world):
    assert world.put([5, 3, 9], "abc") == [5, 3, 9]
    assert [world.store.contains(digests(text)) for text in ("abc", "abx", "x", "")] == [3, 2, 0, 0]
    assert world.store.get(digests("abx")) == [5, 3]
    world.store.free([5, 3])


def test_a_block_that_follows_those_of_others_is_found_behind_them(world):
    world.put([1], "a")
    held = world.store.put([2], [b"ab"], None, b"a")
    world.store.free(held)
    assert world.store.get(digests("ab")) == [1, 2]


def test_the_first_block_of_a_digest_stays_and_the_second_is_free(world):
    world.put([1, 2], "ab")
    assert world.put([3, 4, 5], "abc") == [1, 2, 5]
    assert world.pool.account() == Blocks(total=5, free=2, cached=3)


def test_a_partly_filled_block_is_found_by_its_part_and_never_replaced(world):
    """What follows the part may differ."""
    assert world.put([1, 2], "a", part=b"a+") == [1, 2]
    assert world.put([3, 4], "a", part=b"a+") == [1, 4]
    assert world.store.get([b"a", b"a+"]) == [1, 2]


def test_a_block_is_put_once(world):
    world.put([1], "a")
    with pytest.raises(InvariantError):
        world.store.put([1], [b"b"], None, None)


def test_many_read_one_copy(world):
    world.put([1, 2], "ab")
    leases = [world.store.lease((name, 1), [1, 2], 0.0) for name in "xy"]
    assert [reader.borrow(lease, 0.0) for reader, lease in zip(world.readers, leases, strict=True)] == [(1, 2)] * 2
    assert world.pool.account() == Blocks(total=2, leased_out=2)


def test_what_is_read_is_not_evicted_and_the_least_recently_used_goes_first(world):
    world.put([1], "a")
    world.put([2], "b")
    world.put([3], "c")
    lease = world.store.lease(KEY, [1], 0.0)
    world.readers[0].borrow(lease, 0.0)
    world.store.free(world.store.get([b"b"]))
    assert world.store.evict(1) == [range(3, 4)]
    assert world.store.evict(9) == [range(2, 3)]
    world.readers[0].give_back(lease)
    world.loans.sweep(GRACE_S)
    assert world.store.evict(9) == [range(1, 2)]
    assert world.store.contains([b"a"]) == 0
    assert world.pool.account() == Blocks()
