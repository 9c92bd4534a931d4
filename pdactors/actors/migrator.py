"""The migrator of a node: grants the arena's extents to the node's engines, and moves KV to and from other nodes.

It is not on the lease path: engines lend to each other through the arena without asking it.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from pdactors.actors.actor import Actor
from pdactors.actors.engine_accounts import lease_infos
from pdactors.actors.mover import Mover
from pdactors.actors.spec import ENGINES, ActorSpec
from pdactors.errors import InvariantError
from pdactors.kv.arena import Arena
from pdactors.messages import (
    Abandon,
    Alive,
    Announce,
    Ask,
    Blocks,
    DataPort,
    Extents,
    Fleet,
    Grant,
    Load,
    Member,
    Message,
    Migrate,
    Offer,
    Pin,
    RecallExtents,
    Release,
    Report,
    Retired,
    ReturnExtents,
    Stored,
    Taken,
    WantExtents,
)
from pdactors.policy import extents
from pdactors.transport import Transport

SWEEP_S = 0.05


class Migrator(Actor):
    """The arena's extent table and lease records are the state: a successor goes on where its predecessor stopped."""

    role = "migrator"

    def __init__(self, spec: ActorSpec, transport: Transport) -> None:
        super().__init__(spec, transport)
        self.arena = Arena.attach(spec.fds.arena, spec.layout)
        per_sequence = -(-spec.layout.num_blocks(spec.model.max_model_len) // self.arena.extent_blocks)
        self._minimum = extents.guaranteed(self.arena.num_extents, spec.num_owners, per_sequence)
        self._names: dict[int, str] = {}  # slot -> owner, of those that joined
        self._retired: set[int] = set()  # slots whose engine is gone for good
        self._demand: dict[int, int] = {}  # slot -> extents that it asked for and did not get
        self.mover = Mover(self) if spec.config.moves_kv else None
        self.accept(WantExtents, self._on_want, *ENGINES, "migrator")
        self.accept(ReturnExtents, self._on_return, *ENGINES, "migrator")
        self.accept(Retired, self._on_retired, "router")
        if self.mover is not None:
            self._names[spec.slot] = spec.name
            self._accept_moves(self.mover)

    def _accept_moves(self, mover: Mover) -> None:
        self.accept(Extents, lambda _, message: self._add_extents(mover, message), "migrator")
        self.accept(RecallExtents, lambda _, message: mover.give_back(message.count), "migrator")
        self.accept(Pin, lambda _, message: mover.pin(message), "router")
        self.accept(Release, lambda _, message: mover.release(message), "router", "prefill")
        self.accept(Migrate, lambda _, message: mover.outbound.migrate(message), "router", "prefill")
        self.accept(Announce, lambda _, message: mover.outbound.announce(message), "prefill")
        self.accept(DataPort, mover.port_offered, "migrator")
        self.accept(Alive, lambda sender, _: mover.alive(sender), "migrator")
        self.accept(Offer, mover.inbound.offered, "migrator")
        self.accept(Ask, mover.inbound.asked, "migrator")
        self.accept(Taken, mover.outbound.taken, "migrator")
        self.accept(Grant, mover.outbound.granted, "migrator")
        self.accept(Stored, mover.outbound.stored, "migrator")
        self.accept(Abandon, lambda sender, message: self._on_abandon(mover, sender, message), "migrator")

    # ---- Life --------

    def open(self) -> None:
        self.listen(self.spec.own_address())
        super().open()

    async def start(self) -> None:
        if self.mover is not None:
            await self.mover.start()
            self.every(SWEEP_S, self.mover.tick)
            self.every(self.spec.config.router.heartbeat_ms / 1000, self.mover.mind_peers)
            self.every(self.spec.config.kv.lease_s / 4, self.mover.renew)

    async def close(self) -> None:
        if self.mover is not None:
            self.mover.close()

    def wants(self, member: Member) -> bool:
        """Of two migrators the one whose name comes first connects to the other."""
        return self.mover is not None and member.role == "migrator" and self.spec.name < member.name

    def joined(self, member: Member) -> None:
        if member.role in ENGINES and 0 <= member.slot < self.arena.num_slots:
            self._names[member.slot] = member.name
            self._retired.discard(member.slot)

    def welcomed(self, host: Member) -> None:
        if self.mover is not None and host.role == "migrator" and self.state == "ready":
            self.mover.offer_port(host.name)

    def beat(self) -> None:
        super().beat()
        if self.mover is not None and self.state == "ready":
            for member in self.fleet.members:
                if member.role == "migrator" and member.name != self.spec.name:
                    self.tell(member.name, Alive())
                    if not self.mover.can_reach(member.name):
                        self.mover.offer_port(member.name)

    def tell(self, name: str, message: Message) -> bool:
        """Send a message; what is for ourselves is handled once the present message is."""
        if name != self.spec.name:
            return super().tell(name, message)
        self.soon(lambda: self._handle(self.me(), message))
        return True

    def _on_fleet(self, sender: Member, fleet: Fleet) -> None:
        super()._on_fleet(sender, fleet)
        if self.mover is not None:
            self.mover.fleet_changed(fleet)

    # ---- Extents --------

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

    # ---- Moves --------

    def _add_extents(self, mover: Mover, message: Extents) -> None:
        self.spawn(mover.add_extents(message.extents))

    def _on_abandon(self, mover: Mover, sender: Member, message: Abandon) -> None:
        mover.outbound.abandoned(sender, message)
        mover.inbound.abandoned(sender, message)

    # ---- Accounts --------

    def load(self) -> Load:
        """Account for the blocks that no engine owns: what nobody has, and what was moved here."""
        free = sum(len(self.arena.blocks_of_extent(extent)) for extent in self._free())
        if self.mover is None:
            return Load(blocks=Blocks(total=free, free=free))
        own = self.mover.pool.account()
        blocks = msgspec.structs.replace(own, total=own.total + free, free=own.free + free)
        return Load(
            running=len(self.mover.outbound.keys) + len(self.mover.inbound.keys),
            blocks=blocks,
            num_moved=self.mover.num_moved,
            num_pruned=self.mover.num_pruned,
            bytes_moved=self.mover.num_bytes,
        )

    def report(self) -> Report:
        report = super().report()
        owned = sum(len(self.arena.extents_of(slot)) for slot in range(self.arena.num_slots))
        lost = self.arena.num_extents - owned - len(self._free())
        faults = [f"{lost} extents have no known owner"] if lost else []
        if self.mover is None:
            return msgspec.structs.replace(report, faults=tuple(faults))
        try:
            self.mover.check()
        except InvariantError as error:
            faults.append(error.message)
        keys = (*self.mover.outbound.keys, *self.mover.inbound.keys)
        return msgspec.structs.replace(
            report,
            faults=tuple(faults),
            requests=tuple(dict.fromkeys(request for request, _ in keys)),
            leases=lease_infos(self, self.mover.loans),
        )
