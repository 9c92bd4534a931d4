"""Several engines over one arena: whatever happens, answers are right and every block and lease comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pdactors.engine.limits import EngineLimits
from pdactors.engine.sequence import Sequence
from pdactors.engine.step import Outcome
from pdactors.kv.arena import Arena
from pdactors.kv.layout import KVLayout
from pdactors.kv.leases import MARGIN_S
from pdactors.kv.loans import Loans
from pdactors.kv.prefix import chain
from pdactors.messages import KVHandle, Lease, Sampling, Segment

BLOCK = 4
LAYOUT = KVLayout(num_layers=2, num_kv_heads=1, head_dim=2, block_tokens=BLOCK, dtype="float32")
NUM_UNITS = 3
NUM_BLOCKS = 10  # of each engine
LONGEST = 21  # tokens of a prompt; with 12 generated ones it needs 8 blocks
LEASE_S = 30.0

units = st.integers(0, NUM_UNITS - 1)


@dataclass
class Ask:
    """A request, which engines serve it, and in which order others are asked for its beginning."""

    length: int
    seed: int
    count: int
    prefill: int
    decode: int
    lenders: list[int]
    is_urgent: bool
    saves_kv: bool


asks = st.builds(
    Ask,
    length=st.integers(1, LONGEST) | st.integers(LONGEST - 6, LONGEST),
    seed=st.integers(0, 1),
    count=st.integers(1, 12),
    prefill=units,
    decode=units,
    lenders=st.permutations(range(NUM_UNITS)),
    is_urgent=st.booleans(),
    saves_kv=st.booleans(),
)


@dataclass
class Unit:
    """An engine with its loans, and what it does around them like its actor."""

    name: str
    rig: object
    loans: Loans
    ballast: list[int] = field(default_factory=list)  # blocks that something else uses
    behind: dict[tuple[str, int], set[Lease]] = field(default_factory=dict)  # of sequences that were handed over

    def __post_init__(self) -> None:
        forward = self.rig.model.forward

        def checked(batch: object) -> object:
            lent = {block for live in self.loans.live() for block in live.blocks}
            for span in batch.spans:
                first = (span.context_len - span.num_tokens) // BLOCK
                written = set(span.blocks[first : -(-span.context_len // BLOCK)])
                assert not written & lent, "what is lent is written"
                assert all(map(self.rig.pool.owns, written)), "what is borrowed is written"
            return forward(batch)

        self.rig.model.forward = checked

    @property
    def engine(self) -> object:
        return self.rig.engine

    def leave(self, sequence: Sequence) -> None:
        self.engine.remove(sequence)
        self.give_back(sequence)

    def give_back(self, sequence: Sequence) -> None:
        for lease in sequence.leases:
            self.loans.give_back(lease)
        sequence.segments.clear()

    def borrow(self, sequence: Sequence, segment: Segment, now: float) -> None:
        if segment.lease not in sequence.leases:
            self.loans.borrow(segment.lease, now)
        sequence.segments.append(segment)
        sequence.lent.update(enumerate(segment.blocks, segment.start))

    def sweep(self, now: float) -> None:
        for ended in self.loans.sweep(now):
            self.let_go((ended.request, ended.attempt))

    def let_go(self, key: tuple[str, int]) -> None:
        for lease in self.behind.pop(key, ()):
            self.loans.give_back(lease)

    def relieve(self) -> bool:
        """Have one sequence do without what others lend, when nothing has room for its next step."""
        sequence = self.engine.give_way()
        if sequence is not None:
            self.give_back(sequence)
        return sequence is not None


@dataclass
class Request:
    prompt: tuple[int, ...]
    count: int
    decode: Unit


class NodeMachine(RuleBasedStateMachine):
    def __init__(self, build: Callable[..., object]) -> None:
        super().__init__()
        self._build = build

    @initialize(token_budget=st.integers(4, 20), max_sequences=st.integers(2, 4))
    def start(self, token_budget: int, max_sequences: int) -> None:
        self.arena = Arena.create(
            LAYOUT,
            NUM_UNITS * NUM_BLOCKS,
            extent_blocks=NUM_BLOCKS,
            num_slots=NUM_UNITS,
            leases_per_slot=64,
            max_lease_blocks=NUM_BLOCKS,
        )
        self.now = 0.0
        self.units = []
        for slot in range(NUM_UNITS):
            limits = EngineLimits(max_sequences, token_budget, frozenset(), prefix_key=b"key")
            rig = self._build(self.arena, range(slot * NUM_BLOCKS, (slot + 1) * NUM_BLOCKS), limits)
            self.units.append(Unit(f"u{slot}", rig, Loans(rig.pool, self.arena.leases(), slot, 1, LEASE_S)))
        self.requests: dict[str, Request] = {}
        self.done: dict[str, list[int]] = {}

    # ---- What the router does --------

    @rule(asks=st.lists(asks, min_size=1, max_size=4))
    def submit(self, asks: list[Ask]) -> None:
        for ask in asks:
            self.submit_one(ask)

    def submit_one(self, ask: Ask) -> None:
        """Send a prompt to one engine; what others have of it, they lend."""
        name, target = str(len(self.requests)), self.units[ask.prefill]
        prompt = target.rig.prompt(ask.length, ask.seed)
        self.requests[name] = Request(prompt, ask.count, self.units[ask.decode])
        sampling = Sampling(max_tokens=ask.count)
        sequence = Sequence(name, 1, prompt, sampling, is_urgent=ask.is_urgent, saves_kv=ask.saves_kv)
        digests = chain(prompt[: (ask.length - 1) // BLOCK * BLOCK], BLOCK, b"key")
        start = next((i for i, d in enumerate(digests) if target.rig.pool.cached(d) is None), len(digests))
        for lender in (self.units[which] for which in ask.lenders if which != ask.prefill):
            blocks = lender.rig.pool.match(digests[start:])
            while lender.engine.num_unreserved < 0:  # they were set aside
                lender.rig.pool.free([blocks.pop()])
            if blocks:
                lease = lender.loans.lend(sequence.key, blocks, self.now)
                lender.rig.pool.free(blocks)
                target.borrow(sequence, Segment(lender.name, lease, start, tuple(blocks)), self.now)
                start += len(blocks)
        target.engine.submit(sequence)

    def end(self, key: tuple[str, int]) -> None:
        """Have everybody let go of a request."""
        for unit in self.units:
            if (sequence := unit.engine.find(*key)) is not None:
                unit.leave(sequence)
            unit.loans.revoke(key)
            unit.let_go(key)

    @precondition(lambda self: self.alive())
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.end((data.draw(st.sampled_from(self.alive())), 1))

    def alive(self) -> list[str]:
        return [s.request for unit in self.units for s in (*unit.engine.running, *unit.engine.waiting)]

    # ---- What engines do --------

    @rule(count=st.integers(1, 9))
    def step(self, count: int) -> None:
        for _ in range(count):
            for unit in self.units:
                self.step_once(unit)

    @rule(which=units)
    def step_one(self, which: int) -> None:
        self.step_once(self.units[which])

    def step_once(self, unit: Unit) -> bool:
        unit.sweep(self.now)
        step = unit.rig.plan()
        if step is None:
            return False
        for outcome in unit.engine.commit(step, unit.engine.run(step)):
            self.took(unit, outcome)
        return True

    def took(self, unit: Unit, outcome: Outcome) -> None:
        sequence = outcome.sequence
        if outcome.finish is not None:
            self.done[sequence.request] = sequence.tokens
            self.end(sequence.key)
        elif self.requests[sequence.request].decode is not unit:
            self.hand_over(unit, sequence)

    def hand_over(self, unit: Unit, sequence: Sequence) -> None:
        lease = unit.loans.lend(sequence.key, sequence.own_blocks, self.now)
        segments = sequence.table_segments(unit.name, lease)
        handle = KVHandle("n0", unit.name, LAYOUT.fingerprint, segments, sequence.num_stored)
        unit.behind[sequence.key] = sequence.leases
        unit.engine.remove(sequence)
        self.adopt(sequence, handle)

    def adopt(self, prefilled: Sequence, handle: KVHandle) -> None:
        request = self.requests[prefilled.request]
        unit, sampling = request.decode, prefilled.sampling
        sequence = Sequence(
            *prefilled.key,
            request.prompt,
            sampling,
            is_urgent=prefilled.is_urgent,
            saves_kv=prefilled.saves_kv,
            handle=handle,
            tokens=list(prefilled.tokens),
        )
        for segment in handle.segments:
            if segment.owner == handle.owner:
                unit.borrow(sequence, segment, self.now)
            elif segment.owner == unit.name:
                assert unit.loans.is_lent(sequence.key, segment.lease)
                unit.rig.pool.retain(segment.blocks)
                sequence.kept.update(enumerate(segment.blocks, segment.start))
        sequence.set_tail_apart(handle.num_tokens, BLOCK)
        unit.engine.submit(sequence)

    @rule(which=units, data=st.data())
    def copy_out(self, which: int, data: st.DataObject) -> None:
        unit = self.units[which]
        if running := unit.engine.running:
            sequence = data.draw(st.sampled_from(running))
            if unit.engine.copy_out(sequence):
                unit.give_back(sequence)

    @rule(which=units)
    def strip(self, which: int) -> None:
        self.units[which].relieve()

    @rule(which=units, count=st.integers(1, NUM_BLOCKS))
    def squeeze(self, which: int, count: int) -> None:
        """Take memory away, so that what runs has to make room."""
        unit = self.units[which]
        unit.ballast += unit.rig.pool.allocate(min(count, unit.engine.num_unreserved))

    @rule(which=units)
    def relax(self, which: int) -> None:
        unit = self.units[which]
        unit.rig.pool.free(unit.ballast)
        unit.ballast = []

    @rule()
    def pass_time(self) -> None:
        self.now += LEASE_S - 2 * MARGIN_S
        for unit in self.units:
            assert unit.loans.renew(self.now) == set()

    # ---- What always holds --------

    @invariant()
    def the_books_are_right(self) -> None:
        for unit in getattr(self, "units", []):
            unit.rig.check()
            unit.loans.check()
            account = unit.rig.pool.account()
            assert account.free + account.cached + account.used + account.leased_out == account.total == NUM_BLOCKS
            sequences = (*unit.engine.running, *unit.engine.waiting)
            held = {lease for s in sequences for lease in s.leases}.union(*unit.behind.values())
            assert unit.loans.borrowed == held
            named = {block for live in unit.loans.live() for block in live.blocks}
            named |= {b for s in sequences for b in (*s.own_blocks, *s.kept.values())} | set(unit.ballast)
            assert unit.rig.pool.num_available == NUM_BLOCKS - len(named)

    def teardown(self) -> None:
        """Run until everything is answered."""
        if not hasattr(self, "units"):
            return
        for which in range(NUM_UNITS):
            self.relax(which)
        num_idle = 0
        for _ in range(2000):
            if not self.alive():
                break
            num_moved = sum(map(self.step_once, self.units))
            num_idle = 0 if num_moved else num_idle + 1
            if num_idle == 2:  # what was given back in the first round could be used in the second
                num_idle = 0
                num_relieved = sum(map(Unit.relieve, self.units))
                assert num_relieved, f"everybody waits for somebody, for ever:\n{self.describe()}"
        assert self.alive() == []
        self.check_the_end()
        self.arena.close()

    def describe(self) -> str:
        return "\n".join(
            f"{unit.name}: {unit.rig.pool.account()} behind {unit.behind}, lends {unit.loans.live()}\n"
            + f"  running {unit.engine.running}\n  waiting {unit.engine.waiting}"
            for unit in self.units
        )

    def check_the_end(self) -> None:
        for name, tokens in self.done.items():
            request = self.requests[name]
            assert tokens == self.units[0].rig.answer(request.prompt, request.count)
        for _ in range(2):
            self.now += 1.0
            for unit in self.units:
                unit.sweep(self.now)
        for unit in self.units:
            unit.rig.check()
            assert (unit.loans.live(), unit.loans.borrowed, unit.behind) == ([], frozenset(), {})
            assert unit.rig.is_empty()


def test_whatever_happens_answers_are_right_and_everything_comes_back(build_rig: Callable[..., object]) -> None:
    run_state_machine_as_test(
        lambda: NodeMachine(build_rig),
        settings=settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True),
    )
