"""The router among peers that say what the test wants."""

from __future__ import annotations

import msgspec
import pytest

from pdactors.actors import surveys
from pdactors.errors import InvariantError
from pdactors.messages import (
    Adopted,
    Cancel,
    Decode,
    Drain,
    Exited,
    Failed,
    Fence,
    Finished,
    Fleet,
    Generate,
    Heartbeat,
    Inspect,
    Inspected,
    KVHandle,
    Lease,
    Load,
    Member,
    Prefill,
    Prefilled,
    Rejected,
    Release,
    Report,
    Sampling,
    Segment,
    Stranger,
    Surveyed,
)
from pdactors.token_ids import TokenIds

READY = Heartbeat("ready", Load(max_sequences=2))


def generate(request: str = "r") -> Generate:
    return Generate(request, TokenIds.of([1, 2, 3]), Sampling(max_tokens=8))


def prefilled(request: str = "r", attempt: int = 1) -> Prefilled:
    handle = KVHandle("n0", "p", "layout", (Segment("p", Lease(0, 1), 0, (1,)),), 3)
    return Prefilled(request, attempt, 9, handle, 0.5)


# ---- Requests --------


async def test_a_request_from_the_gateway_and_back(cluster_of):
    async with cluster_of("gateway", "p", "d") as cluster:
        gateway, p, d = cluster["gateway"], cluster["p"], cluster["d"]
        gateway.send(generate())
        order = await p.expect(Prefill)
        assert (order.request, order.attempt, list(order.prompt)) == ("r", 1, [1, 2, 3])
        p.send(prefilled())
        order = await d.expect(Decode)
        assert (order.request, list(order.generated), order.handle) == ("r", [9], prefilled().handle)
        d.send(Adopted("r", 1))
        d.send(Finished("r", 1, 8))
        assert await p.expect(Release) == await d.expect(Release) == Release("r", 1)
        assert not cluster.router.dispatcher.requests
        assert not gateway.of(Rejected)


async def test_a_cancel_reaches_whoever_holds_something(cluster_of):
    async with cluster_of("gateway", "p", "d") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        cluster["p"].send(prefilled())
        await cluster["d"].expect(Decode)
        cluster["gateway"].send(Cancel("r"))
        assert await cluster["p"].expect(Release) == await cluster["d"].expect(Release) == Release("r", 1)


async def test_a_failure_reaches_the_gateway_with_its_code(cluster_of):
    async with cluster_of("gateway", "p", "d") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        cluster["p"].send(Failed("r", 1, "model", "p: NaN"))
        assert await cluster["gateway"].expect(Rejected) == Rejected("r", "model", "p: NaN")


async def test_a_request_is_ended_at_its_deadline_not_at_the_next_tick(cluster_of):
    async with cluster_of("gateway", heartbeat_ms=60_000) as cluster:
        deadline_s = cluster.router.clock() + 0.02
        cluster["gateway"].send(msgspec.structs.replace(generate(), deadline_s=deadline_s))
        assert (await cluster["gateway"].expect(Rejected)).code == "timeout"


async def test_only_the_right_roles_are_heard(cluster_of):
    async with cluster_of("gateway", "p", "d") as cluster:
        for name, message in [
            ("p", generate()),
            ("p", Cancel("r")),
            ("d", prefilled()),
            ("p", Drain()),
            ("gateway", Exited("p", 1)),
        ]:
            cluster[name].send(message)
            cluster[name].send(cluster[name].hello())
            await cluster[name].join()
        assert cluster.router.dropped == {"unexpected": 5}
        assert not cluster.router.dispatcher.requests
        assert set(cluster.router.members) == {"gateway", "p", "d"}


