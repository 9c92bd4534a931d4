"""The migrator of a node: grants the arena's extents to the node's engines and keeps the books of hand-overs.

It is not on the lease path: engines lend to each other through the arena without asking it.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from pdactors.actors.actor import Actor
from pdactors.actors.spec import ENGINES, ActorSpec
from pdactors.kv.arena import Arena
from pdactors.messages import Blocks, Extents, Load, Member, RecallExtents, Report, Retired, ReturnExtents, WantExtents
from pdactors.policy import extents
from pdactors.transport import Transport


class Migrator(Actor):
    """The arena's extent table is the only state, so a successor goes on where its predecessor stopped."""

    role = "migrator"

    def __init__(self, spec: ActorSpec, transport: Transport) -> None:
        super().__init__(spec, transport)
        self.arena = Arena.attach(spec.fds.arena, spec.layout)
        per_sequence = -(-spec.layout.num_blocks(spec.model.max_model_len) // self.arena.extent_blocks)
        self._minimum = extents.guaranteed(self.arena.num_extents, spec.num_engines, per_sequence)
        self._names: dict[int, str] = {}  # slot -> engine, of those that joined
        self._retired: set[int] = set()  # slots whose engine is gone for good
        self._demand: dict[int, int] = {}  # slot -> extents that it asked for and did not get
        self.accept(WantExtents, self._on_want, *ENGINES)
        self.accept(ReturnExtents, self._on_return, *ENGINES)
        self.accept(Retired, self._on_retired, "router")

    def open(self) -> None:
        self.listen(self.spec.own_address())
        super().open()

    def joined(self, member: Member) -> None:
        if member.role in ENGINES and 0 <= member.slot < self.arena.num_slots:
            self._names[member.slot] = member.name
            self._retired.discard(member.slot)

    def _on_want(self, sender: Member, message: WantExtents) -> None:
        if self._names.get(sender.slot) != sender.name:
            return self.drop("engine without a slot", sender=sender.name)
        self._demand[sender.slot] = min(message.count, self.arena.num_extents)
        return self._serve()

    def _on_return(self, sender: Member, message: ReturnExtents) -> None:
        for extent in message.extents:
            if not 0 <= extent < self.arena.num_extents or self.arena.extent_owner(extent) != sender.slot:
                self.drop("foreign extent", sender=sender.name, extent=extent)
                continue
            self.arena.set_extent_owner(extent, None)
            self._demand.pop(sender.slot, None)  # what it once asked for it has no use for now, or it asks again
        self._serve()

    def _on_retired(self, _sender: Member, message: Retired) -> None:
        """Free what an engine owned that was drained; nobody reads it any more, and what it still asked for is void."""
        self.dismiss(self._names.pop(message.slot, ""))
        self._demand.pop(message.slot, None)
        self._retired.add(message.slot)
        for extent in self.arena.extents_of(message.slot):
            self.arena.set_extent_owner(extent, None)
        self._serve()

    def _serve(self) -> None:
        """Give out what is free, then ask back what others can spare."""
        owned = self._owned()
        free = self._free()
        for slot, wanted in list(self._demand.items()):
            count = extents.grant(wanted, slot, owned, len(free), self._minimum)
            granted, free = free[:count], free[count:]
            for extent in granted:
                self.arena.set_extent_owner(extent, slot)
            owned[slot] += count
            if granted:
                self.tell(self._names[slot], Extents(tuple(granted)))
            self._demand[slot] = wanted - count
            if not self._demand[slot]:
                del self._demand[slot]
                continue
            for other, spare in extents.recall(self._demand[slot], slot, owned, self._minimum).items():
                if other in self._names:
                    self.tell(self._names[other], RecallExtents(spare))

    def _owned(self) -> Counter[int]:
        """Return how many extents each engine has: those of the plan, and those that joined since."""
        slots = {*range(self.spec.num_engines), *self._names} - self._retired
        return Counter({slot: len(self.arena.extents_of(slot)) for slot in sorted(slots)})

    def _free(self) -> list[int]:
        return [e for e in range(self.arena.num_extents) if self.arena.extent_owner(e) is None]

    def load(self) -> Load:
        """Account for the blocks that no engine owns."""
        free = sum(len(self.arena.blocks_of_extent(extent)) for extent in self._free())
        return Load(blocks=Blocks(total=free, free=free))

    def report(self) -> Report:
        report = super().report()
        owned = sum(len(self.arena.extents_of(slot)) for slot in range(self.arena.num_slots))
        lost = self.arena.num_extents - owned - len(self._free())
        return msgspec.structs.replace(report, faults=(f"{lost} extents have no known owner",) if lost else ())
