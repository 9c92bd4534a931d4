"""How engines and migrators answer a Pin: they lend what their prefix cache still has, as the arena's rules say."""

from __future__ import annotations

from collections.abc import Callable

from pdactors.actors.actor import ROUTER, Actor
from pdactors.errors import Overloaded
from pdactors.kv.blocks import BlockPool
from pdactors.kv.loans import Loans
from pdactors.messages import Pin, Pinned, Segment


def lend_cached(actor: Actor, pool: BlockPool, loans: Loans, num_unreserved: Callable[[], int], pin: Pin) -> None:
    """Lend what is still cached of a prefix, a shorter part if some was evicted, and tell the router.

    `num_unreserved` counts the pool's blocks that are set aside for nobody; what is set aside is not lent.
    """
    blocks = pool.match(pin.digests)
    while blocks and num_unreserved() < 0:
        pool.free([blocks.pop()])
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
