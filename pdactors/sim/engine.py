"""`SimEngine`: prefill, decode and worker actors under the virtual clock. What they decide is the engine's own code."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pdactors.actors.publishing import publish
from pdactors.engine.limits import EngineLimits
from pdactors.engine.sequence import Sequence
from pdactors.engine.step import Outcome, Step
from pdactors.kv.blocks import BlockPool
from pdactors.messages import (
    Adopted,
    Announce,
    CopyOut,
    Decode,
    Finished,
    KVHandle,
    Lease,
    Load,
    Member,
    Message,
    Pin,
    Prefill,
    Prefilled,
    Priority,
    Publish,
    Release,
    Segment,
)
from pdactors.sim.cost import StepWork
from pdactors.sim.memory import Key, Owner
from pdactors.sim.virtual_engine import VirtualEngine

if TYPE_CHECKING:
    from pdactors.sim.node import SimNode

ASK_AGAIN_S = 0.1  # for memory, and for what waits when all stands still


@dataclass(eq=False)
class _Run:
    """Unchanged decode steps under way: step j takes `first_s + j * growth_s`."""

    began_s: float
    first_s: float
    growth_s: float
    steps: int

    def end_s(self, steps: int) -> float:
        """When so many of them are over."""
        return self.began_s + steps * self.first_s + self.growth_s * steps * (steps - 1) / 2

    def steps_by(self, now: float) -> int:
        """Return the least number of steps, one at least, that end at `now` or later."""
        low, high = 1, self.steps
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.end_s(middle) >= now else (middle + 1, high)
        return low


class SimEngine:
    """One engine of a node: its sequences, its pool, and the step that is under way."""

    def __init__(self, node: SimNode, member: Member, limits: EngineLimits) -> None:
        self.node = node
        self.member = member
        self.cost = node.router.decode_cost if member.role == "decode" else node.cost
        self.pool = BlockPool()
        self.engine = VirtualEngine(node.layout, self.pool, limits)
        self.migrator = f"{node.section.name}/migrator"
        self.owner = Owner(self.pool, lambda: self.engine.num_unreserved)
        self.busy_s = 0.0
        self.num_steps = 0
        self._commands: deque[Callable[[], None]] = deque()
        self._is_stepping = False
        self._run: _Run | None = None
        self._is_watching = False  # a look at what waits for memory is due
        self._stalled_since: float | None = None
        self._behind: dict[Key, set[Lease]] = {}  # what handed-over sequences borrow from others
        self._told_lack = False

    # ---- Messages --------

    def receive(self, message: Message) -> None:
        """Take a message in; what it asks of a sequence takes effect between two steps."""
        if isinstance(message, Prefill):
            self._take_prompt(message)
        elif isinstance(message, Decode):
            self._adopt(message)
        elif isinstance(message, Pin):
            self.node.lend_cached(self.member.name, self.pool, self.engine.num_reserved, message)
        elif isinstance(message, Release):
            self._command(lambda: self._release((message.request, message.attempt)))
        elif isinstance(message, CopyOut):
            self._command(lambda: self._copy_out((message.request, message.attempt)))

    def load(self) -> Load:
        """Describe what the router decides by."""
        return Load(
            running=len(self.engine.running),
            waiting=len(self.engine.waiting),
            max_sequences=self.engine.limits.max_sequences,
            max_blocks=self.node.memory.max_blocks,
            blocks=self.pool.account() if self._told_lack else Load().blocks,
            blocks_lacking=self.engine.blocks_lacking(),
        )

    def news(self) -> Load | None:
        """Return the load where it says something that the router does not know by its own orders; else None."""
        lacks = self.engine.blocks_lacking() > 0
        is_news, self._told_lack = lacks or self._told_lack, lacks
        return self.load() if is_news else None

    def _take_prompt(self, message: Prefill) -> None:
        sequence = Sequence.to_compute(message)
        for segment in message.prefix:
            self._borrow(sequence, segment)
        sequence.set_tail_apart(message.prefix_tokens, self.node.layout.block_tokens)
        self._command(lambda: self.engine.submit(sequence))

    def _adopt(self, message: Decode) -> None:
        handle = message.handle
        sequence = Sequence.to_adopt(message)
        for segment in handle.segments:
            if segment.owner == handle.owner:
                self._borrow(sequence, segment)
            elif segment.owner == self.member.name and self.node.leases.is_lent(
                self.member.name, sequence.key, segment.lease
            ):
                self.pool.retain(segment.blocks)
                sequence.kept.update(enumerate(segment.blocks, segment.start))
        sequence.set_tail_apart(handle.num_tokens, self.node.layout.block_tokens)
        self._command(lambda: self.engine.submit(sequence))

    def _borrow(self, sequence: Sequence, segment: Segment) -> None:
        """Read what is lent; what is lost is computed."""
        if segment.lease in sequence.leases or self.node.leases.borrow(segment.lease) is not None:
            sequence.segments.append(segment)
            sequence.lent.update(enumerate(segment.blocks, segment.start))

    # ---- Steps --------

    def wake(self) -> None:
        """Look again for something to do, if idle."""
        if not self._is_stepping:
            self._next()

    def _command(self, action: Callable[[], None]) -> None:
        """Do something at the next step boundary; a run of steps ends with the one that is under way."""
        self._commands.append(action)
        run = self._run
        if run is not None and (steps := run.steps_by(self.node.clock.now)) < run.steps:
            run.steps = steps
            self.node.clock.at(run.end_s(steps), self._end_run, run, steps)
        self.wake()

    def _next(self) -> None:
        while self._commands:
            self._commands.popleft()()
        self._admit()
        while self.node.memory.mind(self.owner, self.engine.blocks_lacking()):
            self._admit()
        self.node.tell_cache(self.member.name, self.pool)
        steps = 0 if self.node.host.is_shared else self.engine.num_unchanged(self.node.memory.spare_blocks)
        if steps > 1:
            self._begin_run(steps)
        elif (step := self.engine.plan()) is not None:
            self._begin(step)
        elif self.engine.waiting or self.engine.running:
            self._watch()

    def _admit(self) -> None:
        for sequence in self.engine.admit():
            if sequence.num_admitted == 1 and sequence.handle is not None:
                self._tell_router(Adopted(*sequence.key))

    def _begin(self, step: Step) -> None:
        self._is_stepping, self._stalled_since = True, None
        began_s = self.node.clock.now
        work = StepWork.of(step.batch.spans, len(step.sampled))

        def ended() -> None:
            self._is_stepping = False
            self.busy_s += self.node.clock.now - began_s
            self.num_steps += 1
            outcomes = self.engine.take_in(step)
            for outcome in outcomes:
                self.node.router.token(outcome.sequence, [self.node.clock.now])
            self._move_on(outcomes, [sequence for sequence, _ in step.portions])

        self.node.host.begin(self.cost.step(work), step.is_decode, ended)

    def _begin_run(self, steps: int) -> None:
        self._is_stepping, self._stalled_since = True, None
        batch = self.engine.running
        kv_tokens = sum(s.num_stored + 1 for s in batch)
        first_s = self.cost.step(StepWork(len(batch), len(batch), kv_tokens, 0.0, len(batch)))
        self._run = _Run(self.node.clock.now, first_s, self.cost.kv_token_s * len(batch), steps)
        self.node.clock.at(self._run.end_s(steps), self._end_run, self._run, steps)

    def _end_run(self, run: _Run, steps: int) -> None:
        if run is not self._run or steps != run.steps:
            return
        self._is_stepping, self._run = False, None
        self.busy_s += self.node.clock.now - run.began_s
        self.num_steps += steps
        outcomes = self.engine.decode(steps)
        ends = [run.end_s(count) for count in range(1, steps + 1)] if self.node.router.wants_gaps else []
        for outcome in outcomes:
            self.node.router.token(outcome.sequence, ends or [self.node.clock.now])
        self._move_on(outcomes, [])

    def _move_on(self, outcomes: list[Outcome], took_part: list[Sequence]) -> None:
        for outcome in outcomes:
            sequence = outcome.sequence
            if outcome.finish is not None:
                self._leave(sequence)
                self._tell_router(Finished(*sequence.key, len(sequence.tokens)))
            elif self.member.role == "prefill":
                self._hand_over(sequence)
        if self.member.role == "prefill":
            self._announce(took_part)
        self.wake()

    def _watch(self) -> None:
        """Ask for memory again in a while; when all stands still, have somebody give back what it borrows."""
        if self._is_watching:
            return
        self._is_watching = True
        if not self.engine.is_stalled:
            self._stalled_since = None
        elif self._stalled_since is None:
            self._stalled_since = self.node.clock.now
        elif self.node.clock.now - self._stalled_since >= ASK_AGAIN_S:
            self._stalled_since = self.node.clock.now
            if (sequence := self.engine.give_way()) is not None:
                self._give_back(sequence)
        self.node.clock.after(ASK_AGAIN_S, self._look_again)

    def _look_again(self) -> None:
        self._is_watching = False
        self.wake()

    # ---- Sequences --------

    def _hand_over(self, sequence: Sequence) -> None:
        """Through the store where there is one, else under a lease of ours."""
        if not publish(self, sequence, self._done(sequence)):
            lease = self.node.leases.lend(self.member.name, sequence.key, self.pool, sequence.own_blocks)
            self._tell_router(self._done(sequence, lease))
        if sequence.segments:
            self._behind[sequence.key] = sequence.leases
        self.engine.remove(sequence)

    def _done(self, sequence: Sequence, lease: Lease | None = None) -> Prefilled:
        """Describe a hand-over under our lease; without one it names only what the sequence borrows."""
        name = self.member.name
        segments = sequence.table_segments(name, lease)
        handle = KVHandle(self.member.node, name, "", segments, sequence.num_stored)
        return Prefilled(*sequence.key, 0, handle, self.node.clock.now)

    def _announce(self, took_part: list[Sequence]) -> None:
        for sequence in [sequence for sequence in took_part if sequence in self.engine.running]:
            for start, blocks in sequence.unannounced(self.node.layout.block_tokens):
                lease = self.node.leases.lend(self.member.name, sequence.key, self.pool, blocks)
                sequence.num_announced = start + len(blocks)
                segment = Segment(self.member.name, lease, start, blocks)
                priority: Priority = "interactive" if sequence.is_urgent else "batch"
                digests = tuple(sequence.digests)
                message = Announce(*sequence.key, sequence.ship_to, segment, sequence.num_tokens, digests, priority)
                self.node.tell_mover(message)

    def _leave(self, sequence: Sequence) -> None:
        publish(self, sequence)
        self.engine.remove(sequence)
        self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        for lease in sequence.leases:
            self.node.leases.give_back(lease)
        sequence.segments.clear()

    def _release(self, key: Key) -> None:
        sequence = self.engine.find(*key)
        if sequence is not None:
            if sequence.num_announced:  # an Announce of ours may have come after the migrator's own Release
                self.node.tell_mover(Release(*key))
            self._leave(sequence)
        self.node.leases.revoke(self.member.name, key)
        self.lease_ended(key)

    def lease_ended(self, key: Key) -> None:
        """Something that was lent for a request is ours alone again: so is what it borrowed."""
        for lease in self._behind.pop(key, ()):
            self.node.leases.give_back(lease)

    def _copy_out(self, key: Key) -> None:
        sequence = self.engine.find(*key)
        if sequence is not None and self.engine.copy_out(sequence):
            self._give_back(sequence)

    # ---- Telling --------

    @property
    def has_store(self) -> bool:
        """Say whether the node has one."""
        return self.node.config.has_store

    def tell(self, name: str, message: Message) -> bool:
        """Have the node's migrator own what we published, one message later."""
        assert name == self.migrator
        assert isinstance(message, Publish)
        self.node.clock.after(self.node.cost.control_s, self._published, message)
        return True

    def _published(self, message: Publish) -> None:
        self.node.mover.publish(self.owner, message)
        for engine in self.node.engines.values():  # what is in the store can be evicted
            if engine.engine.waiting:
                engine.wake()

    def _tell_router(self, message: Message) -> None:
        self.node.router.post(self.member.name, message)
