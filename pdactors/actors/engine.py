"""What prefill, decode and worker share: an engine on the node's arena, stepped in one worker thread.

What a message asks of a sequence takes effect between two steps: no running step sees a block change hands.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdactors.actors import engine_accounts, engine_parts
from pdactors.actors.actor import GATEWAY, ROUTER, Actor
from pdactors.actors.extent_keeper import ExtentKeeper
from pdactors.actors.lending import lend_cached, tell_cache
from pdactors.actors.process import pin
from pdactors.actors.publishing import publish
from pdactors.actors.spec import ActorSpec
from pdactors.actors.stall import Stall
from pdactors.engine.model import PagedModel
from pdactors.engine.runner import Engine
from pdactors.engine.sequence import Sequence
from pdactors.engine.step import Outcome
from pdactors.errors import InvariantError, PDError, WorkerLost
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.leases import LeaseLost
from pdactors.kv.loans import Loans
from pdactors.messages import (
    CacheChanged,
    CopyOut,
    Extents,
    Failed,
    Finished,
    Load,
    Member,
    Pin,
    Prefill,
    RecallExtents,
    Release,
    Report,
    ReturnExtents,
    Segment,
    Tokens,
    WantExtents,
)
from pdactors.transport import Transport

T = TypeVar("T")

SWEEP_S = 0.05
QUIET_S = 0.02
ASK_AGAIN_S = 0.1  # for memory


class EngineActor(Actor):
    """Base of prefill, decode and worker. Children say what happens to a sequence that got a token."""

    fills_batches = True  # waits for company before a first step

    def __init__(self, spec: ActorSpec, transport: Transport, model: PagedModel) -> None:
        super().__init__(spec, transport)
        self.migrator = f"{spec.node}/migrator"
        self.arena = Arena.attach(spec.fds.arena, spec.layout)
        self.pool = BlockPool()
        self.loans = Loans(self.pool, self.arena.leases(), spec.slot, spec.incarnation, spec.config.kv.lease_s)
        self.extents = ExtentKeeper.of(spec, self.arena, self.pool, self._ask)
        self.model = model
        model.bind(self.arena.payload(), spec.layout)
        self.engine = Engine(model, self.arena, self.pool, engine_parts.limits(spec))
        self.steps = engine_parts.step_log(spec, model)
        self._thread = ThreadPoolExecutor(1, "engine", pin, (spec.cores,))
        self._commands: deque[Callable[[], None]] = deque()
        self._wake = asyncio.Event()
        self._stall = Stall(self)
        self._known_to: int | None = None  # the migrator's incarnation
        self._is_known = asyncio.Event()
        self.accept(Release, self._on_release, "router", "gateway")
        self.accept(Pin, self._on_pin, "router")
        self.accept(CopyOut, self._on_copy_out, "router")
        self.accept(Extents, self._on_extents, "migrator")
        self.accept(RecallExtents, self._on_recall, "migrator")

    # ---- For the children --------

    def took(self, outcome: Outcome) -> None:
        """Go on with a sequence that got a token, which is on its way to the gateway: here, in the next step."""

    def admitted(self, sequence: Sequence) -> None:
        """A sequence starts to run."""
        sequence.begin_s = self.clock()

    def progressed(self, sequences: list[Sequence]) -> None:
        """These sequences took part in a step; some may have been handed on or ended since."""

    async def work(self) -> bool:
        """Do something else before the next step; False if there is nothing."""
        return False

    def blocks_lacking(self) -> int:
        """How many blocks more would let everyone here go on."""
        return self.engine.blocks_lacking()

    def requests(self) -> tuple[str, ...]:
        """Those that something is done for here."""
        return tuple(s.request for s in (*self.engine.running, *self.engine.waiting))

    async def in_thread(self, action: Callable[..., T], *arguments: object) -> T:
        """Compute where steps are computed; only between them."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, action, *arguments)

    # ---- Life --------

    def wants(self, member: Member) -> bool:
        return member.role == "gateway" or member.name == self.migrator

    def router_changed(self) -> None:
        """Let go of everything: the new router knows nothing of it, and has what is still wanted begun again."""

        def let_go() -> None:
            for sequence in [*self.engine.running, *self.engine.waiting]:
                self._cut_short(sequence)
            for key in self.loans.lent_for:
                self.released(*key)
            self._sweep()

        self.command(let_go)
        self.tell(ROUTER, CacheChanged(tuple(self.pool.digests())))

    def welcomed(self, host: Member) -> None:
        if host.name == self.migrator and host.incarnation != self._known_to:
            if self._known_to is not None:
                self.extents.reconcile()
            self._known_to = host.incarnation
            self._is_known.set()

    @property
    def has_store(self) -> bool:
        """Whether there is a store, and it is heard: what is told to one that is lost goes nowhere."""
        known = (self.migrator, self._known_to)
        return self.spec.config.has_store and any((m.name, m.incarnation) == known for m in self.fleet.members)

    async def start(self) -> None:
        await self._is_known.wait()  # nothing that a predecessor said of our memory is heard from then on
        self.extents.take_over()
        ended = self.loans.take_over()
        if ended or self.pool.extents:
            self.log.info("took over from a predecessor", leases_ended=ended, extents=len(self.pool.extents))
        await self.extents.first(self.clock)
        self.every(SWEEP_S, self._sweep)
        self.every(self.spec.config.kv.lease_s / 4, lambda: self.command(self._renew))
        self.spawn(self._serve())
        self.log.info("engine ready", threads=self.spec.threads, way=self.model.description)

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- Stepping --------

    def command(self, action: Callable[[], None]) -> None:
        """Do something to the engine at the next step boundary."""
        self._commands.append(action)
        self._wake.set()

    async def _serve(self) -> None:
        engine = self.engine
        idle_since = self.clock()
        while True:
            self._wake.clear()
            self._between_steps()
            if await self.work():
                continue
            step = engine.plan()
            if step is None:
                is_empty = not engine.running and not engine.waiting
                await self._idle()
                if is_empty and self.fills_batches:
                    await self._fill_batch()
                idle_since = self.clock()
                continue
            began_s = self.clock()
            waited_s = began_s - idle_since
            try:
                result = await self.in_thread(engine.run, step)
            except InvariantError:
                raise
            except Exception as error:
                self.log.exception("step failed", sequences=len(step.portions))
                for sequence, _ in step.portions:
                    self.fail(sequence, error)
                continue
            idle_since = self.clock()
            self._stall.over()
            self.steps.add(step, result)
            engine_accounts.note_step(self.trail, step, began_s, idle_since)
            slow = self.steps.slow(step, result, waited_s, self.spec.config.engine.slow_step_ms, idle_since)
            if slow is not None:
                self.log.warning("slow decode step", **slow)
            self._publish(engine.commit(step, result))
            self.progressed([sequence for sequence, _ in step.portions])

    async def _idle(self) -> None:
        """Wait for something to do, and check the books once it is quiet: others still hurry with what we just sent.

        Whoever waits for memory asks for it again and again: what others could not spare may be free by now.
        """
        self._stall.mind()
        if await self._woken(QUIET_S):
            return
        self.check()
        is_short = self.engine.waiting or self.engine.running or self.blocks_lacking()
        await self._woken(ASK_AGAIN_S if is_short else None)

    async def _woken(self, timeout_s: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def _do_commands(self) -> None:
        while self._commands:
            self._commands.popleft()()

    def _between_steps(self) -> None:
        self._do_commands()
        for sequence in self.engine.admit():
            engine_accounts.note_admission(self.trail, sequence, self.clock())
            if sequence.num_admitted == 1:
                self.admitted(sequence)
        lacking, caches = self.blocks_lacking(), self.engine.limits.caches
        self.extents.mind(lacking, self.engine.num_unreserved, self.clock(), caches=caches)
        tell_cache(self, self.pool)

    async def _fill_batch(self) -> None:
        """Wait a moment for company (engine.batch_wait_ms) when work came to an engine that had none."""
        deadline = self.clock() + self.spec.config.engine.batch_wait_ms / 1000
        self._do_commands()
        while 0 < len(self.engine.waiting) < self.engine.limits.max_sequences and self.clock() < deadline:
            self._wake.clear()
            await self._woken(deadline - self.clock())
            self._do_commands()

    def _publish(self, outcomes: list[Outcome]) -> None:
        """Send the step's tokens in one message, then move each sequence on."""
        if not outcomes:
            return
        self.counts["sampled_tokens"] += len(outcomes)
        is_sent = self.tell(GATEWAY, Tokens(tuple(engine_accounts.token(self, outcome) for outcome in outcomes)))
        for outcome in outcomes:
            sequence = outcome.sequence
            if not is_sent:
                self.fail(sequence, PDError("its tokens cannot be sent: the gateway is gone or does not read"))
            elif outcome.finish is not None:
                self._leave(sequence)
                self.tell(ROUTER, Finished(sequence.request, sequence.attempt, len(sequence.tokens)))
            else:
                self.took(outcome)

    # ---- Sequences --------

    def take_prompt(self, _sender: Member, message: Prefill) -> None:
        """Queue a prompt; what others lend of it is accepted at once, so that it is held while the prompt waits."""
        sequence = Sequence.to_compute(message)
        sequence.received_s = self.clock()
        self.trail.note(message.request, "received", sequence.received_s, None, message.attempt)
        for segment in message.prefix:
            try:
                self.borrow(sequence, segment)
            except LeaseLost as error:  # what is lost is computed
                self.log.info("prefix lost", request=message.request, owner=segment.owner, reason=error.message)
        sequence.set_tail_apart(message.prefix_tokens, self.spec.layout.block_tokens)
        self.command(lambda: self.engine.submit(sequence))

    def borrow(self, sequence: Sequence, segment: Segment) -> None:
        """Accept a segment's lease, unless an earlier segment came under it, and let the sequence read its blocks.

        Raises:
            LeaseLost: it has ended, or does not name those blocks.
        """
        if segment.lease in sequence.leases:
            named = self.loans.named(segment.lease)
        else:
            named = self.loans.borrow(segment.lease, self.clock())
        sequence.segments.append(segment)
        if segment.blocks != named and not set(segment.blocks) <= set(named):
            raise LeaseLost(f"lease {segment.lease.index} of {segment.owner} names other blocks than the message")
        sequence.lent.update(enumerate(segment.blocks, segment.start))

    def fail(self, sequence: Sequence, error: Exception) -> None:
        """End a sequence with a reason that reaches its client."""
        self._leave(sequence)
        code = error.code if isinstance(error, PDError) else "internal"
        self.tell(ROUTER, Failed(sequence.request, sequence.attempt, code, f"{self.spec.name}: {error}"))

    def _leave(self, sequence: Sequence) -> None:
        """Let go of a sequence and everything that it holds; runs between steps, so nothing reads it any more."""
        publish(self, sequence)
        self.engine.remove(sequence)
        self.give_leases_back(sequence)
        self.trail.note(sequence.request, "left", self.clock(), None, sequence.attempt)

    def _cut_short(self, sequence: Sequence) -> None:
        """Let go of a sequence that has not ended."""
        if sequence.num_announced:  # an Announce may come after the router's own Release
            self.tell(self.migrator, Release(*sequence.key))
        self._leave(sequence)

    def _on_release(self, _sender: Member, message: Release) -> None:
        def release() -> None:
            if (sequence := self.engine.find(message.request, message.attempt)) is not None:
                self._cut_short(sequence)
            self.released(message.request, message.attempt)
            self._sweep()

        self.command(release)

    def released(self, request: str, attempt: int) -> None:
        """Let go of what outlives the sequence."""
        self.loans.revoke((request, attempt))

    def check(self) -> None:
        """Hold the books against themselves (I5); runs whenever there is nothing to do."""
        self.pool.check()
        self.loans.check()

    def lease_ended(self, request: str, attempt: int) -> None:
        """Something that was lent for a request is ours alone again."""

    # ---- Lending --------

    def _on_pin(self, _sender: Member, message: Pin) -> None:
        lend_cached(self, self.pool, self.loans, self.engine.num_reserved, message)

    def _sweep(self) -> None:
        """Take back what holders released, what was revoked, and what expired."""
        self.extents.check()
        for ended in self.loans.sweep(self.clock()):
            self._wake.set()
            self.lease_ended(ended.request, ended.attempt)
            if ended.expired:
                self.counts["leases_expired"] += 1
                self.log.warning("lease expired", request=ended.request, attempt=ended.attempt)
        if new := self.extents.unmapped():
            self.spawn(self.extents.map_ahead(new))

    def _renew(self) -> None:
        """Keep what is read; fail what was lost before it is read again."""
        if lost := self.loans.renew(self.clock()):
            for sequence in [*self.engine.running, *self.engine.waiting]:
                if lost.intersection(sequence.leases):
                    self.fail(sequence, WorkerLost("KV that it reads was taken back"))

    def _on_copy_out(self, _sender: Member, message: CopyOut) -> None:
        def copy_out() -> None:
            sequence = self.engine.find(message.request, message.attempt)
            if sequence is not None and self.engine.copy_out(sequence):
                self.give_leases_back(sequence)

        self.command(copy_out)

    def give_leases_back(self, sequence: Sequence) -> None:
        for lease in sequence.leases:
            self.loans.give_back(lease)
        sequence.segments.clear()

    # ---- Memory --------

    def _ask(self, message: WantExtents | ReturnExtents) -> None:
        """Speak of memory to a migrator that took us in; what is lost before is made good by `reconcile`.

        Sooner, what it grants would be in the table by then, and look like a grant of its predecessor that got lost.
        """
        if self.is_welcome(self.migrator):
            self.tell(self.migrator, message)
        else:
            self._introduce(self.migrator)  # again: it may not have heard us

    def _on_extents(self, _sender: Member, message: Extents) -> None:
        async def add() -> None:
            await self.extents.add(message.extents)
            self._wake.set()

        self.spawn(add())

    def _on_recall(self, _sender: Member, message: RecallExtents) -> None:
        self.command(lambda: self.extents.give_back(message.count, self.engine.num_unreserved, idle=message.idle))

    # ---- Accounts --------

    def load(self) -> Load:
        return engine_accounts.load(self)

    def report(self) -> Report:
        return engine_accounts.report(self, super().report())
