"""`TransferLog`: how many transfers of KV an actor had part in, what they carried and how long they took."""

from __future__ import annotations

from dataclasses import dataclass

from pdactors.messages import Codec, Direction, Path, TransferCounts


@dataclass
class _Kind:
    num_stored: int = 0
    num_failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0


class TransferLog:
    """Counts transfers that have ended, by direction, path and codec."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[Direction, Path, Codec], _Kind] = {}

    def stored(self, direction: Direction, path: Path, codec: Codec, num_bytes: int, seconds: float) -> None:
        """A transfer of so many bytes on the wire arrived whole."""
        kind = self._kind(direction, path, codec)
        kind.num_stored += 1
        kind.num_bytes += num_bytes
        kind.seconds += seconds

    def failed(self, direction: Direction, path: Path, codec: Codec) -> None:
        """A transfer was damaged, or lost on its way."""
        self._kind(direction, path, codec).num_failed += 1

    def counts(self) -> tuple[TransferCounts, ...]:
        """Return all of it."""
        return tuple(
            TransferCounts(*key, kind.num_stored, kind.num_failed, kind.num_bytes, kind.seconds)
            for key, kind in self._kinds.items()
        )

    def _kind(self, direction: Direction, path: Path, codec: Codec) -> _Kind:
        return self._kinds.setdefault((direction, path, codec), _Kind())
