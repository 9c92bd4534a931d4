"""The router and nodes that come, leave, die, fall silent and come back."""

from __future__ import annotations

import pytest

from pdactors.messages import (
    Answered,
    Drain,
    Exited,
    Generate,
    Heartbeat,
    Load,
    Prefill,
    Refusal,
    Rejected,
    Retire,
    Sampling,
    Scale,
    StartEngines,
    Welcome,
)
from pdactors.token_ids import TokenIds

READY = Heartbeat("ready", Load(max_sequences=2))
S0, S1 = "n0/supervisor", "n1/supervisor"
NODE_1 = {"p1", "d1", "n1/migrator", S1}


async def join_node_1(cluster, **spec):
    for name in (S1, "n1/migrator", "p1", "d1"):
        await cluster.join(name, node="n1", **spec)
    await cluster.news("gateway", lambda fleet: names(fleet) >= NODE_1)
    cluster["gateway"].got.clear()  # what was true before is not looked at again


def names(fleet):
    return {member.name for member in fleet.members}


async def is_gone(cluster, *gone):
    await cluster.news("gateway", lambda fleet: not names(fleet) & set(gone))


async def request_on(cluster, name):
    """Have requests placed until `name` has one; return its id."""
    for i in range(4):
        cluster["gateway"].send(Generate(f"r{i}", TokenIds.of(range(3)), Sampling(max_tokens=8)))
    return (await cluster[name].expect(Prefill)).request


async def test_a_node_that_leaves_is_gone_with_all_its_actors_and_its_requests_go_elsewhere(cluster_of):
    async with cluster_of("gateway", S0, "p", "d") as cluster:
        await join_node_1(cluster)
        request = await request_on(cluster, "p1")
        cluster["p"].got.clear()
        cluster[S1].send(Exited(S1, 1, is_final=True))
        await is_gone(cluster, *NODE_1)
        assert names(await cluster.news("gateway", lambda _: True)) == {"router", "gateway", S0, "p", "d"}
        assert cluster.router.dispatcher.requests[request].attempt == 2


async def test_a_node_whose_supervisor_is_silent_is_given_up(cluster_of):
    async with cluster_of("gateway", S0, "p", "d", dead_after_ms=300) as cluster:
        await join_node_1(cluster)

        def others_live():
            for name in ("gateway", S0, "p", "d"):
                cluster[name].send(READY)

        cluster.router.every(0.02, others_live)
        await is_gone(cluster, *NODE_1)
        assert {"gateway", S0, "p", "d"} <= set(cluster.router.members)


async def test_the_routers_own_supervisor_may_be_silent(cluster_of):
    async with cluster_of("gateway", S0, dead_after_ms=200) as cluster:
        cluster.router.every(0.02, lambda: cluster["gateway"].send(READY))
        for _ in range(60):  # more than 200 ms of beats
            await cluster.news("gateway", lambda _: True)
        assert S0 in cluster.router.members


async def test_what_was_given_up_is_refused_and_its_successor_is_welcome(cluster_of):
    async with cluster_of("gateway", S0, "p", "d") as cluster:
        await join_node_1(cluster)
        cluster.router._lose_node("n1", "a test says so")
        cluster["p1"].send(READY)  # it was only cut off
        cluster["p1"].send(cluster["p1"].hello())
        refusal = await cluster["p1"].expect(Refusal)
        assert refusal.reason == "incarnation 1 was given up, since its node was silent"
        cluster[S1].send(cluster[S1].hello())
        await cluster[S1].join()
        await cluster.join("p1", node="n1", incarnation=2)
        assert set(cluster.router.members) == {"gateway", S0, "p", "d", S1, "p1"}


async def test_a_node_that_is_launched_again_replaces_what_was_there_at_once(cluster_of):
    async with cluster_of("gateway", S0, "p", "d") as cluster:
        await join_node_1(cluster)
        await cluster.join(S1, node="n1", incarnation=2)
        assert set(cluster.router.members) == {"gateway", S0, "p", "d", S1}


async def test_a_supervisor_that_says_hello_again_changes_nothing(cluster_of):
    async with cluster_of("gateway", S0, "p", "d") as cluster:
        await join_node_1(cluster)
        await cluster[S1].join()
        assert set(cluster.router.members) >= NODE_1


async def test_who_asked_for_engines_of_a_lost_node_is_told(cluster_of):
    async with cluster_of("gateway", S0, "p", "d") as cluster:
        await join_node_1(cluster)
        cluster["gateway"].send(Scale(3, "n1", "decode", 2))
        await cluster[S1].expect(StartEngines)
        cluster[S1].send(Exited(S1, 1, is_final=True))
        assert await cluster["gateway"].expect(Answered) == Answered(3, error="n1 was lost")


async def test_a_node_that_drains_gets_nothing_new_while_the_run_goes_on(cluster_of):
    async with cluster_of("gateway", S0, "p", "d") as cluster:
        await join_node_1(cluster)
        cluster[S1].send(Drain())
        assert {(await cluster[S1].expect(Retire)).name, (await cluster[S1].expect(Retire)).name} == {"p1", "d1"}
        fleet = await cluster.news("gateway", lambda fleet: True)
        assert not fleet.is_draining
        cluster["gateway"].send(Generate("r", TokenIds.of(range(3)), Sampling(max_tokens=8)))
        await cluster["p"].expect(Prefill)
        assert not cluster["gateway"].of(Rejected)


async def test_the_routers_node_drains_the_run(cluster_of):
    async with cluster_of("gateway", S0, "p", "d") as cluster:
        await join_node_1(cluster)
        cluster[S0].send(Drain())
        await cluster.news(S1, lambda fleet: fleet.is_draining)
        assert not cluster[S0].of(Retire)


@pytest.mark.parametrize(("spec", "reason"), [
    ({"node": "n7"}, "node: theirs is n7, ours are n0, n1"),
    ({"mode": "chunked"}, "cluster.mode: theirs is chunked, ours is disaggregated"),
])  # fmt: skip
async def test_whoever_reads_another_file_is_refused_with_both_values(cluster_of, fake_peer, spec, reason):
    async with cluster_of("gateway"):
        peer = fake_peer("supervisor", "x/supervisor", **spec)
        peer.send(peer.hello())
        assert (await peer.expect(Refusal)).reason == reason


@pytest.mark.parametrize(("changes", "reason"), [
    ({"run_id": "older"}, "run: theirs is older, ours is run"),
    ({"max_model_len": 7}, "model.max_model_len: theirs is 7, ours is 64"),
])  # fmt: skip
async def test_terms_that_differ_are_named(cluster_of, fake_peer, changes, reason):
    async with cluster_of("gateway"):
        peer = fake_peer("supervisor", S1, node="n1")
        peer.send(peer.hello(**changes))
        assert (await peer.expect(Refusal)).reason == reason


async def test_whoever_does_not_know_the_run_is_told(cluster_of, fake_peer):
    async with cluster_of("gateway"):
        peer = fake_peer("supervisor", S1, node="n1")
        peer.send(peer.hello(run_id=""))
        welcome = await peer.expect(Welcome)
        assert welcome.run_id == "run"
