"""The migrator of a node: grants the arena's extents to the node's engines, keeps what they publish, and moves KV.

It is not on the lease path: engines lend to each other through the arena without asking it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from pdactors.actors.actor import ROUTER, Actor
from pdactors.actors.engine_accounts import lease_infos
from pdactors.actors.holdings import Holdings
from pdactors.actors.mover import Mover
from pdactors.actors.spec import ENGINES, ActorSpec
from pdactors.actors.transfer_log import TransferLog
from pdactors.errors import InvariantError
from pdactors.kv.arena import Arena
from pdactors.kv.leases import Lessor
from pdactors.messages import (
    Abandon,
    Alive,
    Announce,
    Ask,
    Blocks,
    CacheChanged,
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
    Publish,
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
        self._reserve = 0 if spec.config.has_store else extents.reserve(self.arena.num_extents, spec.num_owners)
        self._in_vain: Counter[int] = Counter()  # slot -> how often it was asked for extents since it last gave some
        self.transfers = TransferLog()
        self.holdings = Holdings(self) if spec.config.migrators_own else None
        self.mover = Mover(self, self.holdings) if self.holdings is not None and spec.config.moves_kv else None
        self.accept(WantExtents, self._on_want, *ENGINES, "migrator")
        self.accept(ReturnExtents, self._on_return, *ENGINES, "migrator")
        self.accept(Retired, self._on_retired, "router")
        if self.holdings is not None:
            self._accept_holdings(self.holdings)
        if self.mover is not None:
            self._names[spec.slot] = spec.name
            self._accept_moves(self.mover)

    def _accept_holdings(self, holdings: Holdings) -> None:
        self.accept(Extents, lambda _, message: self._add_extents(holdings, message), "migrator")
        self.accept(Pin, lambda _, message: holdings.pin(message), "router")
        self.accept(Release, lambda _, message: self._on_release(holdings, message), "router", "prefill")
        if self.spec.config.has_store:
            self.accept(Publish, lambda sender, message: self._on_publish(holdings, sender, message), *ENGINES)

    def _accept_moves(self, mover: Mover) -> None:
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
        if self.holdings is not None:
            self.holdings.take_over()  # before anybody can ask for some of it
        self.listen(self.spec.own_address())
        super().open()

    async def start(self) -> None:
        if self.holdings is not None:
            await self.holdings.start()
            self.every(SWEEP_S, self.holdings.tick)
            self.every(self.spec.config.kv.lease_s / 4, self._renew)
        if self.mover is not None:
            await self.mover.start()
            self.every(SWEEP_S, self.mover.tick)
            self.every(self.spec.config.router.heartbeat_ms / 1000, self.mover.mind_peers)

    async def close(self) -> None:
        if self.mover is not None:
            self.mover.close()
        if self.holdings is not None:
            self.holdings.close()

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

    def router_changed(self) -> None:
        """Let go of what is moved or lent for requests that the new router does not know, and say what is cached."""
        if self.holdings is None:
            return
        moving = (*self.mover.outbound.keys, *self.mover.inbound.keys) if self.mover is not None else ()
        for key in {*moving, *self.holdings.loans.lent_for}:
            self._on_release(self.holdings, Release(*key))
        self.tell(ROUTER, CacheChanged(tuple(self.holdings.pool.digests())))

    # ---- Extents --------

    def _on_want(self, sender: Member, message: WantExtents) -> None:
        if self._names.get(sender.slot) != sender.name:
            return self.drop("engine without a slot", sender=sender.name)
        if message.count:
            self._demand[sender.slot] = min(message.count, self.arena.num_extents)
        else:
            self._demand.pop(sender.slot, None)
        self._serve()
        free = self.arena.free_extents()
        if message.idle:
            self._give(sender.slot, message.idle, self._owned(), free[self._reserve :])
        elif len(free) < self._reserve:  # the next who needs some is not to wait for it
            self._recall(self._reserve - len(free), sender.slot, self._owned(), idle=True)
        return None

    def _on_return(self, sender: Member, message: ReturnExtents) -> None:
        for extent in message.extents:
            if not 0 <= extent < self.arena.num_extents or self.arena.extent_owner(extent) != sender.slot:
                self.drop("foreign extent", sender=sender.name, extent=extent)
                continue
            self.arena.set_extent_owner(extent, None)
            self._in_vain.pop(sender.slot, None)
            self._demand.pop(sender.slot, None)  # what it once asked for it has no use for now, or it asks again
        self._serve()

    def _on_retired(self, _sender: Member, message: Retired) -> None:
        """Free what an engine owned that was drained; nobody reads it any more, and what it still asked for is void.

        It may have left before it took back what it had lent: whoever comes into its slot is not to honour that.
        """
        if not 0 <= message.slot < self.arena.num_slots:
            return self.drop("retirement of the unknown", slot=message.slot)
        lessor = Lessor(self.arena.leases(), message.slot, self.spec.incarnation)
        lessor.rebuild()
        lessor.end_all()
        self.dismiss(self._names.pop(message.slot, ""))
        self._demand.pop(message.slot, None)
        self._retired.add(message.slot)
        for extent in self.arena.extents_of(message.slot):
            self.arena.set_extent_owner(extent, None)
        return self._serve()

    def _serve(self) -> None:
        """Give out what is free, then ask back what others can spare."""
        if not self._demand:
            return
        owned = self._owned()
        free = self.arena.free_extents()
        for slot, wanted in list(self._demand.items()):
            short = extents.shortage(wanted, slot, owned, len(free), self._minimum)
            if short and self.holdings is not None and slot != self.spec.slot and self.holdings.evict(short):
                owned, free = self._owned(), self.arena.free_extents()
            count = self._give(slot, wanted, owned, free)
            owned[slot] += count
            self._demand[slot] = wanted - count
            if not self._demand[slot]:
                del self._demand[slot]
                continue
            self._recall(self._demand[slot], slot, owned)

    def _give(self, slot: int, wanted: int, owned: Mapping[int, int], free: list[int]) -> int:
        """Give an engine what it may have of the `free` extents, which leave the list; return how many."""
        count = extents.grant(wanted, slot, owned, len(free), self._minimum)
        granted, free[:] = free[:count], free[count:]
        for extent in granted:
            self.arena.set_extent_owner(extent, slot)
        if granted:
            self.tell(self._names[slot], Extents(tuple(granted)))
        return count

    def _recall(self, wanted: int, slot: int, owned: Mapping[int, int], *, idle: bool = False) -> None:
        """Ask other engines to give back what `slot` wants."""
        others = {other: n for other, n in owned.items() if other != self.spec.slot}
        for other, spare in extents.recall(wanted, slot, others, self._minimum, self._in_vain).items():
            if other in self._names:
                self._in_vain[other] += 1
                self.tell(self._names[other], RecallExtents(spare, idle))

    def claim(self, count: int) -> None:
        """Let the store have up to `count` free extents that nobody is sure of."""
        assert self.holdings is not None
        free = self.arena.free_extents()
        for extent in free[: extents.grant(count, self.spec.slot, self._owned(), len(free), self._minimum)]:
            self.arena.set_extent_owner(extent, self.spec.slot)
            self.holdings.pool.add_extent(self.arena.blocks_of_extent(extent))

    def _owned(self) -> Counter[int]:
        """Return how many extents each has who is sure of some: engines, of the plan or joined since, and the mover."""
        slots = {*range(self.spec.num_engines), *self._names} - self._retired
        return Counter({slot: len(self.arena.extents_of(slot)) for slot in sorted(slots)})

    # ---- Holdings and moves --------

    def _add_extents(self, holdings: Holdings, message: Extents) -> None:
        async def add() -> None:
            await holdings.extents.add(message.extents)
            if self.mover is not None:
                self.mover.inbound.serve()

        self.spawn(add())

    def _on_publish(self, holdings: Holdings, sender: Member, message: Publish) -> None:
        if self._names.get(sender.slot) != sender.name:
            return self.drop("engine without a slot", sender=sender.name)
        holdings.publish(sender, message)
        return self._serve()

    def _on_release(self, holdings: Holdings, message: Release) -> None:
        if self.mover is not None:
            self.mover.release(message)
        holdings.loans.revoke((message.request, message.attempt))

    def _renew(self) -> None:
        """Keep what is lent and borrowed."""
        assert self.holdings is not None
        lost = self.holdings.loans.renew(self.clock())
        if lost and self.mover is not None:
            self.mover.outbound.leases_lost(lost)

    def _on_abandon(self, mover: Mover, sender: Member, message: Abandon) -> None:
        mover.outbound.abandoned(sender, message)
        mover.inbound.abandoned(sender, message)

    # ---- Accounts --------

    def load(self) -> Load:
        """Account for the blocks that no engine owns: what nobody has, and what was moved here."""
        free = sum(len(self.arena.blocks_of_extent(extent)) for extent in self.arena.free_extents())
        own = self.holdings.pool.account() if self.holdings is not None else Blocks()
        blocks = msgspec.structs.replace(own, total=own.total + free, free=own.free + free)
        num_moving = len(self.mover.outbound.keys) + len(self.mover.inbound.keys) if self.mover is not None else 0
        return Load(running=num_moving, blocks=blocks)

    def report(self) -> Report:
        report = super().report()
        owned = sum(len(self.arena.extents_of(slot)) for slot in range(self.arena.num_slots))
        lost = self.arena.num_extents - owned - len(self.arena.free_extents())
        faults = [f"{lost} extents have no known owner"] if lost else []
        if self.holdings is None:
            return msgspec.structs.replace(report, faults=tuple(faults))
        try:
            self.holdings.check()
        except InvariantError as error:
            faults.append(error.message)
        keys = (*self.mover.outbound.keys, *self.mover.inbound.keys) if self.mover is not None else ()
        return msgspec.structs.replace(
            report,
            faults=tuple(faults),
            requests=tuple(dict.fromkeys(request for request, _ in keys)),
            leases=lease_infos(self, self.holdings.loans),
            transfers=self.transfers.counts(),
            moves=self.mover.outbound.moves() if self.mover is not None else (),
        )
