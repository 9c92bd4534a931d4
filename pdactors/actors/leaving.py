"""`Leaving`: a sequence's KV on its way to another node, as its source keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

from pdactors.messages import Codec, Lease, Move
from pdactors.policy.transfer import Key, Transfer


@dataclass(eq=False)
class Leaving:
    """A sequence's KV on its way to another node."""

    key: Key
    target: str
    num_tokens: int
    blocks: dict[int, int]  # index in the sequence -> block
    borrowed: list[Lease]
    watched: list[Lease]  # held by the engine that borrowed them; they must stand until all is sent
    codec: Codec
    began_s: float
    num_pruned: int = 0
    is_complete: bool = False  # all of it is known, not only what was announced
    num_ready: int | None = None  # leading blocks that the destination has; None until it said so
    queued: set[int] = field(default_factory=set)  # indices that were handed to the queue
    transfers: dict[int, Transfer] = field(default_factory=dict)
    sent: dict[int, tuple[int, float]] = field(default_factory=dict)  # by transfer: bytes, and when
    tries: dict[int, int] = field(default_factory=dict)  # by first block
    num_reading: int = 0  # sends whose memory must stay
    num_bytes: int = 0  # on the wire, of what is stored
    num_stored: int = 0  # blocks
    is_over: bool = False

    def as_move(self, num_blocks: int) -> Move:
        """Say how far it is; the destination may have had some of the `num_blocks` already."""
        num_there = self.num_stored + (self.num_ready or 0)
        return Move(self.key[0], self.target, self.codec, num_blocks, num_there, self.num_bytes)
