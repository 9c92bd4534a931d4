"""`SimMover`: a migrator that moves KV to other nodes, by the real transfer queue, grants and codec choice."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import msgspec

from pdactors.kv.blocks import BlockPool
from pdactors.kv.store import ArenaStore
from pdactors.messages import (
    Announce,
    Codec,
    KVHandle,
    Lease,
    Member,
    Message,
    Migrate,
    Migrated,
    Pin,
    Prefilled,
    Priority,
    Publish,
    Release,
    Segment,
)
from pdactors.policy.codec_choice import CodecCost, choose_codec
from pdactors.policy.transfer import LinkRate, Transfer, TransferQueue, runs
from pdactors.sim.memory import Key, Owner

if TYPE_CHECKING:
    from pdactors.sim.node import SimNode


@dataclass(eq=False)
class _Leaving:
    key: Key
    target: str
    num_tokens: int
    codec: Codec
    blocks: dict[int, int] = field(default_factory=dict)
    borrowed: list[Lease] = field(default_factory=list)
    num_ready: int | None = None  # leading blocks that the destination has; None until it said so
    queued: set[int] = field(default_factory=set)
    is_complete: bool = False
    is_over: bool = False
    num_sending: int = 0


@dataclass(eq=False)
class _Coming:
    leaving: _Leaving
    source: SimMover
    digests: tuple[bytes, ...]
    num_blocks: int
    began_s: float
    blocks: dict[int, int] = field(default_factory=dict)
    num_reserved: int = 0
    num_bytes: int = 0
    is_over: bool = False


class SimMover:
    """Both directions of one node: what leaves, what arrives, and the blocks that have arrived."""

    def __init__(self, node: SimNode, member: Member) -> None:
        self.node = node
        self.member = member
        self.pool = BlockPool()
        self.num_reserved = 0
        self.owner = Owner(self.pool, lambda: self.num_unreserved)
        self._store = ArenaStore(self.pool, cast(Any, None))  # who reads what is in `node.leases`
        self.num_bytes = 0
        self._queue = TransferQueue()
        self._rates: dict[str, LinkRate] = defaultdict(LinkRate)
        self._leaving: dict[Key, _Leaving] = {}
        self._coming: dict[Key, _Coming] = {}
        self._offers: deque[tuple[_Coming, Priority]] = deque()  # for which there is no room yet

    @property
    def num_unreserved(self) -> int:
        """Blocks that are set aside for nobody."""
        return self.pool.num_available - self.num_reserved

    def receive(self, message: Message) -> None:
        """Take a message of the router or of the node's engines."""
        if isinstance(message, Announce):
            self._announced(message)
        elif isinstance(message, Migrate):
            self._migrate(message)
        elif isinstance(message, Release):
            self._release((message.request, message.attempt))
        elif isinstance(message, Pin):
            self.node.lend_cached(self.member.name, self.pool, self.num_reserved, message)

    # ---- What engines publish --------

    def publish(self, sender: Owner, message: Publish) -> None:
        """Own what an engine owned until now; a prompt goes on to the router under a lease of ours."""
        self.node.memory.give(sender, len(message.blocks))
        held = self._store.put(message.blocks, message.digests, message.part, message.parent)
        self.node.tell_cache(self.member.name, self.pool)
        if (done := message.done) is not None:
            before = [block for segment in done.handle.segments for block in segment.blocks]
            self._hand_over(done, (*before, *held))
        self._store.free(held)

    def _hand_over(self, done: Prefilled, blocks: tuple[int, ...]) -> None:
        name = self.member.name
        lease = self.node.leases.lend(name, (done.request, done.attempt), self.pool, blocks)
        handle = KVHandle(self.member.node, name, "", (Segment(name, lease, 0, blocks),), done.handle.num_tokens)
        self.node.router.post(name, msgspec.structs.replace(done, handle=handle))

    # ---- What leaves --------

    def _announced(self, message: Announce) -> None:
        key = message.request, message.attempt
        leaving = self._leaving.get(key) or self._begin(
            key, message.target, message.num_tokens, message.digests, message.priority, None
        )
        self._take(leaving, (message.segment,), message.segment.owner)
        self._extend(leaving)

    def _migrate(self, message: Migrate) -> None:
        key, handle = (message.request, message.attempt), message.handle
        leaving = self._leaving.get(key)
        if leaving is not None and leaving.target != message.target:
            self._stop(leaving)
            leaving = None
        if leaving is None:
            leaving = self._begin(
                key, message.target, handle.num_tokens, message.digests, message.priority, message.time_left_s
            )
        if message.time_left_s is not None:
            self._queue.set_deadline(key, self.node.clock.now + message.time_left_s)
        self._take(leaving, handle.segments, handle.owner)
        leaving.is_complete = True
        self._extend(leaving)

    def _begin(
        self,
        key: Key,
        target: str,
        num_tokens: int,
        digests: tuple[bytes, ...],
        priority: Priority,
        left_s: float | None,
    ) -> _Leaving:
        leaving = _Leaving(key, target, num_tokens, self._codec(target, num_tokens, left_s))
        self._leaving[key] = leaving
        self._queue.add(key, target, priority, None)
        there = self.node.router.mover(target)
        num_blocks = self.node.layout.num_blocks(num_tokens)
        coming = _Coming(leaving, self, digests, num_blocks, self.node.clock.now)
        self._say(there._offered, coming, priority)
        return leaving

    def _codec(self, target: str, num_tokens: int, left_s: float | None) -> Codec:
        wanted = self.node.config.kv.compression
        if wanted != "auto":
            return wanted
        return choose_codec(
            self.node.layout.num_blocks(num_tokens) * self.node.layout.block_bytes,
            link_bytes_s=self._rates[target].bytes_s,
            costs=self.node.cost.codecs,
            left_s=left_s,
        )

    def _take(self, leaving: _Leaving, segments: tuple[Segment, ...], owner: str) -> None:
        for segment in segments:
            if segment.owner == owner and segment.lease not in leaving.borrowed:
                if self.node.leases.borrow(segment.lease) is not None:
                    leaving.borrowed.append(segment.lease)
            for index, block in enumerate(segment.blocks, segment.start):
                leaving.blocks.setdefault(index, block)

    def _taken(self, leaving: _Leaving, num_ready: int) -> None:
        leaving.num_ready = num_ready
        self._extend(leaving)

    def _extend(self, leaving: _Leaving) -> None:
        if leaving.num_ready is None or leaving.is_over:
            return
        new = sorted(i for i in leaving.blocks if i >= leaving.num_ready and i not in leaving.queued)
        leaving.queued.update(new)
        for start, stop in runs(new):
            self._queue.extend(leaving.key, start, stop)
        self._pump(leaving.target)
        self._finish_if_done(leaving)

    def _pump(self, target: str) -> None:
        while (transfer := self._queue.next(target)) is not None:
            leaving = self._leaving[transfer.key]
            leaving.num_sending += 1
            size = transfer.num_blocks * self.node.layout.block_bytes
            cost = self._codec_cost(leaving)
            quantise_s = size / cost.quantise_bytes_s if cost else 0.0
            asked_s = 2 * self.node.cost.control_s  # Ask and Grant
            self.node.clock.after(asked_s + quantise_s, self._send, leaving, transfer)

    def _send(self, leaving: _Leaving, transfer: Transfer) -> None:
        there = self.node.router.mover(leaving.target)
        cost = self._codec_cost(leaving)
        size = transfer.num_blocks * self.node.layout.block_bytes
        sent = size * (cost.ratio if cost else 1.0)
        dequantise_s = size / cost.dequantise_bytes_s if cost else 0.0
        began_s = self.node.clock.now
        if leaving.is_over:
            return self._let_go(leaving)

        def arrived() -> None:
            self.num_bytes += int(sent)
            self.node.clock.after(dequantise_s, there._arrived, leaving.key, transfer, int(sent))
            self.node.clock.after(
                dequantise_s + self.node.cost.control_s, self._stored, leaving, transfer, int(sent), began_s
            )

        return self.node.router.send(self.node, there.node, sent, arrived)

    def _stored(self, leaving: _Leaving, transfer: Transfer, num_bytes: int, began_s: float) -> None:
        self._rates[leaving.target].note(num_bytes, began_s, self.node.clock.now)
        if leaving.is_over:
            return self._let_go(leaving)
        leaving.num_sending -= 1
        self._queue.ended(transfer, is_stored=True)
        self._pump(leaving.target)
        return self._finish_if_done(leaving)

    def _finish_if_done(self, leaving: _Leaving) -> None:
        if leaving.is_complete and leaving.num_ready is not None and self._queue.is_idle(leaving.key):
            self._stop(leaving, tells=False)

    def _stop(self, leaving: _Leaving, *, tells: bool = True) -> None:
        del self._leaving[leaving.key]
        self._queue.remove(leaving.key)
        leaving.is_over = True
        leaving.num_sending += 1
        self._let_go(leaving)
        if tells:
            self._say(self.node.router.mover(leaving.target)._abandoned, leaving.key)
        self.node.clock.after(0.0, self._pump, leaving.target)

    def _let_go(self, leaving: _Leaving) -> None:
        """Give the leases back as soon as nothing is read any more."""
        leaving.num_sending -= 1
        if not leaving.num_sending:
            for lease in leaving.borrowed:
                self.node.leases.give_back(lease)
            leaving.borrowed.clear()

    def _codec_cost(self, leaving: _Leaving) -> CodecCost | None:
        return None if leaving.codec == "none" else self.node.cost.codecs[leaving.codec]

    # ---- What arrives --------

    def _offered(self, coming: _Coming, priority: Priority) -> None:
        self._offers.append((coming, priority))
        self._offers = deque(sorted(self._offers, key=lambda offer: offer[1] != "interactive"))
        self.serve()

    def serve(self) -> None:
        """Take the offers that there is room for now, in order; one that is half there could wait for another."""
        while self._offers:
            coming, _ = self._offers[0]
            if coming.is_over or coming.leaving.is_over:
                self._offers.popleft()
                continue
            ready = self.pool.match(coming.digests)
            lacking = coming.num_blocks - len(ready) - self.num_unreserved
            if lacking > 0:
                self.pool.free(ready)
                if self.node.memory.mind(self.owner, lacking):
                    continue
                self.node.clock.after(0.1, self.serve)
                return
            self._offers.popleft()
            coming.blocks = dict(enumerate(ready))
            coming.num_reserved = coming.num_blocks - len(ready)
            self.num_reserved += coming.num_reserved
            self._coming[coming.leaving.key] = coming
            self._say(coming.source._taken, coming.leaving, len(ready))
            self._complete(coming)

    def _arrived(self, key: Key, transfer: Transfer, num_bytes: int) -> None:
        coming = self._coming.get(key)
        if coming is None:
            return
        blocks = self.pool.allocate(transfer.num_blocks)
        coming.num_reserved -= len(blocks)
        self.num_reserved -= len(blocks)
        coming.blocks.update(enumerate(blocks, transfer.start))
        coming.num_bytes += num_bytes
        self._complete(coming)

    def _complete(self, coming: _Coming) -> None:
        """Once all is here, lend it to whoever decodes, and tell the router."""
        if len(coming.blocks) < coming.num_blocks:
            return
        key, leaving = coming.leaving.key, coming.leaving
        blocks = [coming.blocks[i] for i in range(coming.num_blocks)]
        if leaving.codec == "none":
            for i, digest in enumerate(coming.digests):
                self.pool.insert(digest, blocks[i], coming.digests[i - 1] if i else None)
        name = self.member.name
        lease = self.node.leases.lend(name, key, self.pool, blocks)
        self._end(coming)
        handle = KVHandle(
            self.member.node, name, "", (Segment(name, lease, 0, tuple(blocks)),), leaving.num_tokens, leaving.codec
        )
        seconds = self.node.clock.now - coming.began_s
        self.node.router.post(name, Migrated(*key, handle, coming.num_bytes, seconds, leaving.codec))
        self.node.tell_cache(self.member.name, self.pool)

    def _abandoned(self, key: Key) -> None:
        if key in self._coming:
            self._end(self._coming[key])
            self.serve()

    def _end(self, coming: _Coming) -> None:
        del self._coming[coming.leaving.key]
        coming.is_over = True
        self.num_reserved -= coming.num_reserved
        coming.num_reserved = 0
        self.pool.free([coming.blocks[i] for i in sorted(coming.blocks)])

    # ---- Both --------

    def _release(self, key: Key) -> None:
        if key in self._leaving:
            self._stop(self._leaving[key])
        for coming, _ in self._offers:
            coming.is_over = coming.is_over or coming.leaving.key == key
        if key in self._coming:
            self._end(self._coming[key])
        self.node.leases.revoke(self.member.name, key)
        self.serve()

    def _say(self, action: Callable[..., object], *arguments: object) -> None:
        """Have another migrator hear something, one message later."""
        self.node.clock.after(self.node.cost.control_s, action, *arguments)