async def test_an_error_of_the_routers_own_ends_its_request_only(cluster_of, monkeypatch):
    async with cluster_of("gateway", "p", "d") as cluster:
        gateway, p = cluster["gateway"], cluster["p"]
        gateway.send(generate("a"))
        gateway.send(generate("b"))
        await p.expect(Prefill, lambda order: order.request == "b")

        def fail(*_: object) -> None:
            raise ZeroDivisionError("by hand")

        with monkeypatch.context() as patch:
            patch.setattr(cluster.router.dispatcher, "prefilled", fail)
            p.send(prefilled("a"))
            assert await gateway.expect(Rejected) == Rejected("a", "internal", "router: by hand")
            assert await p.expect(Release) == Release("a", 1)
        p.send(prefilled("b"))
        assert (await cluster["d"].expect(Decode)).request == "b"
        with monkeypatch.context() as patch:
            patch.setattr(cluster.router.dispatcher, "generate", fail)
            gateway.send(generate("c"))
            assert await gateway.expect(Rejected) == Rejected("c", "internal", "router: by hand")


async def test_broken_books_end_the_router(cluster_of):
    async def live() -> None:
        async with cluster_of("gateway") as cluster:
            cluster["gateway"].send(generate())
            await cluster.news("gateway", lambda fleet: fleet.num_requests == 1)
            requests = cluster.router.dispatcher.requests._requests
            requests["s"] = requests.pop("r")
            await cluster["gateway"].expect(Rejected)

    with pytest.raises(InvariantError, match="filed under s"):
        await live()


# ---- The fleet --------


async def test_everyone_hears_who_is_there_and_in_which_state(cluster_of):
    async with cluster_of("gateway") as cluster:
        await cluster.join("p", Heartbeat("starting"))
        fleet = await cluster.news("gateway", lambda fleet: len(fleet.members) == 3)
        assert fleet.mode == "disaggregated"
        assert (fleet.members[0].name, fleet.members[0].state) == ("router", "ready")
        assert {m.name: m.state for m in fleet.members}["p"] == "starting"
        cluster["p"].send(READY)
        await cluster.news("gateway", lambda fleet: {m.name: m.state for m in fleet.members}["p"] == "ready")


async def test_a_repeated_hello_changes_nothing(cluster_of, capfd):
    async with cluster_of("gateway", "p", "d") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        before = dict(cluster.router.members)
        capfd.readouterr()
        for _ in range(3):
            await cluster["p"].join()
        assert cluster.router.members == before
        assert before["p"].state == "ready"
        assert "actor joined" not in "".join(capfd.readouterr())
        assert cluster.router.dispatcher.requests["r"].attempt == 1


async def test_an_engine_that_still_loads_gets_no_work(cluster_of):
    async with cluster_of("gateway") as cluster:
        p = await cluster.join("p", Heartbeat("starting"))
        cluster["gateway"].send(generate())
        await cluster.news("gateway", lambda fleet: fleet.num_requests == 1)
        assert not p.of(Prefill)
        p.send(READY)
        await p.expect(Prefill)


async def test_the_exit_of_a_prefill_costs_an_attempt(cluster_of):
    async with cluster_of("gateway", "s", "p", "p2", "d") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        cluster["s"].send(Exited("p", 1))
        await cluster.resume()
        order = await cluster["p2"].expect(Prefill)
        assert (order.request, order.attempt) == ("r", 2)
        cluster["p2"].send(prefilled(attempt=2))
        assert (await cluster["d"].expect(Decode)).attempt == 2
        assert cluster.router.report().counts == {"retries": 1}
        assert not cluster["gateway"].of(Rejected)


async def test_the_requests_of_the_only_prefill_wait_for_its_successor(cluster_of):
    async with cluster_of("gateway", "s", "p", "d") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        cluster["s"].send(Exited("p", 1))
        await cluster.news("gateway", lambda fleet: all(m.name != "p" for m in fleet.members))
        await cluster.resume()
        successor = await cluster.join("p", incarnation=2)
        assert (await successor.expect(Prefill)).attempt == 2
        assert not cluster["gateway"].of(Rejected)


