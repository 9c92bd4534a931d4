"""The receiving side of a migrator: room is granted before anything is sent, and what arrives is checked first.

Blocks of a granted transfer stay out of use until the transfer has ended or its connection is dropped: until then the
peer may write them.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdactors.actors.actor import ROUTER
from pdactors.actors.outbound import HEADER, PAYLOAD
from pdactors.errors import BadRequest, Overloaded, PDError
from pdactors.kv import frame
from pdactors.kv.frame import HEADER_BYTES, SECRET_BYTES, Header
from pdactors.messages import (
    Abandon,
    Ask,
    Codec,
    Grant,
    KVHandle,
    Member,
    Migrated,
    Offer,
    Release,
    Segment,
    Stored,
    Taken,
)
from pdactors.policy.transfer import TRANSFER_BLOCKS, Key
from pdactors.transport.data_port import TAG_BITS

if TYPE_CHECKING:
    from pdactors.actors.mover import Mover


@dataclass(eq=False)
class Coming:
    """A sequence's KV on its way to this node."""

    key: Key
    source: Member
    num_tokens: int
    num_blocks: int
    digests: tuple[bytes, ...]
    blocks: dict[int, int]  # index in the sequence -> our block, stored whole
    num_reserved: int  # blocks that are set aside and not granted yet
    began_s: float
    num_pruned: int = 0
    granted: set[int] = field(default_factory=set)  # indices whose transfer is under way
    num_bytes: int = 0
    codec: Codec = "none"
    is_over: bool = False


@dataclass(eq=False)
class _Landing:
    """One granted transfer."""

    coming: Coming
    ask: Ask
    blocks: list[int]
    expected: Header
    header: NDArray[np.uint8]
    granted_s: float


