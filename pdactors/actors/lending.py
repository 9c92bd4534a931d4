"""What engines and migrators tell the router of their prefix caches, and how they lend from them when it pins."""

from __future__ import annotations

from pdactors.actors.actor import ROUTER, Actor
from pdactors.errors import Overloaded
from pdactors.kv.blocks import BlockPool
from pdactors.kv.loans import Loans
from pdactors.messages import CacheChanged, Pin, Pinned, Segment


def lend_cached(actor: Actor, pool: BlockPool, loans: Loans, num_reserved: int, pin: Pin) -> None:
    """Lend what is still cached of a prefix, a shorter part if some was evicted, and tell the router.

    `num_reserved` blocks of the pool are set aside; what is set aside is not lent.
    """
    blocks = pool.match_spare(pin.digests, num_reserved)
    segment = None
    if blocks:
        try:
            lease = loans.lend((pin.request, pin.attempt), blocks, actor.clock())
            segment = Segment(actor.spec.name, lease, pin.start, tuple(blocks))
        except Overloaded:
            actor.log.warning("no lease record is free", request=pin.request)
        pool.free(blocks)
    actor.trail.note(pin.request, "lent", actor.clock(), None, pin.attempt, blocks=len(blocks))
    actor.tell(ROUTER, Pinned(pin.request, pin.attempt, pin.start, segment))


def tell_cache(actor: Actor, pool: BlockPool) -> None:
    """Let the router know what a prefix cache gained and lost."""
    changes = pool.drain_events()
    if changes.added or changes.evicted:
        actor.tell(ROUTER, CacheChanged(tuple(changes.added), tuple(changes.evicted)))