async def test_the_requests_of_a_decode_that_exits_go_on_after_what_the_client_has(cluster_of):
    async with cluster_of("gateway", "s", "p", "d") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        cluster["p"].send(prefilled())
        await cluster["d"].expect(Decode)
        cluster["s"].send(Exited("d", 1))
        assert await cluster["p"].expect(Release) == Release("r", 1)
        await cluster.resume(9, 4)
        order = await cluster["p"].expect(Prefill)
        assert (order.attempt, list(order.prompt), list(order.generated)) == (2, [1, 2, 3], [9, 4])
        cluster["p"].send(prefilled(attempt=2))
        await cluster.join("d", incarnation=2)
        assert list((await cluster["d"].expect(Decode)).generated) == [9, 4, 9]
        assert not cluster["gateway"].of(Rejected)


async def test_what_the_dead_still_say_is_a_strangers(cluster_of):
    async with cluster_of("gateway", "s", "p", "d") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        cluster["s"].send(Exited("p", 1))
        await cluster.news("gateway", lambda fleet: all(m.name != "p" for m in fleet.members))
        cluster["p"].send(prefilled())
        await cluster["p"].expect(Stranger)
        assert not cluster["d"].of(Decode)


async def test_the_exit_of_another_incarnation_changes_nothing(cluster_of):
    async with cluster_of("gateway", "s", "p") as cluster:
        cluster["s"].send(Exited("p", 77))
        cluster["s"].send(Exited("nobody", 1))
        await cluster["s"].join()
        assert set(cluster.router.members) == {"gateway", "s", "p"}
        assert cluster.router.dropped == {"exit of the unknown": 2}


async def test_a_successor_that_joins_before_the_news_of_its_predecessors_death(cluster_of):
    async with cluster_of("gateway", "s", "p", "p2") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        await cluster.join("p", Heartbeat("starting"), incarnation=2)
        await cluster.resume()
        assert (await cluster["p2"].expect(Prefill)).attempt == 2
        cluster["s"].send(Exited("p", 1))
        await cluster["s"].join()
        assert cluster.router.members["p"].incarnation == 2


# ---- Silence --------


async def fenced(cluster, until, *names: str) -> list[Fence]:
    """Wait until the supervisor heard a Fence of each, and for some beats more; return all that it heard."""
    supervisor = cluster["s"]
    await until(lambda: set(names) <= {fence.name for fence in supervisor.of(Fence)})
    for _ in range(10):
        await supervisor.expect(Fleet)
        supervisor.got = [message for message in supervisor.got if not isinstance(message, Fleet)]
    return supervisor.of(Fence)


async def test_a_silent_engine_is_fenced_at_its_nodes_supervisor_once(cluster_of, until):
    async with cluster_of("s", dead_after_ms=100) as cluster:
        other = cluster._fake_peer("supervisor", "other", node="n1")
        await other.join()
        await cluster.join("p", incarnation=5)
        assert await fenced(cluster, until, "p") == [Fence("p", 5, "silent for 100 ms")]
        assert "p" in cluster.router.members, "only its supervisor can say that it is dead"
        assert not other.of(Fence)


async def test_an_engine_that_still_loads_may_be_silent(cluster_of, until):
    async with cluster_of("s", dead_after_ms=100) as cluster:
        await cluster.join("p2", Heartbeat("starting"))
        await cluster.join("p")
        assert [fence.name for fence in await fenced(cluster, until, "p")] == ["p"]


async def test_a_successor_has_time_to_load(cluster_of, until):
    async with cluster_of("s", dead_after_ms=100) as cluster:
        await cluster.join("p")
        await cluster.join("p", Heartbeat("starting"), incarnation=2)
        await cluster.join("d")
        assert [fence.name for fence in await fenced(cluster, until, "d")] == ["d"]


async def test_a_fence_that_cannot_be_sent_is_sent_later(cluster_of):
    async with cluster_of("gateway", "p", dead_after_ms=50) as cluster:
        for _ in range(15):
            cluster["gateway"].got.clear()
            await cluster["gateway"].expect(Fleet)
        supervisor = cluster._fake_peer("supervisor", "s")
        await supervisor.join()
        assert (await supervisor.expect(Fence, lambda fence: fence.name == "p")).incarnation == 1


