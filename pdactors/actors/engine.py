"""What prefill and decode share: an engine on the node's arena, stepped in one worker thread.

What a message asks of a sequence is queued and takes effect between two steps, so the running step never sees a block
change hands. The loop answers meanwhile.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from pdactors.actors.actor import GATEWAY, ROUTER, Actor
from pdactors.actors.spec import ActorSpec
from pdactors.engine.model import load_model
from pdactors.engine.runner import Engine, EngineLimits, Outcome, Step
from pdactors.engine.sequence import Sequence
from pdactors.errors import InvariantError, PDError
from pdactors.kv.arena import Arena
from pdactors.kv.blocks import BlockPool
from pdactors.kv.leases import Holder, Lessor
from pdactors.kv.prefix import cache_key
from pdactors.messages import (
    Extents,
    Failed,
    Finished,
    LeaseInfo,
    Load,
    Member,
    RecallExtents,
    Release,
    Report,
    ReturnExtents,
    Token,
    Tokens,
    WantExtents,
)
from pdactors.policy import extents
from pdactors.transport import Transport

SWEEP_S = 0.05
QUIET_S = 0.02
ASK_AGAIN_S = 0.1  # for memory


class EngineActor(Actor):
    """Base of prefill and decode. Children say what happens to a sequence that got a token, and to one let go."""

    prompt_only = False

    def __init__(self, spec: ActorSpec, transport: Transport) -> None:
        super().__init__(spec, transport)
        self.arena = Arena.attach(spec.fds.arena, spec.layout)
        self.pool = BlockPool()
        self.lessor = Lessor(self.arena.leases(), spec.slot, spec.incarnation)
        self.holder = Holder(self.arena.leases(), spec.slot, spec.incarnation)
        self.engine: Engine | None = None
        self.migrator = f"{spec.node}/migrator"
        per_sequence = -(-spec.layout.num_blocks(spec.model.max_model_len) // self.arena.extent_blocks)
        self._min_extents = extents.guaranteed(self.arena.num_extents, len(spec.engines_on_node), per_sequence)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._commands: deque[Callable[[Engine], None]] = deque()
        self._wake = asyncio.Event()
        self._grew = asyncio.Event()
        self._num_wanted = 0
        self._asked_s = 0.0
        self.accept(Release, self._on_release, "router", "gateway")
        self.accept(Extents, self._on_extents, "migrator")
        self.accept(RecallExtents, self._on_recall, "migrator")

    # ---- For the children --------

    @abstractmethod
    def took(self, outcome: Outcome) -> None:
        """Go on with a sequence that got a token, which is on its way to the gateway."""

    @abstractmethod
    def token(self, outcome: Outcome) -> Token:
        """Describe the token for the gateway."""

    def admitted(self, sequence: Sequence) -> None:
        """A sequence starts to run."""

    def let_go(self, sequence: Sequence) -> None:
        """Release what the engine itself does not hold for a sequence that leaves."""

    def released(self, request: str, attempt: int) -> None:
        """Release what outlives the sequence."""

    def sweep(self) -> None:
        """Called every 50 ms, and when something may have ended."""

    # ---- Life --------

    def wants(self, member: Member) -> bool:
        return member.role == "gateway" or member.name == self.migrator

    async def start(self) -> None:
        spec, config = self.spec, self.spec.config
        self._take_over()
        began = self.clock()
        self.log.info("loading model", folder=spec.model.folder, dtype=config.model.dtype)
        loop = asyncio.get_running_loop()
        folder = Path(spec.model.folder)
        model = await loop.run_in_executor(
            self._thread, lambda: load_model(folder, config.model.dtype, threads=spec.threads)
        )
        model.bind(self.arena.payload(), spec.layout)
        limits = EngineLimits(
            max_sequences=config.engine.max_batch,
            token_budget=config.engine.chunk_tokens,
            eos_ids=frozenset(spec.model.eos_ids),
            prefix_key=cache_key(spec.model.fingerprint, spec.layout.fingerprint),
            prompt_only=self.prompt_only,
        )
        self.engine = Engine(model, self.arena, self.pool, limits)
        while not self.pool.extents:
            self._want(self._min_extents)
            await self._grown()
        self.every(SWEEP_S, self.sweep)
        self.spawn(self._serve(self.engine))
        self.log.info("engine ready", seconds=round(self.clock() - began, 1), threads=spec.threads)

    def _take_over(self) -> None:
        """Continue the books of a lost predecessor in this slot."""
        ended = self.holder.end_predecessor()
        for extent in self.arena.extents_of(self.spec.slot):
            self.pool.add_extent(self.arena.blocks_of_extent(extent))
        for live in self.lessor.rebuild():
            self.pool.restore_lease(live.blocks)
            self.lessor.revoke(live.lease)
        if ended or self.pool.extents:
            self.log.info("took over from a predecessor", leases_ended=ended, extents=len(self.pool.extents))

    async def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    # ---- Stepping --------

    def command(self, action: Callable[[Engine], None]) -> None:
        """Do something to the engine at the next step boundary."""
        self._commands.append(action)
        self._wake.set()

    async def _serve(self, engine: Engine) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._wake.clear()
            while self._commands:
                self._commands.popleft()(engine)
            for sequence in engine.admit():
                self.admitted(sequence)
            self._mind_memory(engine)
            step = engine.plan()
            if step is None:
                await self._idle(engine)
                continue
            try:
                result = await loop.run_in_executor(self._thread, engine.run, step)
            except InvariantError:
                raise
            except Exception as error:
                self.log.exception("step failed", sequences=len(step.portions))
                self._fail_step(engine, step, error)
                continue
            self._publish(engine, engine.commit(step, result))

    async def _idle(self, engine: Engine) -> None:
        """Wait for something to do, and check the books once it is quiet: others still hurry with what we just sent.

        Whoever waits for memory asks for it again and again: what others could not spare may be free by now.
        """
        if await self._woken(QUIET_S):
            return
        self.check()
        await self._woken(ASK_AGAIN_S if engine.waiting else None)

    async def _woken(self, timeout_s: float | None) -> bool:
        try:
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        except TimeoutError:
            return False
        return True

    def _publish(self, engine: Engine, outcomes: list[Outcome]) -> None:
        """Send the step's tokens in one message, then move each sequence on."""
        if not outcomes:
            return
        is_sent = self.tell(GATEWAY, Tokens(tuple(self.token(outcome) for outcome in outcomes)))
        for outcome in outcomes:
            sequence = outcome.sequence
            if not is_sent:
                self.fail(engine, sequence, PDError("its tokens cannot be sent: the gateway is gone or does not read"))
            elif outcome.finish is not None:
                self.leave(engine, sequence)
                self.tell(ROUTER, Finished(sequence.request, sequence.attempt, len(sequence.tokens)))
            else:
                self.took(outcome)

    def _fail_step(self, engine: Engine, step: Step, error: Exception) -> None:
        for sequence, _ in step.portions:
            self.fail(engine, sequence, error)

    def fail(self, engine: Engine, sequence: Sequence, error: Exception) -> None:
        """End a sequence with a reason that reaches its client."""
        self.leave(engine, sequence)
        code = error.code if isinstance(error, PDError) else "internal"
        self.tell(ROUTER, Failed(sequence.request, sequence.attempt, code, f"{self.spec.name}: {error}"))

    def leave(self, engine: Engine, sequence: Sequence) -> None:
        """Let go of a sequence and everything that it holds."""
        self.let_go(sequence)
        engine.remove(sequence)

    def _on_release(self, _sender: Member, message: Release) -> None:
        def release(engine: Engine) -> None:
            sequence = engine.find(message.request, message.attempt)
            if sequence is not None:
                self.leave(engine, sequence)

        self.released(message.request, message.attempt)
        self.command(release)

    def check(self) -> None:
        """Hold the books against themselves (I5); runs whenever there is nothing to do."""
        self.pool.check()
        self.lessor.check()

    # ---- Memory --------

    def _mind_memory(self, engine: Engine) -> None:
        """Ask for extents before they are missed."""
        lacking = engine.blocks_lacking()
        wanted = -(-lacking // self.arena.extent_blocks)
        if not wanted and engine.num_unreserved < self.arena.extent_blocks // 2:
            wanted = 1
        if wanted and (wanted != self._num_wanted or self.clock() - self._asked_s >= ASK_AGAIN_S):
            self._want(wanted)

    def _want(self, count: int) -> None:
        self._num_wanted, self._asked_s = count, self.clock()
        self.tell(self.migrator, WantExtents(count))

    async def _grown(self) -> None:
        """Wait for memory, at most until it is time to ask again."""
        self._grew.clear()
        try:
            async with asyncio.timeout(0.2):
                await self._grew.wait()
        except TimeoutError:
            pass

    def _on_extents(self, _sender: Member, message: Extents) -> None:
        self.spawn(self._add(message.extents))

    async def _add(self, granted: tuple[int, ...]) -> None:
        """Have the memory backed, then use it."""
        for extent in granted:
            await asyncio.to_thread(self.arena.populate, extent)
            blocks = self.arena.blocks_of_extent(extent)
            if self.arena.extent_owner(extent) == self.spec.slot and blocks not in self.pool.extents:
                self.pool.add_extent(blocks)
        self._num_wanted = 0
        self._grew.set()
        self._wake.set()

    def _on_recall(self, _sender: Member, message: RecallExtents) -> None:
        def give_back(engine: Engine) -> None:
            returned = []
            for blocks in self.pool.removable_extents()[: message.count]:
                if len(self.pool.extents) <= self._min_extents or engine.num_unreserved < len(blocks):
                    break
                self.pool.remove_extent(blocks)
                returned.append(blocks.start // self.arena.extent_blocks)
            if returned:
                self.tell(self.migrator, ReturnExtents(tuple(returned)))

        self.command(give_back)

    # ---- Accounts --------

    def load(self) -> Load:
        engine, spec = self.engine, self.spec
        if engine is None:
            return Load()
        most = extents.reachable(self.arena.num_extents, len(spec.engines_on_node), self._min_extents)
        return Load(
            running=len(engine.running),
            waiting=len(engine.waiting),
            pending_tokens=sum(s.num_pending for s in (*engine.running, *engine.waiting) if s.is_prompt),
            max_sequences=spec.config.engine.max_batch,
            max_blocks=most * self.arena.extent_blocks,
            blocks=self.pool.account(),
            step_ms=engine.step_times(),
        )

    def report(self) -> Report:
        engine, names = self.engine, self.spec.engines_on_node
        sequences = [*engine.running, *engine.waiting] if engine else []
        given = [
            LeaseInfo(
                lessor=self.spec.name,
                holder=names[lease.holder_slot] if lease.holder_slot is not None else "",
                request=lease.request,
                attempt=lease.attempt,
                num_blocks=len(lease.blocks),
                expires_s=round(lease.expires_s - self.clock(), 3),
            )
            for lease in self.lessor.live()
        ]
        faults = []
        try:
            self.check()
        except InvariantError as error:
            faults.append(error.message)
        return msgspec.structs.replace(
            super().report(),
            requests=tuple(s.request for s in sequences),
            leases=tuple(given),
            faults=tuple(faults),
        )
