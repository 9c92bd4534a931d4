"""The migrator of a node: grants the arena's extents to the node's engines and keeps the books of hand-overs.

It is not on the lease path: engines lend to each other through the arena without asking it.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from pdactors.actors.actor import Actor
from pdactors.actors.spec import ENGINES, ActorSpec
from pdactors.kv.arena import Arena
from pdactors.messages import Blocks, Extents, Load, Member, RecallExtents, Report, ReturnExtents, WantExtents
from pdactors.policy import extents
from pdactors.transport import Transport


class Migrator(Actor):
    """The arena's extent table is the only state, so a successor goes on where its predecessor stopped."""

    role = "migrator"

    def __init__(self, spec: ActorSpec, transport: Transport) -> None:
        super().__init__(spec, transport)
        self.arena = Arena.attach(spec.fds.arena, spec.layout)
        per_sequence = -(-spec.layout.num_blocks(spec.model.max_model_len) // self.arena.extent_blocks)
        self._minimum = extents.guaranteed(self.arena.num_extents, len(spec.engines_on_node), per_sequence)
        self._demand: dict[int, int] = {}  # slot -> extents that it asked for and did not get
        self.accept(WantExtents, self._on_want, *ENGINES)
        self.accept(ReturnExtents, self._on_return, *ENGINES)

    def open(self) -> None:
        self.listen("tcp://127.0.0.1:0")
        super().open()

    def _on_want(self, sender: Member, message: WantExtents) -> None:
        slot = self._slot(sender)
        if slot is None:
            return self.drop("unknown engine", sender=sender.name)
        self._demand[slot] = min(message.count, self.arena.num_extents)
        return self._serve()

    def _on_return(self, sender: Member, message: ReturnExtents) -> None:
        slot = self._slot(sender)
        for extent in message.extents:
            if not 0 <= extent < self.arena.num_extents or self.arena.extent_owner(extent) != slot:
                self.drop("foreign extent", sender=sender.name, extent=extent)
                continue
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
                self.tell(self.spec.engines_on_node[slot], Extents(tuple(granted)))
            self._demand[slot] = wanted - count
            if not self._demand[slot]:
                del self._demand[slot]
                continue
            for other, spare in extents.recall(self._demand[slot], slot, owned, self._minimum).items():
                self.tell(self.spec.engines_on_node[other], RecallExtents(spare))

    def _slot(self, member: Member) -> int | None:
        names = self.spec.engines_on_node
        return names.index(member.name) if member.name in names else None

    def _owned(self) -> Counter[int]:
        return Counter({slot: len(self.arena.extents_of(slot)) for slot in range(len(self.spec.engines_on_node))})

    def _free(self) -> list[int]:
        return [e for e in range(self.arena.num_extents) if self.arena.extent_owner(e) is None]

    def load(self) -> Load:
        """Account for the blocks that no engine owns."""
        free = sum(len(self.arena.blocks_of_extent(extent)) for extent in self._free())
        return Load(blocks=Blocks(total=free, free=free))

    def report(self) -> Report:
        report = super().report()
        owned = sum(len(self.arena.blocks_of_extent(e)) for s in self._owned() for e in self.arena.extents_of(s))
        missing = self.arena.num_blocks - owned - report.load.blocks.free
        faults = (f"{missing} blocks of the arena belong to no known engine",) if missing else ()
        return msgspec.structs.replace(report, faults=faults)
