"""Prefill: computes prompts, samples the first token, lends the KV to whoever decodes."""

from __future__ import annotations

from pdactors.actors.actor import ROUTER
from pdactors.actors.engine import EngineActor
from pdactors.actors.spec import ActorSpec
from pdactors.engine.model import PagedModel
from pdactors.engine.runner import Outcome
from pdactors.engine.sequence import Sequence
from pdactors.errors import PDError
from pdactors.messages import KVHandle, Lease, Member, Prefill, Prefilled, PrefillPart, Token
from pdactors.transport import Transport


class PrefillActor(EngineActor):
    role = "prefill"
    prompt_only = True

    def __init__(self, spec: ActorSpec, transport: Transport, model: PagedModel) -> None:
        super().__init__(spec, transport, model)
        self._lent: dict[tuple[str, int], Lease] = {}
        self.accept(Prefill, self._on_prefill, "router")

    def _on_prefill(self, _sender: Member, message: Prefill) -> None:
        sequence = Sequence(
            message.request,
            message.attempt,
            message.prompt,
            message.sampling,
            is_urgent=message.priority == "interactive",
            received_s=self.clock(),
        )
        self.command(lambda engine: engine.submit(sequence))

    def admitted(self, sequence: Sequence) -> None:
        sequence.begin_s = self.clock()

    def token(self, outcome: Outcome) -> Token:
        sequence, sampled = outcome.sequence, outcome.sampled
        part = PrefillPart(sequence.num_cached, sequence.received_s, sequence.begin_s, self.clock())
        return Token(
            sequence.request,
            sequence.attempt,
            0,
            sampled.token_id,
            finish=outcome.finish,
            logprob=sampled.logprob,
            top=sampled.top,
            prefill=part,
        )

    def took(self, outcome: Outcome) -> None:
        """Hand the sequence over: the lease stands in the arena before the message that names it is sent."""
        engine, sequence = self.engine, outcome.sequence
        assert engine is not None
        blocks = tuple(sequence.blocks)
        try:
            lease = self.lessor.grant(
                sequence.request, sequence.attempt, blocks, self.clock() + self.spec.config.kv.lease_s
            )
        except PDError as error:
            self.fail(engine, sequence, error)
            return
        self._lent[sequence.key] = lease
        self.pool.lease(blocks)
        engine.remove(sequence)
        handle = KVHandle(
            node=self.spec.node,
            owner=self.spec.name,
            layout=self.spec.layout.fingerprint,
            blocks=blocks,
            num_tokens=sequence.num_stored,
            lease=lease,
        )
        self.tell(ROUTER, Prefilled(sequence.request, sequence.attempt, outcome.sampled.token_id, handle, self.clock()))

    def released(self, request: str, attempt: int) -> None:
        lease = self._lent.get((request, attempt))
        if lease is not None:
            self.lessor.revoke(lease)
            self.sweep()

    def sweep(self) -> None:
        """Take back what holders released, what was revoked, and what expired."""
        for ended in self.lessor.sweep(self.clock()):
            self.pool.unlease(ended.blocks)
            self._lent.pop((ended.request, ended.attempt), None)
            self._wake.set()
            if ended.expired:
                self.log.warning("lease expired", request=ended.request, attempt=ended.attempt)
