"""Prefill: computes prompts, samples the first token, lends the KV to whoever decodes or gives it to the store."""

from __future__ import annotations

from pdactors.actors.actor import ROUTER
from pdactors.actors.blueprint import SPARE_LEASES
from pdactors.actors.engine import EngineActor
from pdactors.actors.packer import Packer
from pdactors.actors.publishing import publish
from pdactors.actors.spec import ActorSpec
from pdactors.engine.model import PagedModel
from pdactors.engine.sequence import Sequence
from pdactors.engine.step import Outcome
from pdactors.errors import Overloaded
from pdactors.messages import Announce, KVHandle, Lease, Member, Migrate, Prefill, Prefilled, Segment
from pdactors.transport import Transport


class PrefillActor(EngineActor):
    role = "prefill"
    fills_batches = False  # a prompt gains nothing from company

    def __init__(self, spec: ActorSpec, transport: Transport, model: PagedModel) -> None:
        super().__init__(spec, transport, model)
        self._num_handovers = self.arena.leases().leases_per_slot - SPARE_LEASES  # those that are kept for them
        self._behind: dict[tuple[str, int], set[Lease]] = {}  # what handed-over sequences borrow from others
        self._packer = Packer(self) if spec.config.prunes else None
        self.accept(Prefill, self.take_prompt, "router")
        self.accept(Migrate, self._on_migrate, "router")

    async def start(self) -> None:
        if self._packer is not None:
            await self._packer.start()
        await super().start()

    def took(self, outcome: Outcome) -> None:
        """Hand the sequence over: through the store where there is one, else under a lease of ours.

        The lease stands in the arena before the message that names it is sent.
        """
        sequence = outcome.sequence
        if not publish(self, sequence, self._done(outcome)):
            try:
                lease = self.loans.lend(sequence.key, sequence.own_blocks, self.clock())
            except Overloaded as error:
                self.fail(sequence, error)
                return
            done = self._done(outcome, lease)
            if self._packer is not None:
                self._packer.remember(sequence.key, done.handle, sequence.token_ids(0, sequence.num_stored))
            self.tell(ROUTER, done)
        self.trail.note(
            sequence.request, "handed over", self.clock(), None, sequence.attempt, tokens=sequence.num_stored
        )
        if sequence.segments:  # they stay ours until the request's end, so that their owner keeps the blocks
            self._behind[sequence.key] = sequence.leases
        self.engine.remove(sequence)

    def _done(self, outcome: Outcome, lease: Lease | None = None) -> Prefilled:
        """Describe a hand-over under our lease; without one it names only what the sequence borrows."""
        sequence = outcome.sequence
        handle = KVHandle(
            node=self.spec.node,
            owner=self.spec.name,
            layout=self.spec.layout.fingerprint,
            segments=sequence.table_segments(self.spec.name, lease),
            num_tokens=sequence.num_stored,
        )
        return Prefilled(sequence.request, sequence.attempt, outcome.sampled.token_id, handle, self.clock())

    def progressed(self, sequences: list[Sequence]) -> None:
        """Have the blocks sent ahead that are full by now, of prompts that will decode elsewhere.

        The last chunk goes with the hand-over, so that nothing can be complete before the router knows of it.
        """
        for sequence in sequences:
            if sequence in self.engine.running:
                for start, blocks in sequence.unannounced(self.spec.layout.block_tokens):
                    self._announce(sequence, start, blocks)

    def _announce(self, sequence: Sequence, start: int, blocks: tuple[int, ...]) -> None:
        if self.loans.num_left <= self._num_handovers:  # they go with the rest
            return
        lease = self.loans.lend(sequence.key, blocks, self.clock())
        sequence.num_announced = start + len(blocks)
        self.trail.note(sequence.request, "announced", self.clock(), None, sequence.attempt, blocks=len(blocks))
        self.tell(
            self.migrator,
            Announce(
                *sequence.key,
                sequence.ship_to,
                Segment(self.spec.name, lease, start, blocks),
                sequence.num_tokens,
                tuple(sequence.digests),
                "interactive" if sequence.is_urgent else "batch",
            ),
        )

    def _on_migrate(self, _sender: Member, message: Migrate) -> None:
        packer = self._packer
        if packer is None:
            return self.drop("migrate without pruning", request=message.request)
        return self.command(lambda: packer.asked(message))

    async def work(self) -> bool:
        return self._packer is not None and await self._packer.work()

    def blocks_lacking(self) -> int:
        return super().blocks_lacking() + (self._packer.blocks_lacking if self._packer else 0)

    def requests(self) -> tuple[str, ...]:
        return super().requests() + (self._packer.requests if self._packer else ())

    def released(self, request: str, attempt: int) -> None:
        super().released(request, attempt)
        if self._packer is not None:
            self._packer.forget((request, attempt))
        self.lease_ended(request, attempt)

    def lease_ended(self, request: str, attempt: int) -> None:
        for lease in self._behind.pop((request, attempt), ()):
            self.loans.give_back(lease)
