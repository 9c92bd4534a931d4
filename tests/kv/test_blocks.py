from __future__ import annotations

import pytest

from pdactors.errors import InvariantError
from pdactors.kv.blocks import BlockPool, NoBlocks
from pdactors.messages import Blocks


def make(num_blocks: int = 6) -> BlockPool:
    pool = BlockPool()
    pool.add_extent(range(num_blocks))
    return pool


def fill(pool: BlockPool, text: str) -> list[int]:
    """Compute and cache a chain of one-letter digests; return its blocks, in use."""
    blocks = pool.match(digests(text))
    blocks += pool.allocate(len(text) - len(blocks))
    for i, block in enumerate(blocks):
        pool.insert(text[: i + 1].encode(), block, text[:i].encode() or None)
    return blocks


def digests(text: str) -> list[bytes]:
    return [text[: i + 1].encode() for i in range(len(text))]


def test_allocated_blocks_are_distinct_and_used() -> None:
    pool = make()
    blocks = pool.allocate(4)
    assert len(set(blocks)) == 4
    assert pool.account() == Blocks(total=6, free=2, used=4)
    pool.check()


def test_freed_blocks_are_the_next_ones_allocated() -> None:
    pool = make()
    blocks = pool.allocate(3)
    pool.free(blocks)
    assert sorted(pool.allocate(3)) == sorted(blocks)


def test_allocate_changes_nothing_when_it_cannot() -> None:
    pool = make()
    pool.free(fill(pool, "ab"))
    pool.allocate(2)
    before = pool.account()
    assert not pool.can_allocate(5)
    with pytest.raises(NoBlocks, match="5 blocks wanted, 2 free and 2 evictable"):
        pool.allocate(5)
    assert pool.account() == before
    assert pool.can_allocate(4)
    pool.allocate(4)
    pool.check()


def test_a_block_is_free_when_its_last_reference_is() -> None:
    pool = make()
    blocks = pool.allocate(1)
    pool.retain(blocks)
    pool.free(blocks)
    assert pool.account().used == 1
    pool.free(blocks)
    assert pool.account() == Blocks(total=6, free=6)


def test_a_double_free_is_an_error_and_changes_nothing() -> None:
    pool = make()
    first, second = pool.allocate(2)
    with pytest.raises(InvariantError, match=f"free: blocks \\[{first}\\]"):
        pool.free([second, first, first])
    assert pool.account().used == 2
    pool.free([first, second])
    with pytest.raises(InvariantError):
        pool.free([first])


@pytest.mark.parametrize("verb", ["retain", "lease"])
@pytest.mark.parametrize("block", [0, 99])
def test_blocks_that_hold_nothing_can_be_neither_retained_nor_leased(verb: str, block: int) -> None:
    pool = make()
    with pytest.raises(InvariantError, match=rf"{verb}: blocks \[{block}\]"):
        getattr(pool, verb)([block])
    pool.check()


def test_cached_blocks_are_found_again_until_they_are_evicted() -> None:
    pool = make()
    blocks = fill(pool, "abc")
    pool.free(blocks)
    assert pool.account() == Blocks(total=6, free=3, cached=3)
    assert pool.match(digests("abx")) == blocks[:2]
    assert pool.account() == Blocks(total=6, free=3, cached=1, used=2)
    pool.free(blocks[:2])
    pool.allocate(4)
    assert pool.match(digests("abc")) == blocks[:2]
    pool.check()


def test_eviction_takes_the_least_recently_used_chain_from_its_end() -> None:
    pool = make()
    old, new = fill(pool, "abc"), fill(pool, "xyz")
    pool.free(old)
    pool.free(new)
    assert pool.allocate(2) == [old[1], old[2]]
    assert pool.match(digests("abc")) == old[:1]


