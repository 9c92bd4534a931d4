"""How an engine publishes KV in mode kvstore: its blocks become the store's, where they lie; nothing is copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pdactors.messages import Prefilled, Publish

if TYPE_CHECKING:
    from pdactors.actors.engine import EngineActor
    from pdactors.engine.sequence import Sequence


def publish(actor: EngineActor, sequence: Sequence, done: Prefilled | None = None) -> bool:
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
