"""How an engine publishes KV in mode kvstore: its blocks become the store's, where they lie; nothing is copied."""

from __future__ import annotations

from typing import Protocol

from pdactors.engine.runner import Engine
from pdactors.engine.sequence import Sequence
from pdactors.kv.blocks import BlockPool
from pdactors.messages import Message, Prefilled, Publish


class Publisher(Protocol):
    """Who has sequences, and KV of theirs to give away."""

    pool: BlockPool
    migrator: str  # who keeps the node's store

    @property
    def engine(self) -> Engine:
        """Return what schedules them."""

    @property
    def has_store(self) -> bool:
        """Say whether there is one now."""

    def tell(self, name: str, message: Message) -> bool:
        """Send; False if it cannot be."""


def publish(actor: Publisher, sequence: Sequence, done: Prefilled | None = None) -> bool:
    """Give the store what can be found of the sequence's own blocks, and with `done` all of them; between two steps.

    False: there is no store, or it cannot be reached, and everything is as it was.
    """
    if not actor.has_store:
        return False
    own = sequence.own_blocks
    start = len(sequence.blocks) - len(own)
    if own != sequence.blocks[start:]:  # what is borrowed comes first, but where the store was lost meanwhile
        return False
    digests = sequence.digests[start : sequence.num_indexed]
    part = actor.engine.tail_digest(sequence)
    blocks = own if done is not None else own[: len(digests) + (part is not None)]
    if not blocks:
        return True
    parent = sequence.digests[start - 1] if start and (digests or part) else None
    message = Publish(*sequence.key, tuple(blocks), tuple(digests), part, parent, done)
    if not actor.tell(actor.migrator, message):
        return False
    actor.pool.cede(blocks)
    sequence.borrowed.update(blocks)
    return True