# ---- Surveys --------


def report(member: Member, requests: tuple[str, ...] = ()) -> Report:
    return Report(member.name, member.role, "n0", "r0", "ready", 100, 1, requests=requests)


def answer(peer, query: int) -> Inspected:
    return Inspected(query, report(peer.spec.member(100)))


async def test_a_survey_gathers_the_reports_of_all_but_supervisors(cluster_of):
    async with cluster_of("gateway", "s", "p", "d") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        cluster["gateway"].send(Inspect(5))
        for name in ("p", "d", "gateway"):
            inspect = await cluster[name].expect(Inspect)
            cluster[name].send(answer(cluster[name], inspect.query))
        surveyed = await cluster["gateway"].expect(Surveyed)
        assert surveyed.query == 5
        assert sorted(r.name for r in surveyed.reports) == ["d", "gateway", "p", "router"]
        assert surveyed.in_flight == ("r",)
        assert surveyed.silent == ()
        (own,) = [r for r in surveyed.reports if r.name == "router"]
        assert (own.requests, own.load.running, own.state) == (("r",), 1, "ready")
        assert not cluster["s"].of(Inspect)


async def test_a_survey_does_not_wait_for_a_silent_member(cluster_of, monkeypatch):
    monkeypatch.setattr(surveys, "SURVEY_TIMEOUT_S", 0.05)
    async with cluster_of("gateway", "p", "d") as cluster:
        cluster["gateway"].send(Inspect(5))
        for name in ("p", "gateway"):
            inspect = await cluster[name].expect(Inspect)
            cluster[name].send(answer(cluster[name], inspect.query))
        surveyed = await cluster["gateway"].expect(Surveyed)
        assert surveyed.silent == ("d",)
        assert sorted(r.name for r in surveyed.reports) == ["gateway", "p", "router"]
        late = await cluster["d"].expect(Inspect)
        cluster["d"].send(answer(cluster["d"], late.query))
        await cluster["d"].join()
        assert cluster.router.dropped == {"late report": 1}


async def test_a_member_is_counted_once_in_a_survey(cluster_of):
    async with cluster_of("gateway", "p") as cluster:
        gateway, p = cluster["gateway"], cluster["p"]
        gateway.send(Inspect(5))
        query = (await p.expect(Inspect)).query
        p.send(answer(p, query))
        p.send(answer(p, query))
        await p.join()
        gateway.send(answer(gateway, query))
        assert sorted(r.name for r in (await gateway.expect(Surveyed)).reports) == ["gateway", "p", "router"]
        assert cluster.router.dropped == {"late report": 1}


async def test_two_surveys_at_once_do_not_mix(cluster_of):
    async with cluster_of("gateway") as cluster:
        gateway = cluster["gateway"]
        gateway.send(Inspect(1))
        gateway.send(Inspect(2))
        first, second = await gateway.expect(Inspect), await gateway.expect(Inspect)
        assert first.query != second.query
        gateway.send(answer(gateway, second.query))
        gateway.send(answer(gateway, second.query))
        assert (await gateway.expect(Surveyed)).query == 2
        gateway.send(answer(gateway, first.query))
        assert (await gateway.expect(Surveyed)).query == 1
        assert cluster.router.dropped == {"late report": 1}


# ---- Draining --------


async def test_draining_is_said_to_all_and_again_when_the_last_request_ends(cluster_of):
    async with cluster_of("gateway", "s", "p", "d", heartbeat_ms=60_000, dead_after_ms=600_000) as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        cluster["s"].send(Drain())
        for name in ("gateway", "s"):
            assert (await cluster.news(name, lambda fleet: fleet.is_draining)).num_requests == 1
        cluster["p"].send(Finished("r", 1, 1))
        assert (await cluster.news("s", lambda fleet: not fleet.num_requests)).is_draining
