"""Prefill: computes prompts, samples the first token, lends the KV to whoever decodes."""

from __future__ import annotations

from pdactors.actors.actor import ROUTER
from pdactors.actors.engine import EngineActor
from pdactors.actors.spec import ActorSpec
from pdactors.engine.model import PagedModel
from pdactors.engine.runner import Outcome
from pdactors.errors import Overloaded
from pdactors.messages import KVHandle, Lease, Prefill, Prefilled
from pdactors.transport import Transport


class PrefillActor(EngineActor):
    role = "prefill"
    fills_batches = False  # a prompt gains nothing from company

    def __init__(self, spec: ActorSpec, transport: Transport, model: PagedModel) -> None:
        super().__init__(spec, transport, model)
        self._behind: dict[tuple[str, int], set[Lease]] = {}  # what handed-over sequences borrow from others
        self.accept(Prefill, self.take_prompt, "router")

    def took(self, outcome: Outcome) -> None:
        """Hand the sequence over: the lease stands in the arena before the message that names it is sent."""
        sequence = outcome.sequence
        try:
            lease = self.loans.lend(sequence.key, sequence.own_blocks, self.clock())
        except Overloaded as error:
            self.fail(sequence, error)
            return
        handle = KVHandle(
            node=self.spec.node,
            owner=self.spec.name,
            layout=self.spec.layout.fingerprint,
            segments=sequence.table_segments(self.spec.name, lease),
            num_tokens=sequence.num_stored,
        )
        if sequence.segments:  # they stay ours until the request's end, so that their owner keeps the blocks
            self._behind[sequence.key] = sequence.leases
        self.engine.remove(sequence)
        self.tell(ROUTER, Prefilled(sequence.request, sequence.attempt, outcome.sampled.token_id, handle, self.clock()))

    def released(self, request: str, attempt: int) -> None:
        super().released(request, attempt)
        self.lease_ended(request, attempt)

    def lease_ended(self, request: str, attempt: int) -> None:
        for lease in self._behind.pop((request, attempt), ()):
            self.loans.give_back(lease)
