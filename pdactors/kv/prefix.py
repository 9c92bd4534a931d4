"""Prefix digests, and `PrefixCache`: which cached block holds the tokens of which digest. Integers and digests only."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from pdactors.errors import InvariantError

DIGEST_BYTES = 16
PARTS = 4  # a partly filled block can be found by its first quarter, half, three quarters
_ROOT = bytes(DIGEST_BYTES)  # the parent of a prompt's first block


def cache_key(model: str, layout: str) -> bytes:
    """Return the key of all digests of a model and layout, given by their fingerprints."""
    return blake2b(f"{len(model)}:{model}{len(layout)}:{layout}".encode(), digest_size=32).digest()


def chain(tokens: Sequence[int], block_tokens: int, key: bytes, parent: bytes | None = None) -> list[bytes]:
    """Return the digest of each full block of `tokens`, which follow the block with digest `parent`.

    A digest is blake2b over the parent's digest and the block's tokens as little-endian u32, so it names everything
    up to the block's end. It is the same in every process and run.
    """
    data = np.asarray(tokens, dtype="<u4").tobytes()
    step = 4 * block_tokens
    digests, last = [], parent or _ROOT
    for start in range(0, len(data) - step + 1, step):
        last = blake2b(last + data[start : start + step], digest_size=DIGEST_BYTES, key=key).digest()
        digests.append(last)
    return digests


class Part(NamedTuple):
    """The first `num_tokens` tokens of a block, fewer than it has room for, and their digest."""

    num_tokens: int
    digest: bytes


def parts(tokens: Sequence[int], block_tokens: int, key: bytes, parent: bytes | None) -> list[Part]:
    """Return the parts that the beginning of a block has, longest first; `parent` is the digest of what is before it.

    A part's digest is that of `chain` over fewer tokens, so it is no full block's.
    """
    step = max(1, block_tokens // PARTS)
    longest = min(len(tokens), block_tokens - 1) // step * step
    return [Part(count, *chain(tokens[:count], count, key, parent)) for count in range(longest, 0, -step)]


class Changes(NamedTuple):
    """What the cache gained and lost since it was last asked."""

    added: list[bytes]
    evicted: list[bytes]


@dataclass(slots=True)
class _Entry:
    block: int
    parent: bytes | None
    children: set[bytes] = field(default_factory=set)


class PrefixCache:
    """A forest of digests, each with its block, and an order in which idle blocks are given up.

    `BlockPool` owns one and tells it which blocks are idle (cached, and used by nobody). No idle parent is older than
    its idle children, so leaves go first, and a parent takes its children along.
    """

    def __init__(self) -> None:
        self._entries: dict[bytes, _Entry] = {}
        self._digests: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._changes: dict[bytes, bool] = {}  # True: added

    @property
    def num_idle(self) -> int:
        """Blocks that could be evicted."""
        return len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._digests

    def is_idle(self, block: int) -> bool:
        """Whether the block is cached and used by nobody."""
        return block in self._idle

    def ages(self) -> dict[int, int]:
        """Return the idle blocks, each with its rank: 0 is the least recently used."""
        return {block: rank for rank, block in enumerate(self._idle)}

    def lookup(self, digests: Iterable[bytes]) -> list[int]:
        """Return the blocks of the longest cached prefix of a chain."""
        blocks = []
        for digest in digests:
            entry = self._entries.get(digest)
            if entry is None:
                break
            blocks.append(entry.block)
        return blocks

    def insert(self, digest: bytes, block: int, parent: bytes | None) -> bool:
        """Index a block in use; False if the digest has a block already.

        A parent that is not cached here (another engine may have it) makes the block a root, as None does.

        Raises:
            InvariantError: the block holds another digest.
        """
        if self._digests.get(block, digest) != digest:
            raise InvariantError(f"block {block} already holds digest {self._digests[block].hex()}")
        if digest in self._entries:
            return False
        if parent not in self._entries:
            parent = None
        self._entries[digest] = _Entry(block, parent)
        self._digests[block] = digest
        if parent is not None:
            self._entries[parent].children.add(digest)
        self._note(digest, is_added=True)
        return True

    def wake(self, block: int) -> None:
        """Somebody uses the block: it is not to be evicted."""
        self._idle.pop(block, None)

    def settle(self, blocks: Sequence[int]) -> None:
        """Make cached blocks idle, most recently used; `blocks` in token order."""
        self._idle.update(dict.fromkeys(blocks))
        touched: set[int] = set()
        for block in reversed(blocks):
            if block not in touched:
                touched |= self._touch_up(block)

    def evict(self) -> list[int]:
        """Forget the least recently used idle block, and return the blocks that became free by it."""
        return self.forget(next(iter(self._idle)))

    def forget(self, block: int) -> list[int]:
        """Forget a block and whatever was cached behind it, and return those of them that were idle."""
        top = self._digests[block]
        parent = self._entries[top].parent
        if parent is not None:
            self._entries[parent].children.remove(top)
        freed, pending = [], [top]
        while pending:
            digest = pending.pop()
            entry = self._entries.pop(digest)
            pending += entry.children
            del self._digests[entry.block]
            self._note(digest, is_added=False)
            if entry.block in self._idle:
                del self._idle[entry.block]
                freed.append(entry.block)
        return freed

    def digests(self) -> list[bytes]:
        """Return every digest that has a block."""
        return list(self._entries)

    def drain_events(self) -> Changes:
        """Return what changed since the last call; what came and went in between is left out."""
        changes, self._changes = self._changes, {}
        return Changes(
            [digest for digest, is_added in changes.items() if is_added],
            [digest for digest, is_added in changes.items() if not is_added],
        )

    def check(self) -> None:
        """Raise InvariantError if the two directions, the parents or the idle list disagree."""
        if {entry.block: digest for digest, entry in self._entries.items()} != self._digests:
            raise InvariantError("prefix cache: digests and blocks disagree")
        if not self._idle.keys() <= self._digests.keys():
            raise InvariantError(
                f"prefix cache: idle but not cached: {sorted(self._idle.keys() - self._digests.keys())}"
            )
        num_children = 0
        for digest, entry in self._entries.items():
            num_children += len(entry.children)
            if entry.parent is not None:
                parent = self._entries.get(entry.parent)
                if parent is None or digest not in parent.children:
                    raise InvariantError(f"prefix cache: block {entry.block} has lost its parent")
        if num_children != sum(entry.parent is not None for entry in self._entries.values()):
            raise InvariantError("prefix cache: a parent lists a child that is not cached")

    def _touch_up(self, block: int) -> set[int]:
        """Make the block and then its ancestors the most recently used."""
        touched = set()
        digest: bytes | None = self._digests[block]
        while digest is not None:
            entry = self._entries[digest]
            if entry.block in self._idle:
                self._idle.move_to_end(entry.block)
            touched.add(entry.block)
            digest = entry.parent
        return touched

    def _note(self, digest: bytes, *, is_added: bool) -> None:
        if self._changes.pop(digest, is_added) == is_added:
            self._changes[digest] = is_added
