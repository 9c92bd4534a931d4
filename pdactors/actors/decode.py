"""Decode: takes sequences over where their KV lies and generates until they end."""

from __future__ import annotations

import asyncio

import msgspec

from pdactors.actors.actor import ROUTER
from pdactors.actors.engine import EngineActor
from pdactors.actors.spec import ActorSpec
from pdactors.engine.runner import Engine, Outcome
from pdactors.engine.sequence import Sequence
from pdactors.errors import Refused, WorkerLost
from pdactors.kv.leases import LeaseLost
from pdactors.messages import Adopted, Decode, DecodePart, Load, Member, Token
from pdactors.transport import Transport


class DecodeActor(EngineActor):
    role = "decode"

    def __init__(self, spec: ActorSpec, transport: Transport) -> None:
        super().__init__(spec, transport)
        self._lease_s = spec.config.kv.lease_s
        self._mapped: set[int] = set()  # extents of others
        self.accept(Decode, self._on_decode, "router")

    async def start(self) -> None:
        await super().start()
        self.every(self._lease_s / 4, self._renew)

    def sweep(self) -> None:
        """Map what others were given since: a page fault is dear, and would be met by the step that reads a prompt."""
        new = [extent for extent in self.arena.extents_of_others(self.spec.slot) if extent not in self._mapped]
        if new:
            self._mapped.update(new)
            self.spawn(self._map_ahead(new))

    async def _map_ahead(self, extents: list[int]) -> None:
        for extent in extents:
            await asyncio.to_thread(self.arena.map_ahead, extent)

    def _on_decode(self, _sender: Member, message: Decode) -> None:
        """Accept the lease at once, so that it is held while the sequence waits for room."""
        handle, now = message.handle, self.clock()
        if handle.layout != self.spec.layout.fingerprint:
            raise Refused(f"KV layout: the handle's is {handle.layout}, ours is {self.spec.layout.fingerprint}")
        sequence = Sequence(
            message.request,
            message.attempt,
            message.prompt,
            message.sampling,
            is_urgent=message.priority == "interactive",
            handle=handle,
            tokens=[message.first_token],
            received_s=now,
            sent_s=message.sent_s,
        )
        try:
            blocks = self.holder.accept(handle.lease, now, now + self._lease_s)
        except LeaseLost as error:
            raise WorkerLost(error.message) from error
        if blocks != handle.blocks:
            self.holder.release(handle.lease)
            raise Refused(f"lease {handle.lease.index} names other blocks than the handle")
        self.command(lambda engine: engine.submit(sequence))

    def admitted(self, sequence: Sequence) -> None:
        sequence.adopted_s = self.clock()
        self.tell(ROUTER, Adopted(sequence.request, sequence.attempt))

    def token(self, outcome: Outcome) -> Token:
        sequence, sampled = outcome.sequence, outcome.sampled
        is_first = len(sequence.tokens) == 2
        return Token(
            sequence.request,
            sequence.attempt,
            len(sequence.tokens) - 1,
            sampled.token_id,
            finish=outcome.finish,
            logprob=sampled.logprob,
            top=sampled.top,
            decode=DecodePart("lease", sequence.sent_s, sequence.adopted_s) if is_first else None,
        )

    def took(self, outcome: Outcome) -> None:
        """Nothing to do: the sequence is in the next step again."""

    def let_go(self, sequence: Sequence) -> None:
        """Nothing reads the lease's blocks any more, since this runs between steps."""
        if sequence.handle is not None:
            self.holder.release(sequence.handle.lease)

    def _renew(self) -> None:
        """Keep what is read; fail what was lost before it is read again."""

        def renew(engine: Engine) -> None:
            until = self.clock() + self._lease_s
            for sequence in [*engine.running, *engine.waiting]:
                assert sequence.handle is not None
                try:
                    self.holder.renew(sequence.handle.lease, until)
                except LeaseLost as error:
                    self.fail(engine, sequence, WorkerLost(error.message))

        self.command(renew)

    def load(self) -> Load:
        load = super().load()
        sequences = [*self.engine.running, *self.engine.waiting] if self.engine else []
        borrowed = {block for s in sequences if s.handle is not None for block in s.handle.blocks}
        return msgspec.structs.replace(load, blocks=msgspec.structs.replace(load.blocks, leased_in=len(borrowed)))
