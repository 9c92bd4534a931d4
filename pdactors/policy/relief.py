"""Who gives an engine back what it lends, when its prompts lack blocks. Pure."""

from __future__ import annotations

from pdactors.messages import CopyOut
from pdactors.policy.fleet import FleetState
from pdactors.policy.requests import RequestTable, Stage
from pdactors.policy.tasks import Order


def relieve(name: str, fleet: FleetState, requests: RequestTable, block_tokens: int) -> list[Order]:
    """When prompts wait for blocks that an engine lends, have a borrower copy what it reads, largest first."""
    load = fleet.engines[name].load
    if load.blocks_lacking == 0 or load.blocks.leased_out == 0:
        return []
    lent = [r for r in requests.values() if r.stage == Stage.DECODING and r.prefill == name]
    for request in sorted(lent, key=lambda r: -r.num_tokens):
        holder = fleet.engines.get(request.decode)
        size = request.num_tokens // block_tokens
        if holder is not None and not request.is_copied and size < holder.load.blocks.free:
            request.is_copied = True
            return [Order(request.decode, CopyOut(request.ask.request, request.attempt))]
    return []
