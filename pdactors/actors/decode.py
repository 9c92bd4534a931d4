"""Decode: takes sequences over where their KV lies and generates until they end."""

from __future__ import annotations

from pdactors.actors.actor import ROUTER
from pdactors.actors.engine import EngineActor
from pdactors.actors.spec import ActorSpec
from pdactors.engine.model import PagedModel
from pdactors.engine.sequence import Sequence
from pdactors.errors import Refused, WorkerLost
from pdactors.kv.leases import LeaseLost
from pdactors.messages import Adopted, Decode, KVHandle, Member
from pdactors.transport import Transport


class DecodeActor(EngineActor):
    role = "decode"

    def __init__(self, spec: ActorSpec, transport: Transport, model: PagedModel) -> None:
        super().__init__(spec, transport, model)
        self.accept(Decode, self._on_decode, "router")

    def _on_decode(self, _sender: Member, message: Decode) -> None:
        """Accept the lease at once, so that it is held while the sequence waits for room."""
        handle = message.handle
        if handle.layout != self.spec.layout.fingerprint:
            raise Refused(f"KV layout: the handle's is {handle.layout}, ours is {self.spec.layout.fingerprint}")
        sequence = Sequence(
            message.request,
            message.attempt,
            message.prompt,
            message.sampling,
            is_urgent=message.priority == "interactive",
            saves_kv=message.save_final_kv,
            handle=handle,
            path=message.path,
            path_reason=message.path_reason,
            tokens=[message.first_token],
            received_s=self.clock(),
            sent_s=message.sent_s if message.path in ("lease", "store") else self.clock() - message.waited_s,
        )
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
        sequence.adopted_s = self.clock()
        self.tell(ROUTER, Adopted(sequence.request, sequence.attempt))
