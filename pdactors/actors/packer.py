"""`Packer`: prunes the KV of prompts that move to another node, between the steps of the prefill engine.

The router has the prefill bring KV to another node, and the prefill passes that on to its migrator: with what it has
packed, or with all of it where pruning would not save a block, finds no room, or fails.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from pdactors.engine import pruner
from pdactors.errors import InvariantError, Overloaded
from pdactors.messages import KVHandle, Migrate, Segment

if TYPE_CHECKING:
    from pdactors.actors.prefill import PrefillActor

ROOM_S = 0.5  # that a prompt waits for blocks to be packed into
Key = tuple[str, int]


@dataclass(eq=False)
class _Packing:
    """A prompt that is to move."""

    message: Migrate
    handle: KVHandle
    prompt: Sequence[int]
    num_scratch: int
    num_packed: int
    asked_s: float

    @property
    def key(self) -> Key:
        return self.message.request, self.message.attempt

    @property
    def num_blocks(self) -> int:
        return self.num_scratch + self.num_packed


class Packer:
    """Owns what waits to be pruned, and what is known of the sequences that may come to."""

    def __init__(self, actor: PrefillActor) -> None:
        self._actor = actor
        self._layout = actor.spec.layout
        self._share = actor.spec.config.kv.prune
        self._handed_over: dict[Key, tuple[KVHandle, Sequence[int]]] = {}  # with the prompts
        self._waiting: deque[_Packing] = deque()
        self._running: _Packing | None = None

    @property
    def requests(self) -> tuple[str, ...]:
        """The requests that are being packed, or wait for it."""
        packings = [*self._waiting, *([self._running] if self._running else [])]
        return tuple(packing.message.request for packing in packings)

    @property
    def blocks_lacking(self) -> int:
        """How many blocks more would let the next one in."""
        if not self._waiting:
            return 0
        return max(0, self._next().num_blocks - self._actor.engine.num_unreserved)

    async def start(self) -> None:
        """Have compiled what is needed."""
        await self._actor.in_thread(pruner.prepare, self._layout)

    def remember(self, key: Key, handle: KVHandle, prompt: Sequence[int]) -> None:
        """Take note of a sequence that was handed over; it may be asked for until `forget`."""
        self._handed_over[key] = handle, prompt

    def forget(self, key: Key) -> None:
        """The request is over, or that attempt of it."""
        self._handed_over.pop(key, None)
        self._waiting = deque(packing for packing in self._waiting if packing.key != key)

    def asked(self, message: Migrate) -> None:
        """Queue a prompt; what would take as many blocks afterwards moves whole."""
        actor = self._actor
        known = self._handed_over.get((message.request, message.attempt))
        if known is None:
            return actor.drop("untimely migrate", request=message.request)
        handle, prompt = known
        num_packed = pruner.num_packed(self._layout, len(prompt), self._share)
        num_scratch = pruner.num_scratch(self._layout, len(prompt))
        packing = _Packing(message, handle, prompt, num_scratch, num_packed, actor.clock())
        return self._waiting.append(packing) if num_packed else self._pass_on(packing, handle)

    async def work(self) -> bool:
        """Pack one prompt, in the engine's thread; False if there is none, or no room for it yet."""
        actor = self._actor
        if not self._waiting:
            return False
        if self.blocks_lacking:
            if actor.clock() < self._next().asked_s + ROOM_S:
                return False
            self._move_whole(self._take(), "no room to pack it")
            return True
        packing = self._running = self._take()
        scratch, packed = actor.pool.allocate(packing.num_scratch), actor.pool.allocate(packing.num_packed)
        num_kept = 0
        try:
            num_kept = await actor.in_thread(self._prune, packing, scratch, packed)
        except InvariantError:
            raise
        except Exception:
            actor.log.exception("pruning failed", request=packing.message.request)
        self._running = None
        if num_kept and self._is_intact(packing):
            self._lend(packing, packed, num_kept)
        else:  # where the KV was taken back the migrator says so
            self._move_whole(packing, "it could not be packed")
        actor.pool.free(scratch)
        actor.pool.free(packed)
        return True

    def _prune(self, packing: _Packing, scratch: Sequence[int], packed: Sequence[int]) -> int:
        actor = self._actor
        blocks = [block for segment in packing.handle.segments for block in segment.blocks]
        arena = actor.arena.payload()
        return pruner.prune(actor.model, self._layout, arena, packing.prompt, blocks, self._share, scratch, packed)

    def _lend(self, packing: _Packing, packed: Sequence[int], num_kept: int) -> None:
        """Lend what was packed in place of the whole."""
        actor, key = self._actor, packing.key
        try:
            lease = actor.loans.lend(key, packed, actor.clock())
        except Overloaded as error:
            return self._move_whole(packing, error.message)
        actor.loans.revoke(key, spared=lease)
        segment = Segment(actor.spec.name, lease, 0, tuple(packed))
        num_pruned = len(packing.prompt) - num_kept
        ms = round(1000 * (actor.clock() - packing.asked_s), 1)
        actor.log.info("pruned", request=key[0], tokens=len(packing.prompt), kept=num_kept, ms=ms)
        handle = msgspec.structs.replace(
            packing.handle, segments=(segment,), num_tokens=num_kept, num_pruned=num_pruned
        )
        return self._pass_on(packing, handle)

    def _move_whole(self, packing: _Packing, reason: str) -> None:
        self._actor.log.warning("not pruned", request=packing.message.request, reason=reason)
        self._pass_on(packing, packing.handle)

    def _pass_on(self, packing: _Packing, handle: KVHandle) -> None:
        """Have the KV moved; if the migrator is gone, the router has the prompt computed again."""
        actor, message = self._actor, packing.message
        time_left_s = message.time_left_s
        if time_left_s is not None:
            time_left_s -= actor.clock() - packing.asked_s
        digests = () if handle.num_pruned else message.digests  # those say what blocks hold that are whole
        actor.tell(
            actor.migrator, msgspec.structs.replace(message, handle=handle, digests=digests, time_left_s=time_left_s)
        )

    def _is_intact(self, packing: _Packing) -> bool:
        """Whether the blocks hold what they held when the prompt was handed over."""
        loans, stands = self._actor.loans, self._actor.arena.leases().stands
        return all(
            loans.is_lent(packing.key, segment.lease)
            if segment.owner == packing.handle.owner
            else stands(segment.lease)
            for segment in packing.handle.segments
        )

    def _next(self) -> _Packing:
        return min(self._waiting, key=lambda packing: packing.message.priority != "interactive")

    def _take(self) -> _Packing:
        packing = self._next()
        self._waiting.remove(packing)
        return packing