def test_blocks_in_use_are_never_evicted() -> None:
    pool = make()
    held = fill(pool, "abc")
    pool.free(fill(pool, "abcd"))
    assert pool.num_available == 3
    assert not set(pool.allocate(3)) & set(held)
    with pytest.raises(NoBlocks):
        pool.allocate(1)


def test_a_duplicate_block_stays_uncached_and_its_winner_young() -> None:
    pool = make()
    winner = fill(pool, "a")
    pool.free(winner)
    copy, child = pool.allocate(2)
    assert not pool.insert(b"a", copy, None)
    assert pool.insert(b"ab", child, b"a")
    pool.free(fill(pool, "z"))
    pool.free([copy, child])
    assert pool.account() == Blocks(total=6, free=3, cached=3)
    pool.allocate(4)
    assert pool.match(digests("ab")) == [*winner, child]
    pool.check()


def test_a_cached_block_is_found_without_a_reference() -> None:
    pool = make()
    first, second = fill(pool, "ab")
    assert [pool.cached(digest) for digest in (b"a", b"ab", b"x")] == [first, second, None]
    assert not pool.is_idle(first)
    pool.free([first, second])
    assert pool.cached(b"ab") == second
    assert pool.is_idle(second)
    assert pool.account() == Blocks(total=6, free=4, cached=2)
    assert not pool.is_idle(pool.allocate(1)[0])


def test_a_child_in_use_loses_its_digest_with_its_parent() -> None:
    pool = make(3)
    pool.free(fill(pool, "a"))
    copy, child = pool.allocate(2)
    pool.insert(b"ab", child, b"a")
    pool.allocate(1)
    pool.check()
    pool.free([copy, child])
    assert pool.account() == Blocks(total=3, free=2, used=1)


def test_a_leased_block_counts_as_leased_whatever_else_it_is() -> None:
    pool = make()
    blocks = fill(pool, "ab")
    pool.lease(blocks)
    pool.lease(blocks[:1])
    assert pool.account() == Blocks(total=6, free=4, leased_out=2)
    pool.free(blocks)
    assert pool.account() == Blocks(total=6, free=4, leased_out=2)
    pool.unlease(blocks)
    assert pool.account() == Blocks(total=6, free=4, leased_out=1, cached=1)
    pool.unlease(blocks[:1])
    assert pool.account() == Blocks(total=6, free=4, cached=2)
    with pytest.raises(InvariantError, match="unlease"):
        pool.unlease(blocks)


def test_a_leased_cached_block_can_be_matched_and_is_not_evicted() -> None:
    pool = make(2)
    blocks = fill(pool, "a")
    pool.lease(blocks)
    pool.free(blocks)
    assert pool.num_available == 1
    assert pool.match([b"a"]) == blocks
    pool.unlease(blocks)
    assert pool.account() == Blocks(total=2, free=1, used=1)


def test_a_lease_of_a_predecessor_keeps_its_blocks_out_of_use() -> None:
    pool = make(4)
    pool.restore_lease([1, 2])
    pool.restore_lease([2, 3])
    assert pool.account() == Blocks(total=4, free=1, leased_out=3)
    assert pool.allocate(1) == [0]
    pool.unlease([1, 2])
    assert pool.allocate(1) == [1]
    with pytest.raises(InvariantError, match=r"blocks \[9\] are not owned"):
        pool.restore_lease([3, 9])
    pool.check()


def test_only_blocks_in_use_can_be_inserted() -> None:
    with pytest.raises(InvariantError, match="block 0 is not in use"):
        make().insert(b"a", 0, None)


