"""Decode: takes sequences over where their KV lies and generates until they end.

Prompts of which hardly anything is left to compute come here at once (router.local_prefill_tokens).
"""

from __future__ import annotations

from pdactors.actors.actor import ROUTER
from pdactors.actors.engine import EngineActor
from pdactors.actors.spec import ActorSpec
from pdactors.engine.model import PagedModel
from pdactors.engine.sequence import Sequence
from pdactors.errors import BadRequest, Refused, WorkerLost
from pdactors.kv.layout import KVLayout
from pdactors.kv.leases import LeaseLost
from pdactors.messages import Adopted, Decode, KVHandle, Member, Prefill
from pdactors.transport import Transport


def check_pruned(handle: KVHandle, layout: KVLayout, num_tokens: int) -> None:
    """Hold pruned KV against the prompt: it is read whole or not at all, for no block can be computed again alone.

    Raises:
        Refused: tokens or blocks are missing, or somebody else's.
    """
    if handle.num_pruned < 0 or handle.num_tokens + handle.num_pruned != num_tokens:
        counts = f"{handle.num_tokens} tokens and {handle.num_pruned} left out"
        raise Refused(f"pruned KV: {counts} do not make a prompt of {num_tokens}")
    named = [i for s in handle.segments if s.owner == handle.owner for i in range(s.start, s.start + len(s.blocks))]
    if sorted(named) != [*range(layout.num_blocks(handle.num_tokens))]:
        raise Refused(f"pruned KV: blocks {sorted(named)} of {handle.owner} for {handle.num_tokens} tokens")


class DecodeActor(EngineActor):
    role = "decode"

    def __init__(self, spec: ActorSpec, transport: Transport, model: PagedModel) -> None:
        super().__init__(spec, transport, model)
        self.accept(Decode, self._on_decode, "router")
        self.accept(Prefill, self.take_prompt, "router")

    def _on_decode(self, _sender: Member, message: Decode) -> None:
        """Accept the lease at once, so that it is held while the sequence waits for room."""
        handle = message.handle
        if handle.layout != self.spec.layout.fingerprint:
            raise Refused(f"KV layout: the handle's is {handle.layout}, ours is {self.spec.layout.fingerprint}")
        if not message.generated:
            raise BadRequest("generated: is empty; prefill samples the first token")
        if handle.num_pruned:
            check_pruned(handle, self.spec.layout, len(message.prompt) + len(message.generated) - 1)
        sequence = Sequence.to_adopt(message)
        now = sequence.received_s = self.clock()
        sequence.sent_s = message.sent_s if message.path in ("lease", "store") else now - message.waited_s
        self.trail.note(message.request, "received", sequence.received_s, None, message.attempt, path=message.path)
        try:
            self._take_blocks(sequence, handle)
        except LeaseLost as error:
            self.give_leases_back(sequence)
            self.pool.free(list(sequence.kept.values()))
            raise WorkerLost(error.message) from error
        self.command(lambda: self.engine.submit(sequence))

    def _take_blocks(self, sequence: Sequence, handle: KVHandle) -> None:
        """Borrow what the prefill lends; use our own blocks where it had borrowed them from us.

        What it had borrowed from a third engine is left out, and computed here.
        """
        for segment in handle.segments:
            if segment.owner == handle.owner:
                self.borrow(sequence, segment)
            elif segment.owner == self.spec.name and self.loans.is_lent(sequence.key, segment.lease):
                self.pool.retain(segment.blocks)
                sequence.kept.update(enumerate(segment.blocks, segment.start))
        sequence.set_tail_apart(handle.num_tokens, self.spec.layout.block_tokens)

    def admitted(self, sequence: Sequence) -> None:
        if sequence.handle is None:
            super().admitted(sequence)
            return
        sequence.adopted_s = self.clock()
        self.tell(ROUTER, Adopted(sequence.request, sequence.attempt))