class Inbound:
    """Owns the migrations that arrive, and their blocks until they are lent to a decode engine."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._coming: dict[Key, Coming] = {}
        self._offers: deque[tuple[Member, Offer]] = deque()  # for which there is no room yet
        self._landing: set[_Landing] = set()
        self._holdings = mover.holdings

    @property
    def keys(self) -> tuple[Key, ...]:
        """The migrations under way."""
        return (*self._coming, *self._waiting, *(landing.coming.key for landing in self._landing))

    @property
    def _waiting(self) -> Iterator[Key]:
        return ((offer.request, offer.attempt) for _, offer in self._offers)

    @property
    def blocks_lacking(self) -> int:
        """How many blocks more would let the next offer in."""
        if not self._offers:
            return 0
        needed = self._mover.spec.layout.num_blocks(self._offers[0][1].num_tokens)
        return max(0, needed - self._holdings.num_unreserved)

    # ---- A migration --------

    def offered(self, sender: Member, offer: Offer) -> None:
        """Take an offer once there is room for all of it: two that are half here could wait for each other."""
        spec = self._mover.spec
        num_blocks = spec.layout.num_blocks(offer.num_tokens)
        reason = ""
        if offer.layout != spec.layout.fingerprint:
            reason = f"KV layout: theirs is {offer.layout}, ours is {spec.layout.fingerprint}"
        elif not 1 <= offer.num_tokens <= spec.model.max_model_len - offer.num_pruned:
            limit = f"model.max_model_len is {spec.model.max_model_len}"
            reason = f"{offer.num_tokens} tokens and {offer.num_pruned} left out; {limit}"
        elif offer.num_pruned and offer.digests:
            reason = f"{offer.num_pruned} tokens are left out, so no digest says what a block holds"
        elif len(offer.digests) > num_blocks:
            reason = f"{len(offer.digests)} digests of {num_blocks} blocks"
        if reason:
            self._mover.tell(sender.name, Abandon(offer.request, offer.attempt, reason))
        elif (offer.request, offer.attempt) not in (*self._coming, *self._waiting):
            self._offers.append((sender, offer))
            self._offers = deque(sorted(self._offers, key=lambda waiting: waiting[1].priority != "interactive"))
            self.serve()

    def serve(self) -> None:
        """Take the offers that there is room for now, in order."""
        while self._offers:
            sender, offer = self._offers[0]
            ready = self._mover.pool.match(offer.digests)
            num_blocks = self._mover.spec.layout.num_blocks(offer.num_tokens)
            if num_blocks - len(ready) > self._holdings.num_unreserved:
                self._mover.pool.free(ready)
                self._holdings.extents.mind(self.blocks_lacking, self._mover.arena.num_blocks, self._mover.clock())
                return
            self._offers.popleft()
            coming = Coming(
                (offer.request, offer.attempt),
                sender,
                offer.num_tokens,
                num_blocks,
                offer.digests,
                dict(enumerate(ready)),
                num_blocks - len(ready),
                self._mover.clock(),
                offer.num_pruned,
            )
            self._holdings.num_reserved += coming.num_reserved
            self._coming[coming.key] = coming
            self._mover.tell(sender.name, Taken(*coming.key, len(ready)))
            self._complete(coming)

    def asked(self, sender: Member, ask: Ask) -> None:
        """Set blocks aside for a transfer, await it, and say so."""
        coming = self._coming.get((ask.request, ask.attempt))
        if coming is None or coming.source.name != sender.name:
            return self._mover.drop("untimely ask", sender=sender.name)
        wanted = range(ask.start, ask.start + ask.count)
        is_fit = 1 <= ask.count <= TRANSFER_BLOCKS and 0 <= ask.start and wanted.stop <= coming.num_blocks
        if not is_fit or not coming.granted.isdisjoint(wanted) or not coming.blocks.keys().isdisjoint(wanted):
            return self._fail(
                coming, f"blocks {wanted.start}..{wanted.stop - 1} of {coming.num_blocks} are not to come"
            )
        blocks = self._mover.pool.allocate(ask.count)
        coming.num_reserved -= ask.count
        self._holdings.num_reserved -= ask.count
        coming.granted.update(wanted)
        coming.codec = ask.codec
        grant = Grant(*coming.key, ask.transfer, secrets.randbits(TAG_BITS - 1) << 1, secrets.token_bytes(SECRET_BYTES))
        spec = self._mover.spec
        expected = Header(
            grant.secret, spec.layout.fingerprint, sender.incarnation, spec.incarnation, ask.attempt, ask.transfer,
            ask.start, ask.count, ask.codec, ask.count * self._mover.wire_bytes(ask.codec),
        )  # fmt: skip
        landing = _Landing(coming, ask, blocks, expected, np.zeros(HEADER_BYTES, np.uint8), self._mover.clock())
        self._landing.add(landing)
        try:
            self._mover.port.receive(
                sender.name, grant.tag + HEADER, [landing.header], lambda error: self._on_header(landing, grant, error)
            )
        except PDError as error:
            self._drop(landing)
            return self._fail(coming, error.message)
        self._mover.tell(sender.name, grant)
        return None

    # ---- A transfer --------

    def _on_header(self, landing: _Landing, grant: Grant, error: PDError | None) -> None:
        """Know by its header what comes, before any of it is taken in."""
        if error is not None:
            return self._lose(landing, error)
        peer = landing.coming.source.name
        try:
            header = frame.unpack(landing.header.tobytes())
            if header.is_void and header.secret == grant.secret:
                return self._drop(landing)
            if reason := header.differs(landing.expected):
                raise BadRequest(reason)
            landing.expected = landing.expected._replace(checksum=header.checksum)
            parts = self._mover.landing_place(landing.blocks, header.codec)
            self._mover.port.receive(
                peer, grant.tag + PAYLOAD, parts, lambda error: self._on_payload(landing, parts, error)
            )
        except PDError as wrong:  # what follows that header has nowhere to go, so the connection is of no use
            self._mover.log.error("wrong header", peer=peer, reason=wrong.message)
            self._lose(landing, wrong)
            self._mover.reconnect(peer, f"wrong header: {wrong.message}")

    def _on_payload(self, landing: _Landing, parts: list[NDArray[np.uint8]], error: PDError | None) -> None:
        if error is not None:
            return self._lose(landing, error)
        self._mover.actor.spawn(self._accept(landing, parts))
        return None

    async def _accept(self, landing: _Landing, parts: list[NDArray[np.uint8]]) -> None:
        """Check what has arrived, and count it in."""
        coming, ask = landing.coming, landing.ask
        wrong = await self._mover.in_thread(self._check, landing, parts)
        self._ended(landing, wrong)
        if wrong or coming.is_over:
            self._drop(landing)
        else:
            self._landing.discard(landing)
            coming.granted.difference_update(range(ask.start, ask.start + ask.count))
            coming.blocks.update(enumerate(landing.blocks, ask.start))
            coming.num_bytes += landing.expected.size
        if not coming.is_over:
            self._mover.tell(coming.source.name, Stored(*coming.key, ask.transfer, wrong))
            self._complete(coming)

    def _check(self, landing: _Landing, parts: list[NDArray[np.uint8]]) -> str:
        """Say what is wrong with what has arrived; decode it if nothing is. In the worker thread."""
        if self._mover.spec.config.kv.checksum and frame.checksum(parts) != landing.expected.checksum:
            return "checksum: the bytes are not those that were sent"
        self._mover.memory_form(parts, landing.blocks, landing.expected.codec)
        return ""

    def _ended(self, landing: _Landing, error: str) -> None:
        coming, ask = landing.coming, landing.ask
        self._mover.transferred(
            "receive", coming.key, landing.granted_s, ask.codec, landing.expected.size, error,
            peer=coming.source.name, blocks=ask.count,
        )  # fmt: skip

    def _lose(self, landing: _Landing, error: PDError) -> None:
        """A transfer came to nothing: what was said of it was wrong, or its connection is gone."""
        self._ended(landing, error.message)
        self._drop(landing)

    def _drop(self, landing: _Landing) -> None:
        """A transfer ended without use: its blocks are free, and set aside again if it is to be repeated."""
        self._landing.discard(landing)
        self._mover.pool.free(landing.blocks)
        coming, ask = landing.coming, landing.ask
        coming.granted.difference_update(range(ask.start, ask.start + ask.count))
        if not coming.is_over:
            coming.num_reserved += ask.count
            self._holdings.num_reserved += ask.count
        self.serve()

    # ---- Endings --------

    def _complete(self, coming: Coming) -> None:
        """Once all is here, lend it to whoever decodes, and tell the router."""
        if len(coming.blocks) < coming.num_blocks:
            return
        mover = self._mover
        blocks = [coming.blocks[i] for i in range(coming.num_blocks)]
        if coming.codec == "none":
            for i, digest in enumerate(coming.digests):
                mover.pool.insert(digest, blocks[i], coming.digests[i - 1] if i else None)
        try:
            lease = mover.loans.lend(coming.key, blocks, mover.clock())
        except Overloaded as error:
            return self._fail(coming, error.message)
        self._end(coming)
        handle = KVHandle(
            node=mover.spec.node,
            owner=mover.spec.name,
            layout=mover.spec.layout.fingerprint,
            segments=(Segment(mover.spec.name, lease, 0, tuple(blocks)),),
            num_tokens=coming.num_tokens,
            codec=coming.codec,
            num_pruned=coming.num_pruned,
        )
        now = mover.clock()
        seconds = now - coming.began_s
        mover.noted("arrival", coming.key, coming.began_s, now, peer=coming.source.name, codec=coming.codec)
        mover.tell(ROUTER, Migrated(*coming.key, handle, coming.num_bytes, seconds, coming.codec))
        return self._holdings.tell_cache()

    def abandoned(self, sender: Member, message: Abandon) -> None:
        """The source does not go on."""
        key = message.request, message.attempt
        self._offers = deque((s, o) for s, o in self._offers if s.name != sender.name or (o.request, o.attempt) != key)
        coming = self._coming.get(key)
        if coming is not None and coming.source.name == sender.name:
            self._end(coming)
            self.serve()

    def release(self, message: Release) -> None:
        """The request is over."""
        key = message.request, message.attempt
        self._offers = deque((s, o) for s, o in self._offers if (o.request, o.attempt) != key)
        if key in self._coming:
            self._end(self._coming[key])
        self.serve()

    def peer_lost(self, peer: str) -> None:
        """Nothing comes from that peer any more."""
        self._offers = deque((s, o) for s, o in self._offers if s.name != peer)
        for coming in [coming for coming in self._coming.values() if coming.source.name == peer]:
            self._end(coming)
        self.serve()

    def _fail(self, coming: Coming, reason: str) -> None:
        self._end(coming)
        self._mover.tell(coming.source.name, Abandon(*coming.key, reason))
        self.serve()

    def _end(self, coming: Coming) -> None:
        """Let go of what is here; what is still landing goes when it has landed."""
        del self._coming[coming.key]
        coming.is_over = True
        self._holdings.num_reserved -= coming.num_reserved
        coming.num_reserved = 0
        self._mover.pool.free([coming.blocks[i] for i in sorted(coming.blocks)])