def test_extents_can_be_removed_only_when_nothing_in_them_is_used_or_leased() -> None:
    pool = BlockPool()
    for start in (0, 2, 4):
        pool.add_extent(range(start, start + 2))
    cached, leased = fill(pool, "a"), pool.allocate(1)  # the stack gives the last extent first
    assert cached + leased == [4, 5]
    pool.lease(leased)
    pool.free(cached + leased)
    used = pool.allocate(1)
    assert used == [2]
    assert pool.removable_extents() == [range(0, 2)]
    with pytest.raises(InvariantError, match=r"has blocks in use: \[5\]"):
        pool.remove_extent(range(4, 6))
    pool.unlease(leased)
    assert pool.removable_extents() == [range(0, 2), range(4, 6)]
    pool.remove_extent(range(4, 6))
    assert pool.match([b"a"]) == []
    assert pool.account() == Blocks(total=4, free=3, used=1)
    assert not pool.owns(4)
    assert pool.extents == {range(0, 2), range(2, 4)}
    pool.check()
    with pytest.raises(InvariantError, match=r"4\.\.5 is not owned"):
        pool.remove_extent(range(4, 6))


def test_an_extent_is_added_once() -> None:
    with pytest.raises(InvariantError, match="owned already"):
        make(4).add_extent(range(3, 6))


@pytest.mark.parametrize(
    ("attribute", "damage", "message"),
    [
        ("_references", {0: 0}, "reference counts below 1"),
        ("_leases", {0: -1}, "lease counts below 1"),
        ("_references", {5: 1}, "free and in use"),
        ("_references", {99: 1}, "not owned: \\[99\\]"),
        ("_free", {1: None}, "free and cached"),
        ("_leases", {1: 1}, "cached as idle and in use"),
        ("_owned", None, "not those of the extents"),
    ],
)
def test_check_names_what_is_wrong(attribute: str, damage: dict[int, int] | None, message: str) -> None:
    pool = make()
    blocks = fill(pool, "ab")
    pool.free(blocks)
    assert blocks == [0, 1]
    pool.check()
    if damage is None:
        getattr(pool, attribute).discard(3)
    else:
        getattr(pool, attribute).update(damage)
    with pytest.raises(InvariantError, match=message):
        pool.check()


def test_check_finds_a_lost_block() -> None:
    pool = make()
    pool._free.popitem()
    with pytest.raises(InvariantError, match=r"in no state: \[0\]"):
        pool.check()


def test_ceded_blocks_are_anothers_with_what_they_hold() -> None:
    """I1: at no time have two pools a block."""
    one, other = BlockPool(), BlockPool()
    for block in range(4):
        one.add_extent(range(block, block + 1))
    blocks = one.allocate(3)
    one.cede(blocks)
    other.receive(blocks)
    assert (one.account(), other.account()) == (Blocks(total=1, free=1), Blocks(total=3, used=3))
    assert not any(one.owns(block) or not other.owns(block) for block in blocks)
    other.insert(b"a", blocks[0], None)
    other.free(blocks)
    assert other.account() == Blocks(total=3, free=2, cached=1)
    one.check()
    other.check()


@pytest.mark.parametrize("use", ["retain", "lease", "index", "free", "foreign"])
def test_a_block_that_another_use_needs_is_not_ceded(use: str) -> None:
    pool = BlockPool()
    for block in range(2):
        pool.add_extent(range(block, block + 1))
    first, second = pool.allocate(2)
    if use == "index":
        pool.insert(b"a", second, None)
    elif use == "foreign":
        second = 7
    else:
        getattr(pool, use)([second])
    before = pool.account()
    with pytest.raises(InvariantError, match=rf"cede: blocks \[{second}\]"):
        pool.cede([first, second])
    assert pool.account() == before
    pool.check()


def test_extents_are_given_up_empty_ones_first_then_the_least_recently_used() -> None:
    pool = BlockPool()
    for block in range(4):
        pool.add_extent(range(block, block + 1))
    old, new = fill(pool, "a"), fill(pool, "x")
    used = pool.allocate(1)
    pool.free(new)
    pool.free(old)
    pool.free(pool.match(digests("x")))
    (empty,) = set(range(4)) - {*old, *new, *used}
    assert pool.removable_extents() == [range(b, b + 1) for b in (empty, *old, *new)]
