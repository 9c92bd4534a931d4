"""The sending side of a migrator: what leaves this node's memory, in which order, and how each transfer goes.

A migration's life: Announce (prefill, chunk by chunk) or Migrate (router, all of it) -> Offer -> Taken -> for each
transfer Ask -> Grant -> header and blocks -> Stored -> the leases go back to whoever lent the KV. A granted transfer is
always answered, at least by a void header: a receive that was posted cannot be taken back.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from pdactors.actors.actor import ROUTER
from pdactors.actors.leaving import Leaving
from pdactors.errors import PDError, Refused
from pdactors.kv import frame
from pdactors.kv.frame import Header
from pdactors.kv.leases import LeaseLost
from pdactors.messages import (
    Abandon,
    Announce,
    Ask,
    Codec,
    Grant,
    Lease,
    Member,
    Migrate,
    Move,
    Offer,
    Release,
    Segment,
    Stored,
    Stranded,
    Taken,
)
from pdactors.policy.transfer import Key, LinkRate, Transfer, TransferQueue, runs

if TYPE_CHECKING:
    from pdactors.actors.mover import Mover

REACH_S = 2.0  # that a migration waits for the connection to its destination
MAX_TRIES = 4  # of one transfer
HEADER, PAYLOAD = 0, 1  # a transfer's two tags, after the granted one


class Outbound:
    """Owns the migrations that leave."""

    def __init__(self, mover: Mover) -> None:
        self._mover = mover
        self._leaving: dict[Key, Leaving] = {}
        self._unreachable: dict[Key, tuple[Migrate, float]] = {}  # wait for their connection, until when
        self._ending: set[Leaving] = set()  # over, but some of it is still being read
        self.queue = TransferQueue()
        self.rates: dict[str, LinkRate] = defaultdict(LinkRate)
        self.num_sent = 0  # transfers, for the fault that a test asks for

    @property
    def keys(self) -> tuple[Key, ...]:
        """The migrations under way."""
        return (*self._leaving, *self._unreachable, *(leaving.key for leaving in self._ending))

    def moves(self) -> tuple[Move, ...]:
        """Describe the migrations under way."""
        num_blocks = self._mover.spec.layout.num_blocks
        return tuple(leaving.as_move(num_blocks(leaving.num_tokens)) for leaving in self._leaving.values())

    # ---- A migration --------

    def announce(self, message: Announce) -> None:
        """Send the first part of a prompt while the rest is computed."""
        key = message.request, message.attempt
        leaving = self._leaving.get(key)
        if leaving is None:
            if not self._mover.can_reach(message.target):
                return
            leaving = self._begin(message, message.num_tokens)
        try:
            self._take(leaving, [message.segment], message.segment.owner)
        except (LeaseLost, Refused) as error:
            return self._fail(leaving, error.message)
        return self._extend(leaving)

    def migrate(self, message: Migrate) -> None:
        """Borrow the KV, offer it to its destination, and send what was not sent ahead."""
        key = message.request, message.attempt
        handle, leaving = message.handle, self._leaving.get(key)
        if leaving is not None and leaving.target != message.target:
            self._end(leaving)
            self._mover.tell(leaving.target, Abandon(*key, "it goes elsewhere"))
            leaving = None
        layout = self._mover.spec.layout.fingerprint
        if handle.layout != layout:
            return self._strand(key, f"KV layout: the handle's is {handle.layout}, ours is {layout}")
        if not self._mover.can_reach(message.target):
            self._unreachable[key] = message, self._mover.clock() + REACH_S
            return None
        if leaving is None:
            codec: Codec | None = None if handle.owner else "none"  # what others are to read has to be exact
            leaving = self._begin(message, handle.num_tokens, handle.num_pruned, message.time_left_s, codec)
        if message.time_left_s is not None:
            self.queue.set_deadline(key, self._mover.clock() + message.time_left_s)
        try:
            self._take(leaving, handle.segments, handle.owner)
        except (LeaseLost, Refused) as error:
            return self._fail(leaving, error.message)
        leaving.is_complete = True
        if set(leaving.blocks) != set(range(self._mover.spec.layout.num_blocks(leaving.num_tokens))):
            return self._fail(leaving, f"{len(leaving.blocks)} blocks are named for {leaving.num_tokens} tokens")
        return self._extend(leaving)

    def _begin(
        self,
        message: Announce | Migrate,
        num_tokens: int,
        num_pruned: int = 0,
        left_s: float | None = None,
        codec: Codec | None = None,
    ) -> Leaving:
        mover, target, key = self._mover, message.target, (message.request, message.attempt)
        codec = codec or mover.codec_for(target, num_tokens, left_s)
        leaving = Leaving(key, target, num_tokens, {}, [], [], codec, mover.clock(), num_pruned)
        self._leaving[key] = leaving
        self.queue.add(key, target, message.priority, None)
        layout = mover.spec.layout.fingerprint
        mover.tell(target, Offer(*key, layout, num_tokens, message.digests, message.priority, num_pruned))
        return leaving

    def _take(self, leaving: Leaving, segments: Sequence[Segment], owner: str) -> None:
        """Borrow what `owner` lends, and know of the rest under whose lease it is read.

        Raises:
            LeaseLost: a lease has ended.
            Refused: a block that is named is not what the lease names, or lies nowhere.
        """
        for segment in segments:
            if owner and segment.owner != owner:
                leaving.watched.append(segment.lease)
                named = self._mover.loans.named(segment.lease)
            elif segment.lease in leaving.borrowed:
                named = self._mover.loans.named(segment.lease)
            else:
                named = self._mover.loans.borrow(segment.lease, self._mover.clock())
                leaving.borrowed.append(segment.lease)
            if not set(segment.blocks) <= set(named):
                raise Refused(f"lease {segment.lease.index} of {segment.owner} names other blocks than the message")
            for index, block in enumerate(segment.blocks, segment.start):
                leaving.blocks.setdefault(index, block)

    def taken(self, sender: Member, message: Taken) -> None:
        """The destination wants all but what it has already."""
        leaving = self._of(sender, message)
        if leaving is None or leaving.num_ready is not None or message.num_ready < 0:
            return self._mover.drop("untimely taken")
        leaving.num_ready = message.num_ready
        return self._extend(leaving)

    def _extend(self, leaving: Leaving) -> None:
        """Queue what is known by now and wanted."""
        if leaving.num_ready is None:
            return
        new = sorted(i for i in leaving.blocks if i >= leaving.num_ready and i not in leaving.queued)
        leaving.queued.update(new)
        for start, stop in runs(new):
            self.queue.extend(leaving.key, start, stop)
        self.pump(leaving.target)
        self._finish_if_done(leaving)

    def pump(self, target: str) -> None:
        """Ask for room for whatever may go now."""
        while (transfer := self.queue.next(target)) is not None:
            leaving = self._leaving[transfer.key]
            leaving.transfers[transfer.number] = transfer
            ask = Ask(*transfer.key, transfer.number, transfer.start, transfer.num_blocks, leaving.codec)
            self._mover.tell(target, ask)

    # ---- A transfer --------

    def granted(self, sender: Member, grant: Grant) -> None:
        """Send what there is room for now."""
        leaving = self._leaving.get((grant.request, grant.attempt))
        transfer = leaving.transfers.get(grant.transfer) if leaving is not None else None
        if leaving is None or transfer is None or leaving.target != sender.name:
            return self._send_void(sender, grant)
        leaving.num_reading += 1
        self._mover.actor.spawn(self._send(sender, leaving, transfer, grant))
        return None

    async def _send(self, target: Member, leaving: Leaving, transfer: Transfer, grant: Grant) -> None:
        mover = self._mover
        blocks = [leaving.blocks[i] for i in range(transfer.start, transfer.start + transfer.num_blocks)]
        parts, checksum = await mover.in_thread(self._prepare, blocks, leaving.codec)
        if not leaving.is_over and not self._is_intact(leaving):  # what the checksum was made of may be another's
            self._fail(leaving, "the KV was taken back")
        header = Header(
            grant.secret,
            mover.spec.layout.fingerprint,
            mover.spec.incarnation,
            target.incarnation,
            grant.attempt,
            transfer.number,
            transfer.start,
            transfer.num_blocks,
            leaving.codec,
            sum(part.nbytes for part in parts),
            checksum,
            is_void=leaving.is_over,
        )
        parts = self._damaged(parts)
        leaving.sent[transfer.number] = header.size, mover.clock()

        def ended(_error: PDError | None) -> None:  # a lost connection ends every migration over it, see `peer_lost`
            leaving.num_reading -= 1
            if leaving.is_over:
                self._let_go(leaving)

        try:
            self._send_header(target, grant, header)
            if header.is_void:
                return ended(None)
            mover.port.send(target.name, grant.tag + PAYLOAD, parts, ended)
        except PDError as error:
            ended(error)
            self.peer_lost(target.name, error.message)

    def _prepare(self, blocks: Sequence[int], codec: Codec) -> tuple[list[NDArray[np.uint8]], int]:
        """Return what goes on the wire, the blocks themselves unless they are encoded, and its checksum."""
        parts = self._mover.wire_form(blocks, codec)
        return parts, frame.checksum(parts) if self._mover.spec.config.kv.checksum else 0

    def _damaged(self, parts: list[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
        """Change a byte of every n-th transfer behind its checksum, if the configuration asks for that fault."""
        self.num_sent += 1
        every = self._mover.spec.config.kv.damage_every
        if not every or self.num_sent % every:
            return parts
        first = parts[0].copy()
        first[len(first) // 2] ^= 1
        return [first, *parts[1:]]

    def _send_header(self, target: Member, grant: Grant, header: Header) -> None:
        packed = np.frombuffer(header.pack(), np.uint8)
        self._mover.port.send(target.name, grant.tag + HEADER, [packed], _ignore)

    def _send_void(self, target: Member, grant: Grant) -> None:
        """Nobody wants this any more: let the receiver have his blocks back."""
        spec = self._mover.spec
        header = Header(
            grant.secret, spec.layout.fingerprint, spec.incarnation, target.incarnation, grant.attempt, grant.transfer,
            0, 0, "none", 0, is_void=True,
        )  # fmt: skip
        try:
            self._send_header(target, grant, header)
        except PDError as error:
            self._mover.drop("void unsent", reason=error.message)

    def stored(self, sender: Member, message: Stored) -> None:
        """A transfer has arrived, or has to be sent again."""
        leaving = self._of(sender, message)
        transfer = leaving.transfers.pop(message.transfer, None) if leaving is not None else None
        if leaving is None or transfer is None:
            return self._mover.drop("untimely stored")
        self.queue.ended(transfer, is_stored=not message.error)
        if message.transfer in leaving.sent:
            size, sent_s = leaving.sent.pop(message.transfer)
            self.rates[sender.name].note(size, sent_s, self._mover.clock())
            self._ended(leaving, transfer, size, sent_s, message.error)
            leaving.num_bytes += 0 if message.error else size
        leaving.num_stored += 0 if message.error else transfer.num_blocks
        if message.error:
            tries = leaving.tries[transfer.start] = leaving.tries.get(transfer.start, 1) + 1
            self._mover.log.warning("transfer damaged", request=leaving.key[0], reason=message.error, tries=tries)
            if tries > MAX_TRIES:
                return self._fail(leaving, f"a transfer failed {MAX_TRIES} times: {message.error}")
        self.pump(sender.name)
        return self._finish_if_done(leaving)

    def _ended(self, leaving: Leaving, transfer: Transfer, size: int, sent_s: float, error: str) -> None:
        peer, blocks = leaving.target, transfer.num_blocks
        self._mover.transferred("send", leaving.key, sent_s, leaving.codec, size, error, peer=peer, blocks=blocks)

    # ---- Endings --------

    def abandoned(self, sender: Member, message: Abandon) -> None:
        """The destination cannot go on."""
        leaving = self._of(sender, message)
        if leaving is not None:
            self._end(leaving)
            self._strand(leaving.key, message.reason)

    def reached(self, target: str) -> None:
        """There is a connection now."""
        for key, (message, _) in list(self._unreachable.items()):
            if message.target == target:
                del self._unreachable[key]
                self.migrate(message)

    def release(self, message: Release) -> None:
        """The request is over: send nothing more of it."""
        self._unreachable.pop((message.request, message.attempt), None)
        leaving = self._leaving.get((message.request, message.attempt))
        if leaving is not None:
            self._end(leaving)

    def peer_lost(self, peer: str, reason: str) -> None:
        """Nothing that was on its way to that peer arrives any more."""
        for leaving in [leaving for leaving in self._leaving.values() if leaving.target == peer]:
            for number, (size, sent_s) in leaving.sent.items():
                self._ended(leaving, leaving.transfers[number], size, sent_s, f"{peer} was lost")
            self._fail(leaving, f"{peer} was lost: {reason}")

    def leases_lost(self, lost: set[Lease]) -> None:
        """Their owner took KV back that is being sent."""
        for leaving in [leaving for leaving in self._leaving.values() if not lost.isdisjoint(leaving.borrowed)]:
            self._fail(leaving, "the KV was taken back")

    def mind_deadlines(self, now: float) -> None:
        """Send nothing more of what is overdue; the router ends the request."""
        for key in self.queue.overdue(now):
            self._fail(self._leaving[key], "its deadline has passed")
        for key, (message, until_s) in list(self._unreachable.items()):
            if now > until_s:
                del self._unreachable[key]
                self._strand(key, f"{message.target} cannot be reached")

    def _finish_if_done(self, leaving: Leaving) -> None:
        if leaving.is_complete and leaving.num_ready is not None and self.queue.is_idle(leaving.key):
            self._finish(leaving)

    def _finish(self, leaving: Leaving) -> None:
        self._end(leaving)
        moved = self._mover.moved
        moved(leaving.key, leaving.began_s, leaving.num_bytes, leaving.target, leaving.codec, leaving.num_pruned)

    def _fail(self, leaving: Leaving, reason: str) -> None:
        self._end(leaving)
        self._mover.tell(leaving.target, Abandon(*leaving.key, reason))
        self._strand(leaving.key, reason)

    def _strand(self, key: Key, reason: str) -> None:
        self._mover.actor.counts["migrations_failed"] += 1
        self._mover.log.warning("not migrated", request=key[0], reason=reason)
        self._mover.noted("stranded", key, self._mover.clock(), error=reason)
        self._mover.tell(ROUTER, Stranded(*key, reason))

    def _is_intact(self, leaving: Leaving) -> bool:
        """Whether its blocks hold what they held when they were lent."""
        stands = self._mover.arena.leases().stands
        return all(map(stands, (*leaving.borrowed, *leaving.watched)))

    def _end(self, leaving: Leaving) -> None:
        del self._leaving[leaving.key]
        self.queue.remove(leaving.key)
        self._mover.actor.soon(lambda: self.pump(leaving.target))  # others have its turns now
        leaving.is_over = True
        self._ending.add(leaving)
        self._let_go(leaving)

    def _let_go(self, leaving: Leaving) -> None:
        """Give the leases back as soon as nothing is read any more."""
        if not leaving.num_reading:
            self._ending.discard(leaving)
            for lease in leaving.borrowed:
                self._mover.loans.give_back(lease)

    def _of(self, sender: Member, message: Taken | Stored | Abandon) -> Leaving | None:
        leaving = self._leaving.get((message.request, message.attempt))
        return leaving if leaving is not None and leaving.target == sender.name else None


def _ignore(_error: PDError | None) -> None:
    """What becomes of a header shows in what becomes of the payload."""
