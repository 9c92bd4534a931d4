"""In which order KV goes over a link, and which way it takes. Pure: no clock, no sockets.

A migration is cut into transfers of a few blocks, so that whatever is more urgent waits for no more than those that are
under way, and a cancel for no longer.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from pdactors.messages import Path
from pdactors.policy.placement import Place

TRANSFER_BLOCKS = 16
MAX_IN_FLIGHT = 3  # transfers of one link
PATIENCE = 8  # transfers that may pass somebody of a lower class before one of his goes

TransferClass = Literal["interactive", "batch", "background"]
_RANKS: dict[TransferClass, int] = {"interactive": 0, "batch": 1, "background": 2}

Key = tuple[str, int]  # request, attempt


class Transfer(NamedTuple):
    """Blocks `start .. start + num_blocks` of a migration."""

    key: Key
    number: int
    start: int
    num_blocks: int


@dataclass(eq=False)
class _Migration:
    key: Key
    link: str
    rank: int
    deadline_s: float
    order: int
    pending: list[tuple[int, int]] = field(default_factory=list)  # runs of blocks to send: start, stop
    in_flight: dict[int, Transfer] = field(default_factory=dict)
    passed_by: int = 0  # transfers of higher classes since one of its own

    @property
    def urgency(self) -> tuple[int, float, int]:
        return self.rank, self.deadline_s, self.order


class TransferQueue:
    """What is to be sent, by link. A link is a destination."""

    def __init__(self) -> None:
        self._migrations: dict[Key, _Migration] = {}
        self._in_flight: dict[str, int] = defaultdict(int)
        self._num_added = 0
        self._num_transfers = 0

    def add(self, key: Key, link: str, kind: TransferClass, deadline_s: float | None) -> None:
        """Take a migration in, with nothing to send yet."""
        self._num_added += 1
        limit = float("inf") if deadline_s is None else deadline_s
        self._migrations[key] = _Migration(key, link, _RANKS[kind], limit, self._num_added)

    def set_deadline(self, key: Key, deadline_s: float) -> None:
        """Know by when a migration is of use, which was not known when its first part was announced."""
        self._migrations[key].deadline_s = deadline_s

    def extend(self, key: Key, start: int, stop: int) -> None:
        """Have blocks `start .. stop` of a migration sent."""
        if start < stop:
            self._migrations[key].pending.append((start, stop))

    def next(self, link: str) -> Transfer | None:
        """Take the most urgent transfer of a link; None when there is none or enough are under way.

        Higher classes first, in a class the earliest deadline, then the oldest. While something of a higher class is
        under way it has the link for itself, but for what had begun before: they would share its rate. Somebody who was
        passed by too often goes first once.
        """
        if self._in_flight[link] >= MAX_IN_FLIGHT:
            return None
        ready = [m for m in self._migrations.values() if m.link == link and m.pending]
        if not ready:
            return None
        starved = [m for m in ready if m.passed_by >= PATIENCE]
        chosen = min(starved or ready, key=lambda m: m.urgency)
        highest = min(
            (m.rank for m in self._migrations.values() if m.link == link and m.in_flight), default=chosen.rank
        )
        if not starved and chosen.rank > highest:
            return None
        chosen.passed_by = 0
        for other in self._eldest_below(ready, chosen.rank):
            other.passed_by += 1
        return self._take(chosen)

    def ended(self, transfer: Transfer, *, is_stored: bool) -> None:
        """A transfer is over, and sent again if it was not stored."""
        migration = self._migrations.get(transfer.key)
        if migration is None or migration.in_flight.pop(transfer.number, None) is None:
            return
        self._in_flight[migration.link] -= 1
        if not is_stored:
            migration.pending.insert(0, (transfer.start, transfer.start + transfer.num_blocks))

    def is_idle(self, key: Key) -> bool:
        """Whether nothing of a migration is queued or in flight."""
        migration = self._migrations[key]
        return not migration.pending and not migration.in_flight

    def remove(self, key: Key) -> None:
        """Forget a migration."""
        migration = self._migrations.pop(key, None)
        if migration is not None:
            self._in_flight[migration.link] -= len(migration.in_flight)

    def overdue(self, now: float) -> list[Key]:
        """Return the migrations whose deadline has passed."""
        return [key for key, migration in self._migrations.items() if migration.deadline_s < now]

    def __len__(self) -> int:
        return len(self._migrations)

    def _take(self, migration: _Migration) -> Transfer:
        start, stop = migration.pending[0]
        count = min(TRANSFER_BLOCKS, stop - start)
        if start + count == stop:
            migration.pending.pop(0)
        else:
            migration.pending[0] = start + count, stop
        self._num_transfers += 1
        transfer = Transfer(migration.key, self._num_transfers, start, count)
        migration.in_flight[transfer.number] = transfer
        self._in_flight[migration.link] += 1
        return transfer

    def _eldest_below(self, ready: list[_Migration], rank: int) -> list[_Migration]:
        """Return the most urgent migration of each class below `rank`."""
        below: dict[int, _Migration] = {}
        for migration in ready:
            if migration.rank > rank and (
                migration.rank not in below or migration.urgency < below[migration.rank].urgency
            ):
                below[migration.rank] = migration
        return list(below.values())


class LinkRate:
    """What a link carries, by the transfers that are over; those that overlap share the time."""

    def __init__(self) -> None:
        self._recent: deque[tuple[int, float]] = deque(maxlen=32)  # bytes, seconds that nothing earlier accounts for
        self._until_s = 0.0

    def note(self, num_bytes: int, began_s: float, ended_s: float) -> None:
        """Take note of a transfer; in the order of their ends."""
        self._recent.append((num_bytes, max(0.0, ended_s - max(began_s, self._until_s))))
        self._until_s = max(self._until_s, ended_s)

    @property
    def bytes_s(self) -> float | None:
        """Bytes per second; None before anything was measured."""
        seconds = sum(spent for _, spent in self._recent)
        return sum(size for size, _ in self._recent) / seconds if seconds > 0 else None


def runs(indices: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of rising indices: `[1, 2, 5]` -> `[(1, 3), (5, 6)]`."""
    found: list[tuple[int, int]] = []
    for index in indices:
        if found and found[-1][1] == index:
            found[-1] = found[-1][0], index + 1
        else:
            found.append((index, index + 1))
    return found


class Way(NamedTuple):
    """The path that KV takes, and why no faster one."""

    path: Path
    why: str


NO_WAY = Way("none", "")


def choose_way(source: Place, target: Place, transport: str, offered: Collection[str]) -> Way | None:
    """Choose how KV gets from one place to the other; None if it cannot.

    `transport` is that of the cluster file: `auto`, or the only one allowed. `offered` are the
    transports that both ends have.
    """
    distance = source.distance(target)
    if transport in ("auto", "lease") and distance == 0:
        return Way("lease", "same memory")
    refused = [f"lease: {_APART[distance]}" if distance else "lease: kv.transport says otherwise"]
    has_devices = distance <= 1 and source.device != "cpu" and target.device != "cpu"
    candidates: tuple[tuple[Path, bool], ...] = (("cuda_ipc", has_devices), ("ucx", True))
    for path, is_apt in candidates:
        if transport not in ("auto", path):
            refused.append(f"{path}: kv.transport is {transport}")
        elif not is_apt:
            refused.append(f"{path}: not two devices of one node")
        elif path not in offered:
            refused.append(f"{path}: not offered by both ends")
        else:
            return Way(path, "; ".join(refused))
    return None


_APART = {1: "other device", 2: "other node", 3: "other rack"}
