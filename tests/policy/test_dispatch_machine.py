"""The dispatcher under everything that can happen, in any order, late, twice and from the wrong one."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from pdactors.messages import (
    Adopted,
    Cancel,
    Decode,
    Failed,
    Finished,
    Generate,
    KVHandle,
    Lease,
    Load,
    Member,
    Prefill,
    Prefilled,
    Rejected,
    Release,
    Sampling,
)
from pdactors.policy.dispatch import MAX_ATTEMPTS, Dispatcher, Limits
from pdactors.token_ids import TokenIds

ENGINES = {"p0": ("prefill", "n0"), "p1": ("prefill", "n1"), "d0": ("decode", "n0"), "d1": ("decode", "n1")}
GATEWAYS = ["gateway", "gateway-2"]
ROOM = 2
TIMEOUT_S = 50.0
Job = tuple[str, str, int]  # engine, request, attempt

some_engine = st.sampled_from(sorted(ENGINES))
some_sender = st.sampled_from([*sorted(ENGINES), "nobody"])
some_attempt = st.integers(0, MAX_ATTEMPTS + 1)


class DispatcherMachine(RuleBasedStateMachine):
    """Plays the fleet: keeps what each engine was told, and holds every order against it."""

    names = Bundle("names")

    @initialize(
        policy=st.sampled_from(["locality", "least_loaded", "round_robin"]),
        can_migrate=st.booleans(),
        max_queue=st.integers(1, 6),
    )
    def begin(self, policy, can_migrate, max_queue):
        self.dispatcher = Dispatcher(Limits(4, 32, max_queue, TIMEOUT_S, policy, 2, can_migrate))
        self.can_migrate = can_migrate
        self.now = 0.0
        self.incarnation = 0
        self.live: set[str] = set()
        self.asked: dict[str, str] = {}  # request -> gateway, of all that were ever asked
        self.ends: Counter[str] = Counter()
        self.holding: dict[str, set[Job]] = {}  # live requests -> jobs that living engines hold for them
        self.running: set[Job] = set()  # jobs that can still answer, as their engines see them

    # ---- The fleet --------

    @rule(name=some_engine, state=st.sampled_from(["ready", "ready", "starting", "draining"]))
    def heartbeat(self, name, state):
        self.incarnation += name not in self.live
        self.live.add(name)
        role, node = ENGINES[name]
        member = Member(name, role, node, "r0", 1, self.incarnation, state)
        self.obey(self.dispatcher.joined(member, Load(max_sequences=ROOM), self.now))

    @rule(name=some_engine)
    def lose(self, name):
        self.live.discard(name)
        self.running = {job for job in self.running if job[0] != name}
        for jobs in self.holding.values():
            jobs -= {job for job in jobs if job[0] == name}
        before = dict(self.holding)
        self.obey(self.dispatcher.lost(name, self.now))
        assert not self.dispatcher.requests.assigned.get(name)
        assert all(name not in request.holders for request in self.dispatcher.requests.values())
        assert set(self.holding) <= set(before)

    @rule(gateway=st.sampled_from(GATEWAYS))
    def lose_gateway(self, gateway):
        gone = {name for name, request in self.dispatcher.requests.items() if request.gateway == gateway}
        orders = self.dispatcher.lost(gateway, self.now)
        assert not any(order.to == gateway for order in orders)
        self.ends.update(gone)
        self.obey(orders)

    @rule(seconds=st.sampled_from([0.1, 5.0, 30.0]))
    def tick(self, seconds):
        self.now += seconds
        self.obey(self.dispatcher.tick(self.now))
        for request in self.dispatcher.requests.values():
            assert self.now <= request.arrived_s + TIMEOUT_S
            assert request.ask.deadline_s is None or self.now <= request.ask.deadline_s

    # ---- The gateway --------

    @rule(
        target=names,
        gateway=st.sampled_from(GATEWAYS),
        num_tokens=st.integers(1, 33),
        priority=st.sampled_from(["interactive", "batch"]),
        deadline=st.sampled_from([None, 1.0, 20.0]),
    )
    def generate(self, gateway, num_tokens, priority, deadline):
        name = f"r{len(self.asked)}"
        self.asked[name] = gateway
        self.holding[name] = set()
        deadline_s = None if deadline is None else self.now + deadline
        ask = Generate(name, TokenIds.of([7] * num_tokens), Sampling(), priority, deadline_s)
        self.obey(self.dispatcher.generate(gateway, ask, self.now))
        return name

    @rule(name=names)
    def generate_again(self, name):
        if name in self.dispatcher.requests:
            again = Generate(name, TokenIds.of([7]), Sampling())
            self.dropping(lambda: self.dispatcher.generate(self.asked[name], again, self.now))

    @rule(name=names)
    def cancel(self, name):
        if name not in self.dispatcher.requests:
            self.dropping(lambda: self.dispatcher.cancel(Cancel(name), self.now))
            return
        self.ends[name] += 1
        self.obey(self.dispatcher.cancel(Cancel(name), self.now))
        assert name not in self.dispatcher.requests

    # ---- Engines that do as they were told --------

    @rule(data=st.data(), num_tokens=st.integers(1, 5), how=st.sampled_from(["go on", "go on", "finish", "fail"]))
    def work(self, data, num_tokens, how):
        if not self.running:
            return
        job = data.draw(st.sampled_from(sorted(self.running)))
        engine, name, attempt = job
        request = self.dispatcher.requests.get(name)
        is_current = request is not None and request.attempt == attempt and request.engine == engine
        if how == "go on":
            self.go_on(job, is_current)
            return
        self.running.discard(job)
        if is_current:
            self.ends[name] += how == "finish"
        for jobs in self.holding.values():
            jobs.discard(job)  # a finished or failed sequence lets go by itself
        if how == "finish":
            self.obey(self.dispatcher.finished(engine, Finished(name, attempt, num_tokens), self.now))
        else:
            self.obey(self.dispatcher.failed(engine, Failed(name, attempt, "model", "broken"), self.now))
        assert not is_current or name not in self.dispatcher.requests

    def go_on(self, job: Job, is_current: bool) -> None:
        engine, name, attempt = job
        if ENGINES[engine][0] == "prefill":
            self.running.discard(job)
            self.obey(self.dispatcher.prefilled(engine, self.hand_over(engine, name, attempt), self.now))
            return
        request = self.dispatcher.requests.get(name)
        was_adopting = is_current and request.stage == "adopting"
        self.obey(self.dispatcher.adopted(engine, Adopted(name, attempt)))
        assert not was_adopting or request.stage == "decoding"

    # ---- Whatever else arrives --------

    @rule(
        name=names,
        sender=some_sender,
        attempt=some_attempt,
        kind=st.sampled_from(["prefilled", "adopted", "finished", "failed"]),
    )
    def stray(self, name, sender, attempt, kind):
        """Something that no engine has a reason to say now."""
        request = self.dispatcher.requests.get(name)
        if sender in ENGINES and sender not in self.live:
            return  # the router takes nothing from the dismissed
        if request is not None and request.attempt == attempt and request.engine == sender:
            return  # not a stray
        message = {
            "prefilled": self.hand_over(sender, name, attempt),
            "adopted": Adopted(name, attempt),
            "finished": Finished(name, attempt, 1),
            "failed": Failed(name, attempt, "internal", "late"),
        }[kind]
        if kind == "adopted":
            self.dropping(lambda: self.dispatcher.adopted(sender, message))
            return
        self.dropping(lambda: getattr(self.dispatcher, kind)(sender, message, self.now), sender)

    # ---- Orders --------

    def hand_over(self, engine: str, name: str, attempt: int) -> Prefilled:
        return Prefilled(name, attempt, 9, KVHandle("n0", engine, "layout", (1,), 1, Lease(0, attempt)), self.now)

    def dropping(self, stimulus, sender: str = "") -> None:
        """Hold that a stimulus is counted, changes nothing, and gets a Release at most."""
        before = self.dispatcher.dropped.total()
        stages = {name: (r.stage, r.attempt) for name, r in self.dispatcher.requests.items()}
        orders = stimulus()
        assert self.dispatcher.dropped.total() == before + 1
        assert {name: (r.stage, r.attempt) for name, r in self.dispatcher.requests.items()} == stages
        assert all(order.to == sender and isinstance(order.message, Release) for order in orders)
        if sender in ENGINES:
            self.obey(orders)

    def obey(self, orders) -> None:
        """Give each order to its receiver and hold it against what that one can do."""
        for to, message in orders:
            if isinstance(message, Rejected):
                assert to == self.asked[message.request]
                self.ends[message.request] += 1
                continue
            assert to in self.live, f"{message} goes to {to}, which is lost"
            job = (to, message.request, message.attempt)
            if isinstance(message, Prefill | Decode):
                self.start(to, message, job)
            else:
                assert isinstance(message, Release)
                self.release(job)
        for name in [name for name in self.holding if name not in self.dispatcher.requests]:
            assert not self.holding.pop(name), f"{name} ended and somebody still holds it"

    def start(self, to: str, message: Prefill | Decode, job: Job) -> None:
        role, node = ENGINES[to]
        assert role == ("prefill" if isinstance(message, Prefill) else "decode")
        assert self.dispatcher.engines[to].member.state == "ready"
        assert not self.ends[message.request], "an ended request goes on"
        assert message.attempt <= MAX_ATTEMPTS
        if isinstance(message, Decode) and not self.can_migrate:
            assert ENGINES[message.handle.owner][1] == node
        assert job not in self.running
        self.running.add(job)
        self.holding[message.request].add(job)

    def release(self, job: Job) -> None:
        request = self.dispatcher.requests.get(job[1])
        is_live = request is not None and request.attempt == job[2] and job[0] in request.holders
        assert not is_live, f"{job} is released while it is needed"
        self.running.discard(job)
        for jobs in self.holding.values():
            jobs.discard(job)

    # ---- What always holds --------

    @invariant()
    def the_books_are_right(self):
        self.dispatcher.check()

    @invariant()
    def every_request_ends_exactly_once(self):
        for name in self.asked:
            assert self.ends[name] == (name not in self.dispatcher.requests), name

    @invariant()
    def no_engine_has_more_than_it_holds(self):
        counts: Counter[str] = Counter()
        for request in self.dispatcher.requests.values():
            counts[request.engine] += bool(request.engine)
        assert all(count <= ROOM for count in counts.values())
        assert set(counts) - {""} <= self.live

    @invariant()
    def holders_are_those_that_were_told(self):
        for name, request in self.dispatcher.requests.items():
            held = {engine for engine, _, attempt in self.holding[name] if attempt == request.attempt}
            assert held <= request.holders <= self.live

    @invariant()
    def nobody_waits_beside_free_room(self):
        """An order is given as soon as it can be."""
        counts = Counter(request.engine for request in self.dispatcher.requests.values())
        ready = {name: e for name, e in self.dispatcher.engines.items() if e.member.state == "ready"}
        free = [name for name in ready if counts[name] < ROOM]
        if self.dispatcher.requests.queued:
            assert not [name for name in free if ENGINES[name][0] == "prefill"]
        for source in self.dispatcher.requests.waiting:
            near = [n for n in free if self.can_migrate or ENGINES[n][1] == ENGINES[source][1]]
            assert not [name for name in near if ENGINES[name][0] == "decode"]


DispatcherMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestDispatcher = DispatcherMachine.TestCase
