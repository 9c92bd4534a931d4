from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdactors.errors import InvariantError
from pdactors.kv.prefix import DIGEST_BYTES, PARTS, Changes, PrefixCache, cache_key, chain, parts

KEY = cache_key("model", "layout")
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


def test_the_digests_of_a_known_prompt_are_known() -> None:
    assert [d.hex() for d in chain(range(9), 4, KEY)] == [
        "17bcde23e6d9e07c433ade3e3c375cde",
        "34e6f2c52d8a008c08737d2377d5ece9",
    ]


def test_another_process_with_another_hash_seed_finds_the_same_digests() -> None:
    code = (
        "from pdactors.kv.prefix import cache_key, chain\n"
        "print([d.hex() for d in chain(range(100), 16, cache_key('model', 'layout'))])"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout.decode()
        for seed in ("1", "2")
    }
    assert outputs == {f"{[d.hex() for d in chain(range(100), 16, KEY)]}\n"}


@settings(derandomize=True, deadline=None)
@given(TOKENS, TOKENS, TOKENS, st.integers(1, 8))
def test_digests_agree_exactly_as_far_as_the_full_blocks_do(
    start: list[int], one: list[int], other: list[int], size: int
) -> None:
    one, other = start + one, start + other
    num_shared = next(
        (i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )
    first, second = chain(one, size, KEY), chain(other, size, KEY)
    assert len(first) == len(one) // size
    same = [a == b for a, b in zip(first, second, strict=False)]
    assert sum(same) == num_shared // size
    assert same == sorted(same, reverse=True)


@settings(derandomize=True, deadline=None)
@given(TOKENS, st.integers(1, 8), st.integers(0, 5))
def test_a_chain_can_be_continued_from_any_block(tokens: list[int], size: int, cut: int) -> None:
    whole = chain(tokens, size, KEY)
    cut = min(cut, len(whole))
    parent = whole[cut - 1] if cut else None
    assert whole[:cut] + chain(tokens[cut * size :], size, KEY, parent) == whole


@settings(derandomize=True, deadline=None)
@given(TOKENS, st.integers(1, 40))
def test_parts_go_from_long_to_short_and_name_their_tokens(tokens: list[int], size: int) -> None:
    parent = bytes(DIGEST_BYTES)
    found = parts(tokens, size, KEY, parent)
    counts = [part.num_tokens for part in found]
    assert counts == sorted(counts, reverse=True)
    assert all(0 < count < size and count <= len(tokens) for count in counts)
    assert min(len(tokens), size - 1) - max(counts, default=0) < max(1, size // PARTS)
    whole = chain(tokens, size, KEY, parent)
    assert len({part.digest for part in found} | set(whole)) == len(found) + len(set(whole))
    for part in found:
        assert part in parts(tokens[: part.num_tokens], size, KEY, parent)
        assert (
            part.digest not in {other.digest for other in parts([*tokens[:-1], 7], size, KEY, parent)}
            or tokens[: part.num_tokens] == [*tokens[:-1], 7][: part.num_tokens]
        )


def test_equal_tokens_in_another_place_have_another_digest() -> None:
    first, second = chain([5, 5, 5, 5], 2, KEY)
    assert first != second


def test_the_key_separates_models_and_layouts() -> None:
    keys = {cache_key("a", "b"), cache_key("b", "a"), cache_key("ab", ""), cache_key("", "ab")}
    assert len(keys) == 4
    assert len({chain([1], 1, key)[0] for key in keys}) == 4


def test_a_token_that_is_no_u32_is_an_error() -> None:
    with pytest.raises(OverflowError):
        chain([-1], 1, KEY)


def cached(*chains: tuple[str, str]) -> PrefixCache:
    """A cache of chains given as ("abc", "123"): digests and one-digit blocks."""
    cache = PrefixCache()
    for digests, blocks in chains:
        parent: bytes | None = None
        for digest, block in zip(digests, blocks, strict=True):
            cache.insert(digest.encode(), int(block), parent)
            parent = digest.encode()
    cache.check()
    return cache


def digests(text: str) -> list[bytes]:
    return [character.encode() for character in text]


def evict_all(cache: PrefixCache) -> list[list[int]]:
    evicted = []
    while cache.num_idle:
        evicted.append(cache.evict())
        cache.check()
    return evicted


def test_lookup_finds_the_longest_prefix() -> None:
    cache = cached(("abc", "123"))
    assert cache.lookup(digests("abx")) == [1, 2]
    assert cache.lookup(digests("xbc")) == []
    assert cache.lookup(digests("abcd")) == [1, 2, 3]


def test_the_first_block_of_a_digest_wins() -> None:
    cache = cached(("a", "1"))
    assert not cache.insert(b"a", 2, None)
    assert cache.lookup([b"a"]) == [1]
    assert 2 not in cache


def test_a_block_holds_one_digest() -> None:
    cache = cached(("a", "1"))
    with pytest.raises(InvariantError, match="block 1 already holds digest"):
        cache.insert(b"b", 1, None)


def test_a_block_without_a_cached_parent_is_a_root() -> None:
    cache = PrefixCache()
    assert cache.insert(b"b", 2, b"a")
    assert cache.insert(b"c", 3, b"b")
    cache.check()
    assert cache.lookup(digests("bc")) == [2, 3]
    assert cache.lookup(digests("abc")) == []
    assert cache.drain_events() == Changes([b"b", b"c"], [])
    cache.settle([2, 3])
    assert evict_all(cache) == [[3], [2]]


def test_a_parent_that_comes_later_does_not_take_the_root_along() -> None:
    cache = PrefixCache()
    cache.insert(b"b", 2, b"a")
    cache.insert(b"a", 1, None)
    cache.check()
    assert cache.lookup(digests("ab")) == [1, 2]
    cache.settle([1, 2])
    assert cache.forget(1) == [1]
    assert 2 in cache
    cache.check()


def test_leaves_are_evicted_before_their_parents() -> None:
    cache = cached(("abc", "123"))
    cache.settle([1, 2, 3])
    assert evict_all(cache) == [[3], [2], [1]]


def test_parents_stay_younger_than_children_however_blocks_settle() -> None:
    cache = cached(("abc", "123"), ("abd", "124"))
    for blocks in ([1], [2, 3], [4]):
        cache.settle(blocks)
    assert evict_all(cache) == [[3], [4], [2], [1]]


def test_the_chain_used_last_is_evicted_last() -> None:
    cache = cached(("ab", "12"), ("cd", "34"))
    cache.settle([1, 2])
    cache.settle([3, 4])
    for block in (1, 2):
        cache.wake(block)
    cache.settle([1, 2])
    assert evict_all(cache) == [[4], [3], [2], [1]]


def test_what_is_behind_an_evicted_block_is_forgotten_with_it() -> None:
    cache = cached(("abc", "123"))
    cache.settle([1, 3])  # 2 is in use by somebody who has his own copy of a
    assert cache.forget(1) == [1, 3]
    assert 2 not in cache
    assert cache.lookup(digests("abc")) == []
    cache.check()


def test_events_hold_the_net_change_since_the_last_drain() -> None:
    cache = cached(("ab", "12"))
    assert cache.drain_events() == Changes([b"a", b"b"], [])
    cache.settle([1, 2])
    cache.evict()
    cache.insert(b"c", 3, b"a")
    cache.forget(3)
    assert cache.drain_events() == Changes([], [b"b"])
    cache.forget(1)
    cache.insert(b"a", 1, None)
    assert cache.drain_events() == Changes([], [])
