"""`PrefixIndex`: which engine has the KV of which prefix, as far as their events tell. Pure.

It may be late: an engine may have evicted what is promised here, so whoever is asked answers with what it really has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Blocks `start ..` of a prompt that `owner` is to lend."""

    owner: str
    start: int
    digests: tuple[bytes, ...]


class PrefixIndex:
    """Digest of a block, or of a part of one (and of all before it) -> its owners."""

    def __init__(self) -> None:
        self._owners: dict[bytes, set[str]] = {}
        self._digests: dict[str, set[bytes]] = {}

    def add(self, owner: str, digests: Iterable[bytes]) -> None:
        """Note what an engine has now."""
        mine = self._digests.setdefault(owner, set())
        for digest in digests:
            mine.add(digest)
            self._owners.setdefault(digest, set()).add(owner)

    def remove(self, owner: str, digests: Iterable[bytes]) -> None:
        """Note what an engine has no more."""
        for digest in digests:
            self._digests.get(owner, set()).discard(digest)
            owners = self._owners.get(digest, set())
            owners.discard(owner)
            if not owners:
                self._owners.pop(digest, None)

    def forget(self, owner: str) -> None:
        """An engine is gone, or comes back empty."""
        self.remove(owner, list(self._digests.get(owner, ())))
        self._digests.pop(owner, None)

    def num_known(
        self, digests: Sequence[bytes], owners: Collection[str], extra: Collection[Collection[bytes]] = ()
    ) -> int:
        """Return how many leading blocks of a chain these owners hold together, or will: in `extra` is what comes."""
        for count, digest in enumerate(digests):
            if not self.is_known(digest, owners) and not any(digest in coming for coming in extra):
                return count
        return len(digests)

    def owners(self, digest: bytes) -> Collection[str]:
        """Return who has it."""
        return self._owners.get(digest, ())

    def is_known(self, digest: bytes, owners: Collection[str]) -> bool:
        """Whether one of these owners has it."""
        return not self._owners.get(digest, set()).isdisjoint(owners)

    def shares(self, digests: Sequence[bytes], reader: str, owners: Collection[str]) -> list[Share]:
        """Return what `reader` has to borrow, and from whom among `owners`, to read the known part of a chain.

        What the reader has itself is left out; neighbouring blocks of one owner are one share.
        """
        runs: list[tuple[str, int, list[bytes]]] = []
        for i in range(self.num_known(digests, {reader, *owners})):
            known = self._owners[digests[i]]
            if reader in known:
                continue
            last = runs[-1] if runs else None
            if last is not None and last[0] in known and last[1] + len(last[2]) == i:
                last[2].append(digests[i])
            else:
                runs.append((min(owner for owner in known if owner in owners), i, [digests[i]]))
        return [Share(owner, start, tuple(run)) for owner, start, run in runs]
