"""The dispatcher under everything that can happen, in any order, late, twice and from the wrong one."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule

from pdactors.kv.prefix import chain
from pdactors.messages import (
    Adopted,
    Blocks,
    CacheChanged,
    Cancel,
    CopyOut,
    Decode,
    Failed,
    Finished,
    Generate,
    KVHandle,
    Lease,
    Load,
    Member,
    Migrate,
    Migrated,
    Pin,
    Pinned,
    Prefill,
    Prefilled,
    Rejected,
    Release,
    Resume,
    Sampling,
    Segment,
    Stranded,
)
from pdactors.policy.borrowing import PIN_TIMEOUT_S, PULL_TIMEOUT_S
from pdactors.policy.dispatch import Dispatcher, Limits
from pdactors.policy.retries import ASK_AGAIN_S, MAX_ATTEMPTS, backoff_s
from pdactors.token_ids import TokenIds

ENGINES = {
    "p0": ("prefill", "n0"),
    "p1": ("prefill", "n1"),
    "d0": ("decode", "n0"),
    "d1": ("decode", "n1"),
    "d2": ("decode", "n0"),
    "w0": ("worker", "n0"),
    "w1": ("worker", "n0"),
}
MIGRATORS = {"m0": "n0", "m1": "n1"}
NODE = {name: node for name, (_, node) in ENGINES.items()} | MIGRATORS
FIRST = {"prefill", "worker"}
GATEWAYS = ["gateway", "gateway-2"]
ROOM = 2
TIMEOUT_S = 50.0
BLOCK, KEY = 4, b"key"
FAMILIES = {family: chain([family] * 31, BLOCK, KEY) for family in (7, 8)}  # prompts with a common beginning
Job = tuple[str, str, int]  # engine, request, attempt

some_engine = st.sampled_from(sorted(ENGINES))
some_migrator = st.sampled_from(sorted(MIGRATORS))
somebody = st.sampled_from(sorted(NODE))
some_sender = st.sampled_from([*sorted(NODE), "nobody"])
some_attempt = st.integers(0, MAX_ATTEMPTS + 1)
seldom = st.sampled_from([False, False, False, True])  # so that most requests live through more than their beginning


class DispatcherMachine(RuleBasedStateMachine):
    """Plays the fleet: keeps what each engine was told, and holds every order against it."""

    names = Bundle("names")

    @initialize(
        policy=st.sampled_from(["locality", "least_loaded", "round_robin"]),
        transport=st.sampled_from(["lease", "auto", "auto", "ucx"]),
        overlaps=st.booleans(),
        max_queue=st.integers(1, 6),
        fleet=st.one_of(
            st.sets(somebody),
            st.sampled_from([{"p0", "p1", "d0", "d1", "d2", "m0", "m1"}, {"p0", "d1", "m0", "m1"}, {"w0", "w1"}]),
        ),
        cached=st.dictionaries(somebody, st.integers(1, 7)),
        local=st.sampled_from([0, 0, 6, 33]),
        pulls=st.booleans(),
    )
    def begin(self, policy, transport, overlaps, max_queue, fleet, cached, local, pulls):
        data_transport = "" if transport == "lease" else "ucx"
        limits = Limits(
            BLOCK, 32, max_queue, TIMEOUT_S, KEY, policy, 2, transport, overlaps, data_transport,
            local_prefill_tokens=local, pulls=pulls and bool(data_transport),
        )  # fmt: skip
        self.local = local
        self.dispatcher = Dispatcher(limits)
        self.transport = transport
        self.now = 0.0
        self.incarnation = 0
        self.live: set[str] = set()
        self.asked: dict[str, str] = {}  # request -> gateway, of all that were ever asked
        self.ends: Counter[str] = Counter()
        self.holding: dict[str, set[Job]] = {}  # live requests -> jobs that living engines hold for them
        self.running: set[Job] = set()  # jobs that can still answer, as their engines see them
        self.pins: list[tuple[str, Pin]] = []  # asked and not answered, by living owners
        self.lending: set[Job] = set()  # what living owners keep for a request
        self.lent: dict[tuple[str, int], list[Segment]] = {}  # (request, attempt) -> what was answered in time
        self.starving: str = ""  # the engine whose heartbeat said that it lacks what it lends
        self.copied: set[str] = set()
        self.questions: list[tuple[str, Resume]] = []  # that gateways were asked, and may answer more than once
        self.generated: dict[str, int] = {}  # how many tokens the client had when the attempt began
        self.moving: dict[tuple[str, int], tuple[str, str]] = {}  # what is on its way: source, destination
        self.pulled: dict[tuple[str, int], tuple[str, str]] = {}  # beginnings of prompts on their way
        self.arrived: dict[tuple[str, int], KVHandle] = {}
        for name in sorted(fleet):
            if name in MIGRATORS:
                self.migrator_ready(name)
            else:
                self.heartbeat(name, "ready", 0, 0, 50)
        for name, count in cached.items():
            self.dispatcher.cache_changed(name, CacheChanged(tuple(FAMILIES[7][:count])))

    # ---- The fleet --------

    @rule(
        name=some_engine,
        state=st.sampled_from(["ready", "ready", "ready", "starting", "draining"]),
        lacking=st.sampled_from([0, 3]),
        leased=st.sampled_from([0, 5]),
        free=st.sampled_from([0, 50]),
    )
    def heartbeat(self, name, state, lacking, leased, free):
        self.incarnation += name not in self.live
        self.live.add(name)
        role, node = ENGINES[name]
        member = Member(name, role, node, "r0", 1, self.incarnation, state=state)
        load = Load(max_sequences=ROOM, blocks=Blocks(free=free, leased_out=leased), blocks_lacking=lacking)
        self.starving = name if lacking and leased else ""
        self.obey(self.dispatcher.joined(member, load, self.now))
        self.starving = ""

    @precondition(lambda self: any(r.stage == "decoding" for r in self.dispatcher.requests.values()))
    @rule(data=st.data())
    def starve(self, data):
        """A prefill lacks what it lends."""
        lenders = {r.prefill for r in self.dispatcher.requests.values() if r.stage == "decoding"} & self.live
        if lenders:
            name = data.draw(st.sampled_from(sorted(lenders)))
            self.heartbeat(name, self.dispatcher.fleet.engines[name].member.state, 3, 5, 50)

    @rule(name=some_migrator)
    def migrator_ready(self, name):
        self.incarnation += name not in self.live
        self.live.add(name)
        member = self.dispatcher.fleet.migrators.get(NODE[name])
        member = member or Member(name, "migrator", NODE[name], "r0", 1, self.incarnation, state="ready")
        self.obey(self.dispatcher.migrator_ready(member, self.now))

    @rule(name=somebody, family=st.sampled_from(sorted(FAMILIES)), data=st.data())
    def cache_changes(self, name, family, data):
        digests = FAMILIES[family]
        added, evicted = (digests[: data.draw(st.integers(0, 7))], digests[data.draw(st.integers(1, 7)) :])
        self.dispatcher.cache_changed(name, CacheChanged(tuple(added), tuple(evicted)))
        if name not in self.live:
            assert not self.dispatcher.fleet.index.num_known(digests, {name})

    @rule(name=some_engine)
    def retire(self, name):
        """A drained engine is ended when no request needs it: none of them notices."""
        engine = self.dispatcher.fleet.engines.get(name)
        if engine is None or engine.member.state != "draining" or not self.dispatcher.is_idle(name):
            return
        assert not [job for jobs in self.holding.values() for job in jobs if job[0] == name]
        assert not [job for job in self.lending if job[0] == name]
        before = {name: (r.stage, r.attempt) for name, r in self.dispatcher.requests.items()}
        self.lose(name)
        assert {name: (r.stage, r.attempt) for name, r in self.dispatcher.requests.items()} == before

    @rule(name=somebody, happens=seldom)
    def lose(self, name, happens=True):
        if not happens:
            return
        self.live.discard(name)
        self.running = {job for job in self.running if job[0] != name}
        self.lending = {job for job in self.lending if job[0] != name}
        self.pins = [(owner, pin) for owner, pin in self.pins if owner != name]
        self.moving = {key: movers for key, movers in self.moving.items() if name not in movers}
        self.pulled = {key: movers for key, movers in self.pulled.items() if name not in movers}
        for jobs in self.holding.values():
            jobs -= {job for job in jobs if job[0] == name}
        before = dict(self.holding)
        self.obey(self.dispatcher.lost(name, self.now))
        assert not self.dispatcher.requests.assigned.get(name)
        assert all(name not in request.holders for request in self.dispatcher.requests.values())
        assert all(name not in (*r.pins.values(), *r.pull) for r in self.dispatcher.requests.values())
        assert set(self.holding) <= set(before)
        assert all(r.stage != "migrating" or name not in r.movers for r in self.dispatcher.requests.values())
        assert not any(self.dispatcher.fleet.index.num_known(digests, {name}) for digests in FAMILIES.values())

    @rule(gateway=st.sampled_from(GATEWAYS), happens=seldom)
    def lose_gateway(self, gateway, happens):
        if not happens:
            return
        gone = {name for name, request in self.dispatcher.requests.items() if request.gateway == gateway}
        orders = self.dispatcher.lost(gateway, self.now)
        assert not any(order.to == gateway for order in orders)
        self.ends.update(gone)
        self.obey(orders)

    @rule(seconds=st.sampled_from([0.1, 0.1, 0.6, 5.0, 30.0]))
    def tick(self, seconds):
        self.now += seconds
        self.obey(self.dispatcher.tick(self.now))
        for request in self.dispatcher.requests.values():
            assert self.now <= request.arrived_s + TIMEOUT_S
            assert request.ask.deadline_s is None or self.now <= request.ask.deadline_s
            patience_s = PULL_TIMEOUT_S if request.pull else PIN_TIMEOUT_S
            assert request.stage != "pinning" or self.now <= request.pinned_s + patience_s
            pause = max(ASK_AGAIN_S, backoff_s(request.attempt))
            assert request.stage != "resuming" or self.now < request.resume_s <= self.now + pause

    # ---- The gateway --------

    @rule(
        target=names,
        gateway=st.sampled_from(GATEWAYS),
        num_tokens=st.integers(1, 33),
        family=st.sampled_from(sorted(FAMILIES)),
        priority=st.sampled_from(["interactive", "batch"]),
        deadline=st.sampled_from([None, None, 1.0, 20.0]),
        count=st.integers(1, 4),
    )
    def generate(self, gateway, num_tokens, family, priority, deadline, count):
        made = [f"r{len(self.asked) + i}" for i in range(count)]
        for name in made:
            self.asked[name] = gateway
            self.holding[name] = set()
            deadline_s = None if deadline is None else self.now + deadline
            ask = Generate(name, TokenIds.of([family] * num_tokens), Sampling(), priority, deadline_s)
            self.obey(self.dispatcher.generate(gateway, ask, self.now))
        return multiple(*made)

    @rule(name=names)
    def generate_again(self, name):
        if name in self.dispatcher.requests:
            again = Generate(name, TokenIds.of([7]), Sampling())
            self.dropping(lambda: self.dispatcher.generate(self.asked[name], again, self.now))

    @precondition(lambda self: self.questions)
    @rule(data=st.data(), count=st.integers(0, 4), again=seldom, is_over=seldom)
    def resume(self, data, count, again, is_over):
        """A gateway says how far an answer is, in time, late or twice; or that it ended with what came last."""
        question = data.draw(st.sampled_from(self.questions))
        if not again:
            self.questions.remove(question)
        gateway, asked = question
        request = self.dispatcher.requests.get(asked.request)
        if request is not None and is_over:
            self.cancel(asked.request, True)
            return
        message = Resume(asked.request, asked.attempt, TokenIds.of([9] * count))
        if request is None or (request.stage, request.attempt) != ("resuming", asked.attempt):
            self.dropping(lambda: self.dispatcher.resume(gateway, message, self.now))
            return
        self.generated[asked.request] = count
        self.obey(self.dispatcher.resume(gateway, message, self.now))
        assert request.stage != "resuming"
        assert request.attempt == asked.attempt

    @rule(name=names, happens=seldom)
    def cancel(self, name, happens):
        if not happens:
            return
        if name not in self.dispatcher.requests:
            self.dropping(lambda: self.dispatcher.cancel(Cancel(name), self.now))
            return
        self.ends[name] += 1
        self.obey(self.dispatcher.cancel(Cancel(name), self.now))
        assert name not in self.dispatcher.requests

    # ---- Engines that do as they were told --------

    @precondition(lambda self: self.running)
    @rule(
        data=st.data(), num_tokens=st.integers(1, 5), how=st.sampled_from(["go on", "go on", "finish", "fail", "lose"])
    )
    def work(self, data, num_tokens, how):
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
        if how == "lose":  # what it read was taken back
            self.obey(self.dispatcher.failed(engine, Failed(name, attempt, "worker_lost", "a lease ended"), self.now))
            assert not is_current or name not in self.dispatcher.requests or request.attempt == attempt + 1
            return
        if how == "finish":
            self.obey(self.dispatcher.finished(engine, Finished(name, attempt, num_tokens), self.now))
        else:
            self.obey(self.dispatcher.failed(engine, Failed(name, attempt, "model", "broken"), self.now))
        assert not is_current or name not in self.dispatcher.requests

    @precondition(lambda self: self.running)
    @rule()
    def all_work(self):
        for job in sorted(self.running):
            request = self.dispatcher.requests.get(job[1])
            self.go_on(job, request is not None and request.attempt == job[2] and request.engine == job[0])

    def go_on(self, job: Job, is_current: bool) -> None:
        engine, name, attempt = job
        if ENGINES[engine][0] == "worker":
            return  # it says nothing before the end
        if ENGINES[engine][0] == "prefill":
            self.running.discard(job)
            self.obey(self.dispatcher.prefilled(engine, self.hand_over(engine, name, attempt), self.now))
            return
        request = self.dispatcher.requests.get(name)
        if is_current and request.stage == "prefilling":
            return  # it has the prompt to compute itself, and says nothing before the end
        was_adopting = is_current and request.stage == "adopting"
        self.obey(self.dispatcher.adopted(engine, Adopted(name, attempt)))
        assert not was_adopting or request.stage == "decoding"

    # ---- Migrators that do as they were told --------

    @precondition(lambda self: self.moving)
    @rule(data=st.data(), arrives=st.sampled_from([True, True, False]))
    def move(self, data, arrives):
        """KV arrives where it is to go, or its source gives it up."""
        key = data.draw(st.sampled_from(sorted(self.moving)))
        source, target = self.moving.pop(key)
        request = self.dispatcher.requests[key[0]]
        assert (request.stage, request.attempt, request.movers) == ("migrating", key[1], (source, target))
        if arrives:
            message = self.arrival(target, *key)
            self.arrived[key] = message.handle
            self.obey(self.dispatcher.migrated(target, message, self.now))
            assert request.stage == "adopting"
        else:
            self.obey(self.dispatcher.stranded(source, Stranded(*key, "it broke"), self.now))
            again = self.dispatcher.requests.get(key[0])
            assert again is None or again.attempt == key[1] + 1

    @precondition(lambda self: self.pulled)
    @rule(data=st.data(), arrives=st.sampled_from([True, True, False]))
    def pull(self, data, arrives):
        """A prompt's beginning arrives from the other node, or its source gives it up; perhaps nobody waits for it."""
        key = data.draw(st.sampled_from(sorted(self.pulled)))
        source, target = self.pulled.pop(key)
        request = self.dispatcher.requests.get(key[0])
        is_awaited = request is not None and request.attempt == key[1] and request.pull == (source, target)
        if arrives:
            sender, message, tell = target, self.arrival(target, *key), self.dispatcher.migrated
        else:
            sender, message, tell = source, Stranded(*key, "it broke"), self.dispatcher.stranded
        if not is_awaited:
            self.dropping(lambda: tell(sender, message, self.now), sender)
            return
        if arrives:
            self.lent[key] = list(message.handle.segments)
        self.obey(tell(sender, message, self.now))
        assert request.stage == ("prefilling" if arrives or not request.pins else "pinning")

    @precondition(lambda self: self.pins)
    @rule(data=st.data(), again=seldom)
    def answer(self, data, again):
        """An owner's answer arrives: all that it was asked for, less, or nothing; in time, late, or twice."""
        owner, pin = data.draw(st.sampled_from(self.pins))
        if not again:
            self.pins.remove((owner, pin))
        count = data.draw(st.integers(0, len(pin.digests)))
        segment = Segment(owner, Lease(pin.start, 1), pin.start, tuple(range(count))) if count else None
        message = Pinned(pin.request, pin.attempt, pin.start, segment)
        request = self.dispatcher.requests.get(pin.request)
        is_current = request is not None and request.attempt == pin.attempt and request.stage == "pinning"
        if not is_current or request.pins.get(pin.start) != owner:
            self.dropping(lambda: self.dispatcher.pinned(owner, message, self.now), owner)
            return
        if segment is not None and not request.pull:  # what is brought is read there
            self.lent.setdefault((pin.request, pin.attempt), []).append(segment)
        self.obey(self.dispatcher.pinned(owner, message, self.now))
        assert (request.stage == "pinning") == bool(request.pins)

    # ---- Whatever else arrives --------

    @rule(
        name=names,
        sender=some_sender,
        attempt=some_attempt,
        kind=st.sampled_from(
            ["prefilled", "adopted", "finished", "failed", "pinned", "migrated", "stranded", "resume"]
        ),
        start=st.integers(0, 7),
    )
    def stray(self, name, sender, attempt, kind, start):
        """Something that no engine has a reason to say now."""
        request = self.dispatcher.requests.get(name)
        if sender in NODE and sender not in self.live:
            return  # the router takes nothing from the dismissed
        is_current = request is not None and request.attempt == attempt
        if is_current and (request.engine == sender or request.pins.get(start) == sender or sender in request.pull):
            return  # not a stray
        if is_current and request.stage == "migrating" and sender in request.movers:
            return
        message = {
            "pinned": Pinned(name, attempt, start, Segment(sender, Lease(0, 9), start, (1,))),
            "prefilled": self.hand_over(sender, name, attempt),
            "adopted": Adopted(name, attempt),
            "finished": Finished(name, attempt, 1),
            "failed": Failed(name, attempt, "internal", "late"),
            "resume": Resume(name, attempt),
            "migrated": self.arrival(sender, name, attempt),
            "stranded": Stranded(name, attempt, "late"),
        }[kind]
        if kind == "adopted":
            self.dropping(lambda: getattr(self.dispatcher, kind)(sender, message), sender)
            return
        self.dropping(lambda: getattr(self.dispatcher, kind)(sender, message, self.now), sender)

    # ---- Orders --------

    def hand_over(self, engine: str, name: str, attempt: int) -> Prefilled:
        handle = KVHandle(NODE.get(engine, "n0"), engine, "layout", (Segment(engine, Lease(0, attempt), 0, (1,)),), 1)
        return Prefilled(name, attempt, 9, handle, self.now)

    def arrival(self, migrator: str, name: str, attempt: int) -> Migrated:
        return Migrated(name, attempt, self.hand_over(migrator, name, attempt).handle, 1000, 0.1, "none")

    def can_read(self, source: str, target: str) -> bool:
        """Whether what lies with one of them can be brought to where the other reads it."""
        nodes = {NODE[source], NODE[target]}
        return (self.transport != "ucx" and len(nodes) == 1) or (
            self.transport != "lease" and nodes <= self.dispatcher.fleet.migrators.keys()
        )

    def dropping(self, stimulus, sender: str = "") -> None:
        """Hold that a stimulus is counted, changes nothing, and gets a Release at most."""
        before = self.dispatcher.dropped.total()
        stages = {name: (r.stage, r.attempt) for name, r in self.dispatcher.requests.items()}
        orders = stimulus()
        assert self.dispatcher.dropped.total() == before + 1
        assert {name: (r.stage, r.attempt) for name, r in self.dispatcher.requests.items()} == stages
        assert all(order.to == sender and isinstance(order.message, Release) for order in orders)
        if sender in NODE:
            self.obey(orders)

    def obey(self, orders) -> None:
        """Give each order to its receiver and hold it against what that one can do."""
        for to, message in orders:
            if isinstance(message, Rejected):
                assert to == self.asked[message.request]
                self.ends[message.request] += 1
                continue
            if isinstance(message, Resume):
                self.ask_gateway(to, message)
                continue
            assert to in self.live, f"{message} goes to {to}, which is lost"
            job = (to, message.request, message.attempt)
            if isinstance(message, Prefill | Decode):
                self.start(to, message, job)
            elif isinstance(message, Pin):
                self.ask_to_lend(to, message, job)
            elif isinstance(message, Migrate):
                self.migrate(to, message)
            elif isinstance(message, CopyOut):
                self.copy_out(to, message)
            else:
                assert isinstance(message, Release)
                self.release(job)
        for name in [name for name in self.holding if name not in self.dispatcher.requests]:
            assert not self.holding.pop(name), f"{name} ended and somebody still holds it"

    def ask_gateway(self, to: str, message: Resume) -> None:
        """Only once nobody holds anything of the attempts before."""
        request = self.dispatcher.requests[message.request]
        assert (to, request.stage, request.attempt) == (request.gateway, "resuming", message.attempt)
        assert not self.holding[message.request]
        assert not request.holders
        assert message.attempt <= MAX_ATTEMPTS
        self.questions.append((to, message))

    def start(self, to: str, message: Prefill | Decode, job: Job) -> None:
        role, node = ENGINES[to]
        assert role == "decode" or (isinstance(message, Prefill) and role in FIRST)
        key = (message.request, message.attempt)
        if isinstance(message, Prefill) and role == "decode":
            cached = self.dispatcher.requests[message.request].num_cached
            assert len(message.prompt) + len(message.generated) - cached <= self.local
            assert not message.ship_to
        if isinstance(message, Prefill):
            assert list(message.prefix) == sorted(self.lent.get(key, []), key=lambda segment: segment.start)
        is_moved = isinstance(message, Decode) and message.path == "ucx"
        if not is_moved and (isinstance(message, Decode) or key not in self.lent):
            assert self.dispatcher.fleet.engines[to].member.state == "ready"
        assert not self.ends[message.request], "an ended request goes on"
        assert message.attempt <= MAX_ATTEMPTS
        assert len(message.generated) == self.generated.get(message.request, 0) + isinstance(message, Decode)
        if isinstance(message, Decode):
            assert NODE[message.handle.owner] == node
            assert (message.path == "ucx") == (key in self.arrived)
            assert not is_moved or message.handle == self.arrived[key]
        elif message.ship_to:
            self.ship(to, message)
        assert job not in self.running
        self.running.add(job)
        self.holding[message.request].add(job)

    def ship(self, prefill: str, message: Prefill) -> None:
        """Its first blocks leave before it is handed over, so both migrators have something to do with it."""
        planned = self.dispatcher.requests[message.request].planned
        assert self.dispatcher.limits.overlaps
        assert ENGINES[planned][0] == "decode"
        assert NODE[planned] == NODE[message.ship_to]
        self.hold_between(prefill, message.ship_to, message)

    def migrate(self, to: str, message: Migrate) -> None:
        request = self.dispatcher.requests[message.request]
        key = (message.request, message.attempt)
        if request.stage == "pinning":
            self.bring(to, message)
            return
        assert (request.stage, request.attempt) == ("migrating", message.attempt)
        assert key not in self.moving
        assert key not in self.arrived
        assert self.dispatcher.fleet.engines[request.decode].member.state == "ready"
        assert NODE[to] == NODE[message.handle.owner]
        assert NODE[message.target] == NODE[request.decode]
        assert self.transport == "ucx" or to != message.target
        assert message.digests == request.keys.full()
        self.moving[key] = to, message.target
        self.hold_between(message.handle.owner, message.target, message)

    def bring(self, to: str, message: Migrate) -> None:
        """Part of the prompt comes from the other node before the rest is computed."""
        request = self.dispatcher.requests[message.request]
        key = (message.request, message.attempt)
        assert request.pull == (to, message.target)
        assert request.attempt == message.attempt
        assert key not in self.pulled
        assert NODE[message.target] == NODE[request.engine] != NODE[to] == message.handle.node
        blocks = [block for segment in message.handle.segments for block in segment.blocks]
        assert message.handle.num_tokens == len(blocks) * BLOCK > 0
        assert message.digests == request.keys.chain(min(request.prefix_tokens, message.handle.num_tokens))
        self.pulled[key] = to, message.target
        for migrator in self.pulled[key]:
            self.holding[message.request].add((migrator, *key))

    def hold_between(self, prefill: str, target: str, message: Prefill | Migrate) -> None:
        source = self.dispatcher.fleet.migrators[NODE[prefill]].name
        for migrator in (source, target):
            assert migrator in self.live
            self.holding[message.request].add((migrator, message.request, message.attempt))

    def ask_to_lend(self, owner: str, pin: Pin, job: Job) -> None:
        request = self.dispatcher.requests[pin.request]
        assert (request.stage, request.attempt) == ("pinning", pin.attempt)
        assert owner != request.engine
        assert (NODE[owner] == NODE[request.engine]) != bool(request.pull)
        assert not request.pull or (NODE[owner], NODE[request.engine]) == tuple(NODE[name] for name in request.pull)
        assert owner in MIGRATORS or self.dispatcher.fleet.engines[owner].member.state in ("ready", "draining")
        assert pin.digests == request.digests[pin.start : pin.start + len(pin.digests)]
        assert self.dispatcher.fleet.index.num_known(pin.digests, {owner}) == len(pin.digests) > 0
        self.lent[pin.request, pin.attempt] = []
        self.pins.append((owner, pin))
        self.lending.add(job)
        self.holding[pin.request].add(job)

    def copy_out(self, to: str, message: CopyOut) -> None:
        request = self.dispatcher.requests[message.request]
        assert (request.stage, request.attempt, request.decode) == ("decoding", message.attempt, to)
        assert request.prefill == self.starving
        assert self.dispatcher.fleet.engines[to].load.blocks.free
        assert message.request not in self.copied
        self.copied.add(message.request)

    def release(self, job: Job) -> None:
        request = self.dispatcher.requests.get(job[1])
        is_live = request is not None and request.attempt == job[2] and job[0] in request.holders
        assert not is_live, f"{job} is released while it is needed"
        self.running.discard(job)
        self.lending.discard(job)
        for on_the_way in (self.moving, self.pulled):
            if job[0] in on_the_way.get(job[1:], ()):
                del on_the_way[job[1:]]
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
            counts[request.planned] += bool(request.planned)  # a place is kept there
            assert not request.planned or request.stage in ("pinning", "prefilling", "waiting")
        assert all(count <= ROOM for count in counts.values())
        assert set(counts) - {""} <= self.live

    @invariant()
    def holders_are_those_that_were_told(self):
        for name, request in self.dispatcher.requests.items():
            held = {engine for engine, _, attempt in self.holding[name] if attempt == request.attempt}
            assert held <= request.holders <= self.live

    @invariant()
    def whatever_migrates_is_on_its_way(self):
        migrating = {(n, r.attempt): r.movers for n, r in self.dispatcher.requests.items() if r.stage == "migrating"}
        assert migrating == self.moving

    @invariant()
    def nobody_lends_for_what_is_over(self):
        for owner, name, attempt in self.lending:
            request = self.dispatcher.requests.get(name)
            assert request is not None, f"{owner} lends for {name}, which ended"
            assert request.attempt == attempt
            assert owner in request.holders

    @invariant()
    def whoever_holds_something_is_not_idle(self):
        for jobs in self.holding.values():
            assert not any(self.dispatcher.is_idle(engine) for engine, _, _ in jobs)

    @invariant()
    def nobody_waits_beside_free_room(self):
        """An order is given as soon as it can be."""
        counts = Counter(request.engine for request in self.dispatcher.requests.values())
        counts.update(request.planned for request in self.dispatcher.requests.values())
        ready = {name: e for name, e in self.dispatcher.fleet.engines.items() if e.member.state == "ready"}
        free = [name for name in ready if counts[name] < ROOM]
        if self.dispatcher.requests.queued:
            decoding = {ENGINES[name][1] for name in ready if ENGINES[name][0] == "decode"}
            is_open = self.transport != "lease" or not decoding
            first = [name for name in free if ENGINES[name][0] in FIRST]
            assert not [name for name in first if is_open or ENGINES[name][1] in decoding]
        for source in self.dispatcher.requests.waiting:
            near = [name for name in free if self.can_read(source, name)]
            assert not [name for name in near if ENGINES[name][0] == "decode"]


DispatcherMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=60, deadline=None)
TestDispatcher = DispatcherMachine.TestCase
