"""The fleet as the router knows it: engines, migrators, and which of them has the KV of which prefix. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pdactors.kv.prefix import Part
from pdactors.messages import Load, Member
from pdactors.policy.placement import EngineView, Place
from pdactors.policy.prefix_index import PrefixIndex, Share
from pdactors.policy.prefix_keys import PrefixKeys
from pdactors.policy.requests import Assigned
from pdactors.policy.standings import Standings
from pdactors.policy.transfer import Way, choose_way


@dataclass
class Engine:
    """An engine of the fleet as the router knows it."""

    member: Member
    load: Load = field(default_factory=Load)
    device: str = "cpu"
    is_silent: bool = False  # an order could not be delivered, and nothing was heard since

    @property
    def place(self) -> Place:
        return Place(self.member.node, self.member.rack, self.device)


class Pull(NamedTuple):
    """What of a prompt is to be brought: who lends it, where it ends, and the migrators that it goes through."""

    shares: list[Share]
    num_tokens: int
    movers: tuple[str, str]


class FleetState:
    """Owns who is there. `transport` is that of the cluster file, `data_transport` what migrators offer, "" if none."""

    def __init__(self, transport: str, data_transport: str) -> None:
        self.engines: dict[str, Engine] = {}
        self.migrators: dict[str, Member] = {}  # by node, those that are ready
        self._nodes: dict[str, str] = {}  # of those, by name
        self.index = PrefixIndex()
        self.standings = Standings()
        self._stale: set[str] = set()  # engines that the standings have to hear of
        self._turns: dict[str, int] = {}  # when decode engines were chosen last
        self._sizes: list[int] | None = None
        self._together: dict[Place | str, set[str]] = {}  # engines by place, and by node; empty: to be found out
        self._transport = transport
        self._data_transport = data_transport

    def joined(self, member: Member, load: Load) -> None:
        """Take note of an engine's state or load."""
        former = self.engines.get(member.name)
        self.engines[member.name] = Engine(member, load)
        self._stale.add(member.name)
        if former is None or (former.member, former.load.max_blocks) != (member, load.max_blocks):
            self._forget_fleet()

    def migrator_ready(self, member: Member) -> None:
        """KV can be moved to and from a node."""
        self.migrators[member.node] = member
        self._nodes[member.name] = member.node

    def lost(self, name: str) -> None:
        """Forget an engine or a migrator."""
        self.silent(name)
        self.engines.pop(name, None)
        self._turns.pop(name, None)
        self._forget_fleet()
        self.index.forget(name)

    def silent(self, name: str) -> None:
        """Have an engine or a migrator do nothing until it is heard again."""
        if name in self.engines:
            self.engines[name].is_silent = True
            self._stale.add(name)
        if (node := self._nodes.pop(name, None)) is not None:
            del self.migrators[node]

    def knows(self, name: str) -> bool:
        """Whether that is an engine, or a migrator that is ready."""
        return name in self.engines or name in self._nodes

    def views(self, assigned: Mapping[str, Assigned], *roles: str) -> list[EngineView]:
        """Describe the engines of these roles that take work, by what they were assigned."""
        found = (self._view(name, assigned) for name, e in self.engines.items() if e.member.role in roles)
        return [view for view in found if view is not None]

    def _view(self, name: str, assigned: Mapping[str, Assigned]) -> EngineView | None:
        engine = self.engines.get(name)
        if engine is None or engine.member.state != "ready" or engine.is_silent:
            return None
        given = assigned.get(name, _NOTHING)
        turn = self._turns.get(name, 0)
        return EngineView(
            name, engine.place, given.num_requests, engine.load.max_sequences, given.num_tokens, last_turn=turn
        )

    def chosen(self, name: str, turn: int) -> None:
        """Note that it was a decode engine's turn, so that the next is another's that is as good."""
        self._turns[name] = turn
        self._stale.add(name)

    def refresh(self, assigned: Mapping[str, Assigned], touched: set[str]) -> Standings:
        """Return the standings, once they have heard of everyone whose load changed; clears `touched`."""
        for name in self._stale | touched:
            view = self._view(name, assigned)
            if view is None:
                self.standings.drop(name)
            else:
                self.standings.put(view, is_first=self.engines[name].member.role != "decode")
        self._stale.clear()
        touched.clear()
        return self.standings

    def nodes_with(self, keys: PrefixKeys) -> set[str]:
        """Return the nodes where something of a prompt's beginning is known."""
        digests = (*keys.digests[:1], *(part.digest for part in keys.parts(0)))
        names = {name for digest in digests for name in self.index.owners(digest)}
        return {self._nodes[name] for name in names if name in self._nodes} | self.nodes_of(names)

    def nodes_of(self, engines: Collection[str]) -> set[str]:
        """Return the nodes of those engines that are there."""
        return {self.engines[name].member.node for name in engines if name in self.engines}

    def neighbours(self, name: str) -> set[str]:
        """Return who else has blocks that this engine can read in place."""
        place = self.engines[name].place
        return self._engines_at(place) - {name} | self._migrator(place.node)

    def _owners(self, node: str) -> set[str]:
        """Return who on a node has blocks that its migrator can read."""
        return self._engines_at(node) | self._migrator(node)

    def _migrator(self, node: str) -> set[str]:
        migrator = self.migrators.get(node)
        return {migrator.name} if migrator is not None else set()

    def _engines_at(self, where: Place | str) -> set[str]:
        """Return the engines at a place, or on a node, that lend: one that drains would never be done with it."""
        if not self._together:
            for name, engine in self.engines.items():
                if engine.member.state == "ready":
                    self._together.setdefault(engine.place, set()).add(name)
                    self._together.setdefault(engine.member.node, set()).add(name)
        return self._together.get(where, set())

    def _forget_fleet(self) -> None:
        """What was worked out of who is there has to be worked out anew."""
        self._sizes = None
        self._together.clear()

    def num_readable(self, keys: PrefixKeys, name: str, under_way: Collection[Collection[bytes]]) -> int:
        """Return how many leading tokens of a prompt that engine can read, or will have computed by then."""
        holders = {name, *self.neighbours(name)}
        num_blocks = self.index.num_known(keys.digests, holders, under_way)
        return num_blocks * keys.block_tokens + self._part(keys, num_blocks, holders).num_tokens

    def shares(self, keys: PrefixKeys, reader: str) -> tuple[list[Share], int]:
        """Return what an engine has to borrow to read what is known of a prompt, and how many tokens that makes."""
        neighbours = self.neighbours(reader)
        num_tokens = self._num_known(keys, {reader, *neighbours})
        return self.index.shares(keys.chain(num_tokens), reader, neighbours), num_tokens

    def whole(self, keys: PrefixKeys, reader: str) -> tuple[list[Share], int]:
        """Return what `shares` does, where the store of the node may find more of a prompt than is known here."""
        shares, num_tokens = self.shares(keys, reader)
        store, num_full = self.store_of(reader), len(keys.digests) * keys.block_tokens
        if num_tokens >= num_full or not self.knows(store):
            return shares, num_tokens
        return [Share(store, 0, keys.digests)], num_full

    def pull(self, keys: PrefixKeys, reader: str) -> Pull | None:
        """Return what another node has of a prompt, if that is a block more at least than an engine's own node has."""
        here = self.engines[reader].place.node
        others = [node for node in self.nodes_with(keys) if node != here and node in self.migrators]
        known = {node: self._num_known(keys, self._owners(node)) for node in others}
        node = max(known, key=lambda node: (known[node], node), default="")
        here_known = self._num_known(keys, {reader, *self.neighbours(reader)})
        if here not in self.migrators or not node or known[node] < here_known + keys.block_tokens:
            return None
        shares = self.index.shares(keys.chain(known[node]), "", self._owners(node))
        return Pull(shares, known[node], (self.migrators[node].name, self.migrators[here].name))

    def _num_known(self, keys: PrefixKeys, holders: Collection[str]) -> int:
        num_blocks = self.index.num_known(keys.digests, holders)
        return num_blocks * keys.block_tokens + self._part(keys, num_blocks, holders).num_tokens

    def _part(self, keys: PrefixKeys, num_blocks: int, holders: Collection[str]) -> Part:
        """Return the longest known part of the block after the first `num_blocks`."""
        return next((p for p in keys.parts(num_blocks) if self.index.is_known(p.digest, holders)), _NO_PART)

    def store_of(self, engine: str) -> str:
        """Name the migrator of an engine's node, which keeps what the node's engines publish."""
        return f"{self.engines[engine].member.node}/migrator" if engine in self.engines else ""

    def place_of(self, name: str) -> Place | None:
        """Return where an engine, or a migrator that is ready, is; None if it is not there."""
        if name in self.engines:
            return self.engines[name].place
        migrator = self.migrators.get(self._nodes.get(name, ""))
        return Place(migrator.node, migrator.rack) if migrator is not None else None

    def node_of(self, migrator: str) -> str:
        """Return the node of a migrator, "" if it is not there."""
        return self._nodes.get(migrator, "")

    def sequence_sizes(self, block_tokens: int) -> list[int]:
        """Return how many tokens each engine that carries sequences to their end could hold of one."""
        if self._sizes is None:
            enders = (e.load.max_blocks for e in self.engines.values() if e.member.role in ("decode", "worker"))
            self._sizes = sorted({count * block_tokens for count in enders if count})
        return self._sizes

    def movers(self, source: Place, target: str) -> tuple[str, str]:
        """Return the migrators that KV goes through from a place to that engine."""
        there = self.engines[target].place.node
        return self.migrators[source.node].name, self.migrators[there].name

    def way(self, source: Place, target: Place) -> Way | None:
        """Return how KV gets from one place to the other; None if it cannot."""
        both = source.node in self.migrators and target.node in self.migrators
        return choose_way(source, target, self._transport, (self._data_transport,) if both else ())

    def needs_migration(self, source: Place, target: Place) -> bool | None:
        """Say whether KV has to move from one place to the other; None if it cannot get there."""
        way = self.way(source, target)
        return None if way is None else way.path != "lease"


_NOTHING = Assigned()
_NO_PART = Part(0, b"")
