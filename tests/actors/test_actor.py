"""What every actor does, shown on two small ones in one loop."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from pdactors.actors.actor import Actor
from pdactors.errors import InvariantError, PromptTooLong, Refused
from pdactors.messages import (
    PROTOCOL_VERSION,
    Drain,
    Failed,
    Fleet,
    Heartbeat,
    Inspect,
    Inspected,
    Load,
    Member,
    Prefill,
    Refusal,
    Release,
    Sampling,
    Stranger,
    Welcome,
)
from pdactors.token_ids import TokenIds
from pdactors.transport.inproc import InprocTransport
from pdactors.version import VERSION

FINE, RAISES, BREAKS, TOO_LONG = 0, 1, 2, 3


def prefill(request: str, what: int = FINE) -> Prefill:
    return Prefill(request, 1, TokenIds.of([what]), Sampling())


class Host(Actor):
    """Listens where the router does, and notes what it hears."""

    role = "router"

    def __init__(self, spec, address=None):
        super().__init__(spec, InprocTransport())
        self.where = address or spec.control
        self.members: list[Member] = []
        self.heard: list[tuple[str, object]] = []
        for kind in (Heartbeat, Failed, Inspected):
            self.accept(kind, self.note, "prefill", "gateway")

    def open(self):
        self.listen(self.where)

    def beat(self):
        pass

    def joined(self, member):
        self.members.append(member)

    def note(self, sender, message):
        self.heard.append((sender.name, message))

    def of(self, kind):
        return [message for _, message in self.heard if isinstance(message, kind)]


class Worker(Actor):
    """Does as the first token of a prompt says."""

    role = "prefill"

    def __init__(self, spec):
        super().__init__(spec, InprocTransport())
        self.done: list[str] = []
        self.is_closed = False
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.accept(Prefill, self.on_prefill, "router")

    async def start(self):
        await self.may_start.wait()

    async def close(self):
        self.is_closed = True

    def wants(self, member):
        return member.role == "gateway"

    def load(self):
        return Load(running=len(self.done))

    def on_prefill(self, _sender, message):
        what = message.prompt[0]
        if what == RAISES:
            raise ZeroDivisionError("by hand")
        if what == TOO_LONG:
            raise PromptTooLong("by far")
        if what == BREAKS:
            raise InvariantError("free + used is not total")
        self.done.append(message.request)


@pytest.fixture
def host(make_spec):
    return Host(make_spec("router"))


@pytest.fixture
def worker(make_spec):
    return Worker(make_spec("prefill", "p"))


# ---- Joining --------


async def test_an_actor_joins_and_is_welcomed_by_name(host, fake_peer, living):
    async with living(host):
        peer = fake_peer("prefill", "p")
        welcome = await peer.join()
        assert (welcome.member.name, welcome.member.role, welcome.member.address) == ("router", "router", host.where)
        assert host.members == [peer.spec.member(100)]
        assert host.tell("p", Release("r", 1))
        assert await peer.expect(Release) == Release("r", 1)


async def test_an_actor_introduces_itself_and_becomes_ready(host, worker, living, until):
    worker.may_start.clear()
    async with living(host, worker):
        await until(lambda: host.of(Heartbeat))
        assert [member.name for member in host.members] == ["p"]
        assert host.of(Heartbeat)[0].state == worker.state == "starting"
        worker.may_start.set()
        await until(lambda: host.of(Heartbeat)[-1].state == "ready")
    assert worker.state == "stopping"


async def test_an_actor_that_comes_before_the_router_joins_when_it_is_there(host, worker, living, until):
    async with living(worker):
        await until(lambda: worker.state == "ready")
        async with living(host):
            await until(lambda: host.of(Heartbeat))


async def test_heartbeats_go_on_and_carry_the_load(host, worker, living, until):
    async with living(host, worker):
        await until(lambda: len(host.of(Heartbeat)) > 5)
        host.tell("p", prefill("r"))
        await until(lambda: host.of(Heartbeat)[-1].load.running == 1)


@pytest.mark.parametrize(
    ("what", "theirs", "ours"),
    [
        ("protocol", 99, PROTOCOL_VERSION),
        ("version", "0.0.0", VERSION),
        ("model", "cd" * 8, "ab" * 8),
        ("layout", "ef" * 8, None),
    ],
)
async def test_one_that_differs_is_refused_with_both_values(host, fake_peer, living, what, theirs, ours):
    async with living(host):
        peer = fake_peer("prefill", "p")
        peer.send(peer.hello(**{what: theirs}))
        reason = (await peer.expect(Refusal)).reason
        assert what in reason.lower()
        assert f"theirs is {theirs}, ours is {ours or host.spec.layout.fingerprint}" in reason
        assert not host.tell("p", Release("r", 1))
    assert host.members == []


@pytest.mark.parametrize("token", ["", "wrong-token-0815", "öffne dich"])
async def test_a_wrong_join_token_is_refused_and_neither_token_is_told(host, fake_peer, living, capfd, token):
    async with living(host):
        peer = fake_peer("prefill", "p")
        peer.send(peer.hello(join_token=token))
        reason = (await peer.expect(Refusal)).reason
    said = reason + "".join(capfd.readouterr())
    assert reason == "join token: wrong or missing"
    assert host.spec.join_token not in said
    assert not token or token not in said
    assert host.members == []


@pytest.mark.parametrize("identity", [b"q#1", b"p#2", b"p", b"\xff\xfe"])
async def test_an_identity_other_than_the_connections_is_refused(host, fake_peer, living, identity):
    async with living(host):
        peer = fake_peer("prefill", "p", identity=identity)
        peer.send(peer.hello())
        reason = (await peer.expect(Refusal)).reason
        assert reason == f"identity: theirs is {identity.decode(errors='replace')}, ours is p#1"
    assert host.members == []


async def test_a_refused_actor_ends_with_the_reason(host, make_spec, living):
    stranger = Worker(msgspec.structs.replace(make_spec("prefill", "p"), join_token="guess"))
    async with living(host):
        with pytest.raises(Refused, match="router refuses p: join token"):
            await asyncio.wait_for(stranger.run(), 10)
    assert stranger.is_closed


# ---- Successors and strangers --------


async def test_a_successor_takes_its_predecessors_place(host, fake_peer, living):
    async with living(host):
        former, successor = fake_peer("prefill", "p"), fake_peer("prefill", "p", incarnation=2)
        await former.join()
        await successor.join()
        assert host.tell("p", Release("r", 1))
        await successor.expect(Release)
        former.send(Failed("r", 1, "internal", "from the dead"))
        await former.expect(Stranger)
        assert not former.of(Release)
    assert host.heard == []
    assert [member.incarnation for member in host.members] == [1, 2]


async def test_an_older_incarnation_is_refused_with_both_values(host, fake_peer, living):
    async with living(host):
        await fake_peer("prefill", "p", incarnation=8).join()
        former = fake_peer("prefill", "p", incarnation=5)
        former.send(former.hello())
        assert (await former.expect(Refusal)).reason == "incarnation: theirs is 5, ours is 8"


async def test_whoever_speaks_before_its_hello_is_a_stranger(host, fake_peer, living):
    async with living(host):
        peer = fake_peer("prefill", "p")
        peer.send(Heartbeat("ready"))
        await peer.expect(Stranger)
        assert host.heard == []
        assert host.dropped["stranger"] == 1
        await peer.join()
        peer.send(Heartbeat("ready"))
        peer.send(peer.hello())
        await peer.expect(Welcome)
    assert [name for name, _ in host.heard] == ["p"]


async def test_a_stranger_says_hello_again(host, worker, living, until):
    async with living(host, worker):
        await until(lambda: host.of(Heartbeat))
        host.dismiss("p")
        host.heard.clear()
        await until(lambda: host.of(Heartbeat))
    assert len(host.members) > 1


async def test_an_actor_joins_a_router_that_came_back(make_spec, worker, living, until):
    async with living(worker):
        for incarnation in (1, 2):
            host = Host(make_spec("router", incarnation=incarnation))
            async with living(host):
                await until(lambda host=host: host.of(Heartbeat))


# ---- What is dropped --------


async def test_a_message_from_the_wrong_role_is_dropped_and_counted(host, fake_peer, living):
    async with living(host):
        peer = fake_peer("decode", "d")
        await peer.join()
        peer.send(Heartbeat("ready"))
        peer.send(peer.hello())
        await peer.expect(Welcome)
        assert host.heard == []
        assert host.dropped == {"unexpected": 1}
        assert host.report().dropped == {"unexpected": 1}


@pytest.mark.parametrize("message", [Drain(), Release("r", 1), Stranger()])
async def test_a_message_that_nobody_handles_is_dropped_and_counted(host, fake_peer, living, message):
    async with living(host):
        peer = fake_peer("prefill", "p")
        await peer.join()
        peer.send(message)
        peer.send(peer.hello())
        await peer.expect(Welcome)
    assert host.dropped == {"unexpected": 1}


async def test_garbage_is_dropped_and_costs_nothing_else(host, fake_peer, living, until):
    async with living(host):
        peer = fake_peer("prefill", "p")
        await peer.join()
        peer.send_raw(b"\xc1 garbage")
        peer.send(Heartbeat("ready"))
        await until(lambda: host.heard)
    assert host.dropped == {"malformed": 1}


async def test_what_the_host_says_before_its_welcome_is_not_handled(host, worker, living, until):
    async with living(host):
        host._admit = lambda peer, hello: host._answer(peer, prefill("r"))
        async with living(worker):
            await until(lambda: worker.state == "ready")
            await asyncio.sleep(0.03)  # time for a wrong delivery
    assert worker.done == []


async def test_telling_nobody_is_said_and_counted(host, living):
    async with living(host):
        assert host.tell("nobody", Release("r", 1)) is False
        assert host.dropped == {"unsent": 1}


# ---- The failure rule --------


@pytest.mark.parametrize(
    ("what", "code", "text"), [(RAISES, "internal", "p: by hand"), (TOO_LONG, "prompt_too_long", "p: by far")]
)
async def test_a_handler_that_raises_ends_its_request_only(host, worker, living, until, what, code, text):
    async with living(host, worker):
        await until(lambda: worker.state == "ready" and host.members)
        host.tell("p", prefill("first"))
        host.tell("p", prefill("bad", what))
        host.tell("p", prefill("last"))
        await until(lambda: "last" in worker.done)
        await until(lambda: host.of(Failed))
    assert worker.done == ["first", "last"]
    assert host.of(Failed) == [Failed("bad", 1, code, text)]


async def test_broken_books_end_the_actor(host, worker, living, until):
    async with living(host):
        life = asyncio.create_task(worker.run())
        await until(lambda: host.members)
        host.tell("p", prefill("bad", BREAKS))
        with pytest.raises(InvariantError, match=r"free \+ used is not total"):
            await asyncio.wait_for(life, 10)
    assert worker.is_closed
    assert worker.state == "stopping"


async def test_a_task_that_fails_ends_the_actor(host, worker, living, until):
    async def fail() -> None:
        raise ZeroDivisionError("aside")

    async with living(host):
        life = asyncio.create_task(worker.run())
        await until(lambda: worker.state == "ready")
        worker.spawn(fail())
        with pytest.raises(ZeroDivisionError, match="aside"):
            await asyncio.wait_for(life, 10)


async def test_an_actor_can_be_stopped_while_it_starts(host, worker, living, until):
    worker.may_start.clear()
    async with living(host, worker):
        await until(lambda: host.members)
    assert worker.is_closed
    assert all(beat.state != "ready" for beat in host.of(Heartbeat))


# ---- The fleet's news --------


def gateway_at(address: str, incarnation: int) -> Member:
    return Member("gateway", "gateway", "n0", "r0", 1, incarnation, state="ready", address=address)


async def test_an_actor_connects_to_those_whom_it_wants(host, worker, make_spec, living, until, control):
    gateway = Host(make_spec("gateway"), f"{control}-gateway")
    other = Host(make_spec("decode"), f"{control}-other")
    async with living(host, worker, gateway, other):
        await until(lambda: host.members)
        decode = Member("decode", "decode", "n0", "r0", 1, 1, state="ready", address=other.where)
        members = (gateway_at(gateway.where, 1), decode)
        for _ in range(3):
            host.tell("p", Fleet("disaggregated", members))
        await until(lambda: "gateway" in worker._hosts)
        assert worker.fleet.members == members
    assert [member.name for member in gateway.members] == ["p"]
    assert other.members == []


@pytest.mark.parametrize("was_welcomed", [True, False])
async def test_an_actor_follows_a_successor_to_its_address(
    host, worker, make_spec, living, until, control, was_welcomed
):
    former = Host(make_spec("gateway"), f"{control}-1")
    successor = Host(make_spec("gateway", incarnation=2), f"{control}-2")
    async with living(host, worker):
        await until(lambda: host.members)
        if was_welcomed:
            async with living(former):
                host.tell("p", Fleet("disaggregated", (gateway_at(former.where, 1),)))
                await until(lambda: "gateway" in worker._hosts)
        else:
            host.tell("p", Fleet("disaggregated", (gateway_at(former.where, 1),)))
        async with living(successor):
            host.tell("p", Fleet("disaggregated", (gateway_at(successor.where, 2),)))
            await until(lambda: successor.members)
            await until(lambda: "gateway" in worker._hosts and worker._hosts["gateway"].incarnation == 2)
            assert worker.tell("gateway", Failed("r", 1, "internal", "to the successor"))
            await until(lambda: successor.of(Failed))


async def test_the_channel_to_a_predecessor_is_closed(host, worker, make_spec, living, until, control):
    former = Host(make_spec("gateway"), f"{control}-1")
    successor = Host(make_spec("gateway", incarnation=2), f"{control}-2")
    async with living(host, worker, former, successor):
        await until(lambda: host.members)
        host.tell("p", Fleet("disaggregated", (gateway_at(former.where, 1),)))
        await until(lambda: "gateway" in worker._hosts)
        host.tell("p", Fleet("disaggregated", (gateway_at(successor.where, 2),)))
        await until(lambda: successor.members)
        assert former.listener.channels == {}


async def test_an_actor_says_hello_again_to_whom_it_only_talks_now_and_then(
    host, worker, make_spec, living, until, control
):
    gateway = Host(make_spec("gateway"), f"{control}-gateway")
    async with living(host, worker, gateway):
        await until(lambda: host.members)
        host.tell("p", Fleet("disaggregated", (gateway_at(gateway.where, 1),)))
        await until(lambda: "gateway" in worker._hosts)
        gateway.dismiss("p")
        worker.tell("gateway", Failed("r", 1, "internal", "lost"))
        await until(lambda: len(gateway.members) == 2)
        worker.tell("gateway", Failed("r", 1, "internal", "heard"))
        await until(lambda: gateway.of(Failed))
    assert [failed.message for failed in gateway.of(Failed)] == ["heard"]


async def test_an_actor_reports_about_itself(host, worker, living, until):
    async with living(host, worker):
        await until(lambda: worker.state == "ready" and host.members)
        host.tell("p", prefill("r"))
        host.tell("p", Inspect(7))
        await until(lambda: host.of(Inspected))
    (answer,) = host.of(Inspected)
    assert answer.query == 7
    report = answer.report
    assert (report.name, report.role, report.state, report.incarnation) == ("p", "prefill", "ready", 1)
    assert report.load == Load(running=1)
