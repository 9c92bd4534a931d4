"""`Mover`: how a migrator moves KV between nodes. It owns what both directions need: the data port and its peers.

What is moved is borrowed from one engine and lent to another, as engines do among each other, so the arena's own rules
hold on both nodes. What has arrived stays in the prefix cache here: a second request with that beginning finds it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray

from pdactors.actors.holdings import Holdings
from pdactors.actors.inbound import Inbound
from pdactors.actors.outbound import Outbound
from pdactors.errors import PDError
from pdactors.kv.codec import CodecName, decode, encode, encoded_bytes, prepare
from pdactors.messages import Codec, DataPort, Direction, Fleet, Member, Message, Path, Release
from pdactors.policy.codec_choice import CodecCost, choose_codec
from pdactors.policy.liveness import Liveness
from pdactors.policy.transfer import Key
from pdactors.stamps import Detail
from pdactors.transport.ports import open_port

if TYPE_CHECKING:
    from pdactors.actors.migrator import Migrator

T = TypeVar("T")

CODECS: tuple[CodecName, ...] = get_args(CodecName)
COST_BLOCKS, COST_ROUNDS = 16, 5  # that codecs are measured with


class Mover:
    """The part of a migrator that moves KV, from and to its `holdings`. `actor` is whom it speaks through."""

    def __init__(self, actor: Migrator, holdings: Holdings) -> None:
        spec = actor.spec
        self.actor = actor
        self.spec = spec
        self.clock = actor.clock
        self.log = actor.log
        self.arena = actor.arena
        self.holdings = holdings
        self.pool = holdings.pool
        self.loans = holdings.loans
        self.port_name = cast("Path", spec.config.data_transport)
        self.outbound = Outbound(self)
        self.inbound = Inbound(self)
        self._peers: dict[str, Member] = {}  # migrators whose data ports are connected
        self._known: dict[str, DataPort] = {}  # what they told of them
        self._num_dropped: Counter[str] = Counter()  # connections to each
        self._liveness = Liveness(spec.config.router.dead_after_ms / 1000)
        self._costs: dict[CodecName, CodecCost] = {}
        self._thread = ThreadPoolExecutor(1, "codec")

    # ---- Life --------

    async def start(self) -> None:
        """Open the data port.

        Raises:
            ConfigError: the transport cannot be had here.
        """
        node = self.spec.config.node_named(self.spec.node)
        self.port = open_port(self.port_name, host=self.spec.host, device=node.ucx_device, ports=node.ucx_ports)
        await self.in_thread(self._prepare_codecs)
        self._connect(self.actor.me(), DataPort(self.port_name, self.port.address))

    def close(self) -> None:
        """Let go of the port."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.port.close()

    def tick(self) -> None:
        """Give up what is overdue, and take what there is room for now."""
        self.outbound.mind_deadlines(self.clock())
        self.inbound.serve()

    # ---- What both directions need --------

    def tell(self, name: str, message: Message) -> bool:
        return self.actor.tell(name, message)

    def drop(self, why: str, **context: object) -> None:
        self.actor.drop(why, **context)

    async def in_thread(self, action: Callable[..., T], *arguments: object) -> T:
        """Compute beside the loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, action, *arguments)

    def codec_for(self, target: str, num_tokens: int, left_s: float | None) -> Codec:
        """Return in which form a sequence's KV goes over the wire."""
        wanted = self.spec.config.kv.compression
        if wanted != "auto":
            return wanted
        return choose_codec(
            self.spec.layout.num_blocks(num_tokens) * self.spec.layout.block_bytes,
            link_bytes_s=self.outbound.rates[target].bytes_s,
            costs=self._costs,
            left_s=left_s,
        )

    def _prepare_codecs(self) -> None:
        """Compile the codecs that may be used, and measure them where they are to be chosen. In the worker thread."""
        layout, wanted = self.spec.layout, self.spec.config.kv.compression
        for name in CODECS:
            if wanted in (name, "auto"):
                prepare(name, layout)
            if wanted == "auto":
                blocks = np.ones((COST_BLOCKS, layout.block_bytes), np.uint8)
                frames = np.ones((COST_BLOCKS, encoded_bytes(name, layout)), np.uint8)
                quantise_s = self._least(lambda: encode(name, layout, blocks, frames))  # noqa: B023 - called at once
                dequantise_s = self._least(lambda: decode(name, layout, frames, blocks))  # noqa: B023
                ratio = encoded_bytes(name, layout) / layout.block_bytes
                self._costs[name] = CodecCost(ratio, blocks.nbytes / quantise_s, blocks.nbytes / dequantise_s)

    def _least(self, action: Callable[[], None]) -> float:
        """Return the least of a few times that an action takes, in seconds: the machine is busy while all start."""
        times = []
        for _ in range(COST_ROUNDS):
            began = self.clock()
            action()
            times.append(self.clock() - began)
        return max(min(times), 1e-9)

    def wire_bytes(self, codec: Codec) -> int:
        """Return what a block takes on the wire."""
        return self.spec.layout.block_bytes if codec == "none" else encoded_bytes(codec, self.spec.layout)

    def wire_form(self, blocks: Sequence[int], codec: Codec) -> list[NDArray[np.uint8]]:
        """Return blocks as they are sent: themselves, or a frame of all of them."""
        if codec == "none":
            return [self.arena.payload()[block] for block in blocks]
        frames = np.empty((len(blocks), self.wire_bytes(codec)), np.uint8)
        encode(codec, self.spec.layout, self.arena.payload(), frames, blocks=blocks)
        return [frames.reshape(-1)]

    def landing_place(self, blocks: Sequence[int], codec: Codec) -> list[NDArray[np.uint8]]:
        """Return where what is sent for these blocks is received."""
        if codec == "none":
            return [self.arena.payload()[block] for block in blocks]
        return [np.empty(len(blocks) * self.wire_bytes(codec), np.uint8)]

    def memory_form(self, parts: list[NDArray[np.uint8]], blocks: Sequence[int], codec: Codec) -> None:
        """Put what was received into its blocks, unless it is there already."""
        if codec != "none":
            decode(codec, self.spec.layout, parts[0].reshape(len(blocks), -1), self.arena.payload(), blocks=blocks)

    def noted(self, what: str, key: Key, began_s: float, ended_s: float | None = None, **detail: Detail) -> None:
        """Note what was done for a request."""
        self.actor.trail.note(key[0], what, began_s, ended_s, key[1], **detail)

    def transferred(
        self, what: Direction, key: Key, began_s: float, codec: Codec, num_bytes: int, error: str, **detail: Detail
    ) -> None:
        """Note and count a transfer that has ended now, well or with an error."""
        now, path, wrong = self.clock(), self.port_name, {"error": error} if error else {}
        self.noted(what, key, began_s, now, path=path, codec=codec, bytes=num_bytes, **detail, **wrong)
        if error:
            self.actor.transfers.failed(what, path, codec)
        else:
            self.actor.transfers.stored(what, path, codec, num_bytes, now - began_s)

    def moved(self, key: Key, began_s: float, num_bytes: int, target: str, codec: Codec, num_pruned: int) -> None:
        """Count a migration that is complete."""
        now = self.clock()
        seconds = now - began_s
        self.actor.counts.update(migrations=1, migrations_pruned=int(num_pruned > 0), migrated_bytes=num_bytes)
        self.noted("migration", key, began_s, now, to=target, path=self.port_name, codec=codec, bytes=num_bytes)
        self.log.info(
            "migrated",
            request=key[0],
            to=target,
            path=self.port_name,
            codec=codec,
            pruned_tokens=num_pruned,
            mb=round(num_bytes / 1e6, 2),
            ms=round(1000 * seconds, 1),
            gb_s=round(num_bytes / seconds / 1e9, 3),
        )

    def release(self, message: Release) -> None:
        """The request is over, or an attempt of it."""
        self.outbound.release(message)
        self.inbound.release(message)

    # ---- Peers --------

    def can_reach(self, name: str) -> bool:
        """Whether KV can be sent to that migrator."""
        return name in self._peers

    def offer_port(self, name: str) -> None:
        """Tell another migrator where KV for us is sent."""
        self.tell(name, DataPort(self.port_name, self.port.address, self._num_dropped[name]))

    def port_offered(self, sender: Member, message: DataPort) -> None:
        """Connect to another migrator's port; the same connection again is no news.

        One that the peer has dropped is of no use to us either: what is under way on it would never end.
        """
        known = self._peers.get(sender.name)
        if known is not None and known.incarnation == sender.incarnation and self._known[sender.name] == message:
            return
        if message.transport != self.port_name:
            self.log.error("data transports differ", peer=sender.name, theirs=message.transport, ours=self.port_name)
            return
        self._let_go(sender.name, "it has a new data port, or connects anew")
        self._connect(sender, message)
        self.offer_port(sender.name)

    def alive(self, sender: Member) -> None:
        """A peer gave a sign of life."""
        if sender.name in self._peers:
            self._liveness.heard(sender.name, self.clock())

    def mind_peers(self) -> None:
        """Drop the connections of peers that are silent: on the data port they look idle."""
        for name in self._liveness.silent(self.clock()):
            self.reconnect(name, f"silent for {self.spec.config.router.dead_after_ms} ms")

    def fleet_changed(self, fleet: Fleet) -> None:
        """Forget peers that are gone."""
        alive = {member.name: member.incarnation for member in fleet.members}
        for name, member in list(self._peers.items()):
            if name != self.spec.name and alive.get(name) != member.incarnation:
                self.forget(name, "it is gone")

    def reconnect(self, name: str, reason: str) -> None:
        """Drop a useless connection and what is under way on it; the peer's answer makes another."""
        self.forget(name, reason)
        self.offer_port(name)

    def forget(self, name: str, reason: str) -> None:
        """Let go of a peer, its connection, and what is under way with it; the next offer tells the peer to do so."""
        if name in self._peers:
            self._num_dropped[name] += 1
            self._let_go(name, reason)

    def _let_go(self, name: str, reason: str) -> None:
        if self._peers.pop(name, None) is None:
            return
        self.log.info("data connection dropped", peer=name, reason=reason)
        self._liveness.forget(name)
        self.port.disconnect(name)
        self.outbound.peer_lost(name, reason)
        self.inbound.peer_lost(name)

    def _connect(self, member: Member, known: DataPort) -> None:
        try:
            self.port.connect(member.name, known.address, self._on_lost)
        except PDError as error:
            self.log.error("data port unreachable", peer=member.name, reason=error.message)
            self._num_dropped[member.name] += 1
            return
        self._peers[member.name] = member
        self._known[member.name] = known
        self.outbound.reached(member.name)
        if member.name != self.spec.name:
            self._liveness.heard(member.name, self.clock())

    def _on_lost(self, name: str, error: PDError) -> None:
        self.reconnect(name, error.message)
