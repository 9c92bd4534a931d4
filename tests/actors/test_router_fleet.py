"""The router makes the fleet smaller and larger: drain, retire, scale."""

from __future__ import annotations

import pytest

from pdactors.messages import (
    Answered,
    CacheChanged,
    DrainActor,
    EnginesStarted,
    Exited,
    Finished,
    Fleet,
    Generate,
    Heartbeat,
    Load,
    Pin,
    Pinned,
    Prefill,
    Rejected,
    Release,
    Retire,
    Retired,
    Sampling,
    Scale,
    StartEngines,
)
from pdactors.token_ids import TokenIds

SUPERVISOR, MIGRATOR = "n0/supervisor", "n0/migrator"
READY = Heartbeat("ready", Load(max_sequences=2))


def generate(request="r", num_tokens=3):
    return Generate(request, TokenIds.of(range(num_tokens)), Sampling(max_tokens=8))


async def ask(cluster, message) -> Answered:
    cluster["gateway"].send(message)
    answer = await cluster["gateway"].expect(Answered)
    assert answer.query == message.query
    return answer


async def beats(cluster, name, count):
    """Wait for some beats of the router's."""
    for _ in range(count):
        cluster[name].got = [message for message in cluster[name].got if not isinstance(message, Fleet)]
        await cluster[name].expect(Fleet)


def states(fleet):
    return {member.name: member.state for member in fleet.members}


# ---- Drain --------


@pytest.mark.parametrize("name", ["p9", "gateway", SUPERVISOR, "router", ""])
async def test_only_an_engine_can_be_drained_and_the_answer_names_them(cluster_of, name):
    async with cluster_of("gateway", SUPERVISOR, "p", "d") as cluster:
        answer = await ask(cluster, DrainActor(7, name))
        assert answer == Answered(7, error=f"no engine is called {name}; there are d, p")
        assert all(member.state == "ready" for member in cluster.router.members.values())


async def test_the_last_of_a_role_is_not_drained(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "d", "d1") as cluster:
        assert (await ask(cluster, DrainActor(1, "p"))).error == "p is the last prefill; scale up before it is drained"
        assert (await ask(cluster, DrainActor(2, "d"))).draining == ("d",)
        assert (await ask(cluster, DrainActor(3, "d1"))).error.startswith("d1 is the last decode")


async def test_one_that_still_starts_does_not_count_as_another(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "d") as cluster:
        await cluster.join("p1", Heartbeat("starting"))
        assert (await ask(cluster, DrainActor(1, "p"))).error.startswith("p is the last prefill")
        assert (await ask(cluster, DrainActor(2, "p1"))).draining == ("p1",)


async def test_an_engine_that_drains_gets_nothing_new_whatever_it_says_of_itself(cluster_of):
    async with cluster_of("gateway", "p", "p1", "d") as cluster:
        await ask(cluster, DrainActor(1, "p"))
        await cluster.news("d", lambda fleet: states(fleet)["p"] == "draining")
        cluster["p"].send(READY)
        cluster["p"].send(cluster["p"].hello())
        await cluster["p"].join()
        assert cluster.router.members["p"].state == "draining"
        cluster["gateway"].send(generate())
        await cluster["p1"].expect(Prefill)
        assert not cluster["p"].of(Prefill)


async def test_an_engine_is_retired_only_when_no_request_needs_it(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "p1", "d") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        await ask(cluster, DrainActor(1, "p"))
        await beats(cluster, SUPERVISOR, 5)
        assert not cluster[SUPERVISOR].of(Retire)
        cluster["p"].send(Finished("r", 1, 1))
        assert await cluster[SUPERVISOR].expect(Retire) == Retire("p", 1)


async def test_an_engine_that_lends_is_not_retired(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "d", "d1") as cluster:
        cluster["gateway"].send(generate("first", 40))
        await cluster["p"].expect(Prefill)
        digests = cluster.router.dispatcher.requests["first"].digests
        assert len(digests) == 1
        cluster["d"].send(CacheChanged(digests))
        await cluster["d"].join()
        cluster["p"].send(Finished("first", 1, 1))
        await cluster["p"].expect(Release)
        cluster["gateway"].send(generate("r", 40))
        pin = await cluster["d"].expect(Pin)
        await ask(cluster, DrainActor(1, "d"))
        await beats(cluster, SUPERVISOR, 5)
        assert not cluster[SUPERVISOR].of(Retire)
        cluster["d"].send(Pinned("r", 1, pin.start, None))
        await cluster["p"].expect(Prefill)
        cluster["p"].send(Finished("r", 1, 1))
        assert await cluster["d"].expect(Release) == Release("r", 1)
        assert await cluster[SUPERVISOR].expect(Retire) == Retire("d", 1)


async def test_a_supervisor_that_takes_its_time_is_reminded_and_nothing_piles_up(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "p1", "d") as cluster:
        for query in (1, 2):
            assert (await ask(cluster, DrainActor(query, "p"))).draining == ("p",)
        await beats(cluster, SUPERVISOR, 8)
        assert set(cluster[SUPERVISOR].of(Retire)) == {Retire("p", 1)}
        assert not cluster.router.dropped
        assert not cluster.router.dispatcher.dropped


async def test_the_end_of_a_retired_engine_is_said_to_its_migrator_with_its_slot(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, MIGRATOR, "d") as cluster:
        await cluster.join("p", slot=3)
        await cluster.join("p1", slot=4)
        await ask(cluster, DrainActor(1, "p"))
        await cluster[SUPERVISOR].expect(Retire)
        cluster[SUPERVISOR].send(Exited("p", 1, is_final=True))
        assert await cluster[MIGRATOR].expect(Retired) == Retired(3)
        await cluster.news("gateway", lambda fleet: "p" not in states(fleet))
        cluster[SUPERVISOR].got.clear()
        await beats(cluster, SUPERVISOR, 5)
        assert not cluster[SUPERVISOR].of(Retire)


async def test_a_name_that_was_retired_can_be_used_again(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, MIGRATOR, "p", "p1", "d") as cluster:
        await ask(cluster, DrainActor(1, "p"))
        cluster[SUPERVISOR].send(Exited("p", 1, is_final=True))
        await cluster.news("gateway", lambda fleet: "p" not in states(fleet))
        await cluster.join("p", incarnation=2)  # waits until it is said to be ready
        assert (await ask(cluster, DrainActor(2, "p1"))).draining == ("p1",)


async def test_an_engine_that_dies_while_it_drains_is_not_kept_when_it_comes_back(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, MIGRATOR, "p", "p1", "d") as cluster:
        cluster["gateway"].send(generate())
        await cluster["p"].expect(Prefill)
        await ask(cluster, DrainActor(1, "p"))
        cluster[SUPERVISOR].send(Exited("p", 1))
        await cluster.resume()
        assert (await cluster["p1"].expect(Prefill)).attempt == 2
        assert not cluster[MIGRATOR].of(Retired), "its successor takes its memory over"
        await cluster.join("p", Heartbeat("starting"), incarnation=2)
        cluster["p"].send(READY)
        await cluster[SUPERVISOR].expect(Retire, lambda retire: retire == Retire("p", 2))
        assert not cluster["gateway"].of(Rejected)


async def test_who_asks_again_for_an_engine_that_drains_already_is_told_so(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "p1", "d") as cluster:
        await ask(cluster, DrainActor(1, "p"))
        cluster[SUPERVISOR].send(Exited("p1", 1))
        await cluster.news("gateway", lambda fleet: "p1" not in states(fleet))
        assert await ask(cluster, DrainActor(2, "p")) == Answered(2, draining=("p",))


# ---- Scale --------


async def test_more_engines_are_started_by_the_nodes_supervisor(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "d") as cluster:
        await cluster.join("n1/supervisor", node="n1")
        cluster["gateway"].send(Scale(5, "n0", "decode", 3))
        assert await cluster[SUPERVISOR].expect(StartEngines) == StartEngines(5, "n0", "decode", 2)
        assert not cluster["gateway"].of(Answered)
        cluster[SUPERVISOR].send(EnginesStarted(5, ("d1", "d2")))
        assert await cluster["gateway"].expect(Answered) == Answered(5, started=("d1", "d2"))
        assert not cluster["n1/supervisor"].of(StartEngines)
        await cluster.join("d1")
        await cluster.join("d2")
        assert await ask(cluster, Scale(6, "n0", "decode", 3)) == Answered(6)


async def test_a_node_is_scaled_by_one_at_a_time(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "d") as cluster:
        await cluster.join("n1/supervisor", node="n1")
        cluster["gateway"].send(Scale(1, "n0", "decode", 2))
        await cluster[SUPERVISOR].expect(StartEngines)
        for query, role in ((2, "decode"), (3, "prefill")):
            answer = await ask(cluster, Scale(query, "n0", role, 2))
            assert answer.error == "n0 is being scaled; ask again once that is done"
        cluster["gateway"].send(Scale(4, "n1", "decode", 2))
        await cluster["n1/supervisor"].expect(StartEngines)
        cluster[SUPERVISOR].send(EnginesStarted(1, (), "no memory"))
        await cluster["gateway"].expect(Answered)
        cluster["gateway"].send(Scale(5, "n0", "decode", 2))
        assert (await cluster[SUPERVISOR].expect(StartEngines)).query == 5


async def test_a_node_that_cannot_be_told_is_not_waited_for(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "d") as cluster:
        cluster[SUPERVISOR].close()
        for query in (1, 2):
            answer = await ask(cluster, Scale(query, "n0", "decode", 2))
            assert answer == Answered(query, error="n0 cannot be reached")


async def test_engines_that_still_start_are_not_started_again(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "d") as cluster:
        await cluster.join("d1", Heartbeat("starting"))
        assert await ask(cluster, Scale(1, "n0", "decode", 2)) == Answered(1)
        cluster["gateway"].send(Scale(2, "n0", "decode", 3))
        assert (await cluster[SUPERVISOR].expect(StartEngines)).count == 1


async def test_engines_that_drain_do_not_count_even_when_they_start_again(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "p1", "d") as cluster:
        await ask(cluster, DrainActor(1, "p"))
        cluster[SUPERVISOR].send(Exited("p", 1))
        await cluster.news("gateway", lambda fleet: "p" not in states(fleet))
        await cluster.join("p", Heartbeat("starting"), incarnation=2)
        cluster["gateway"].send(Scale(2, "n0", "prefill", 2))
        assert (await cluster[SUPERVISOR].expect(StartEngines)).count == 1


async def test_what_the_supervisor_could_not_start_is_said(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "d") as cluster:
        cluster["gateway"].send(Scale(5, "n0", "decode", 200))
        assert (await cluster[SUPERVISOR].expect(StartEngines)).count == 199
        cluster[SUPERVISOR].send(EnginesStarted(5, ("d1",), "the arena of n0 has no slot for another engine"))
        answer = await cluster["gateway"].expect(Answered)
        assert answer == Answered(5, started=("d1",), error="the arena of n0 has no slot for another engine")


async def test_the_answer_of_a_supervisor_that_nobody_waits_for_is_dropped(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p") as cluster:
        cluster[SUPERVISOR].send(EnginesStarted(5, ("d1",)))
        await cluster[SUPERVISOR].join()
        assert cluster.router.dropped == {"late answer": 1}


async def test_fewer_engines_drains_those_of_the_highest_slots(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p") as cluster:
        for name, slot in (("d0", 7), ("d1", 2), ("d2", 5), ("d3", 4)):
            await cluster.join(name, slot=slot)
        await cluster.join("d4", slot=9, node="n1")
        assert sorted((await ask(cluster, Scale(5, "n0", "decode", 2))).draining) == ["d0", "d2"]
        fleet = await cluster.news("p", lambda fleet: states(fleet).get("d0") == "draining")
        assert {name: state for name, state in states(fleet).items() if name.startswith("d")} == {
            "d0": "draining", "d1": "ready", "d2": "draining", "d3": "ready", "d4": "ready",
        }  # fmt: skip
        await cluster[SUPERVISOR].expect(Retire, lambda retire: retire.name == "d0")
        assert await ask(cluster, Scale(6, "n0", "decode", 2)) == Answered(6)


async def test_those_that_still_start_are_the_first_to_go(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p") as cluster:
        await cluster.join("d", slot=5)
        await cluster.join("d1", Heartbeat("starting"), slot=2)
        assert (await ask(cluster, Scale(5, "n0", "decode", 1))).draining == ("d1",)


async def test_the_last_of_a_role_stays(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "d", transport="lease") as cluster:
        assert await ask(cluster, Scale(5, "n0", "decode", 0)) == Answered(5, error="at least one decode is needed")
        await cluster.join("d1", node="n1")
        await cluster.join("p1", node="n1")
        assert (await ask(cluster, Scale(7, "n0", "prefill", 0))).draining == ("p",)
        assert (await ask(cluster, Scale(8, "n0", "decode", 0))).draining == ("d",)  # KV moves to the other node


@pytest.mark.parametrize(("mode", "role", "error"), [
    ("disaggregated", "worker", "mode disaggregated has prefill and decode engines, no worker"),
    ("chunked", "decode", "mode chunked has worker engines, no decode"),
    ("colocated", "prefill", "mode colocated has worker engines, no prefill"),
    ("colocated", "gateway", "mode colocated has worker engines, no gateway"),
])  # fmt: skip
async def test_a_role_that_the_mode_does_not_have_is_refused(cluster_of, mode, role, error):
    async with cluster_of("gateway", SUPERVISOR, mode=mode) as cluster:
        assert await ask(cluster, Scale(5, "n0", role, 2)) == Answered(5, error=error)
        assert not cluster[SUPERVISOR].of(StartEngines)


async def test_workers_are_scaled_in_their_modes(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "w", mode="chunked") as cluster:
        cluster["gateway"].send(Scale(5, "n0", "worker", 2))
        assert (await cluster[SUPERVISOR].expect(StartEngines)).role == "worker"


async def test_an_unknown_node_is_refused(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "d") as cluster:
        assert await ask(cluster, Scale(5, "n7", "decode", 2)) == Answered(5, error="no node is called n7")


async def test_only_the_gateway_may_ask(cluster_of):
    async with cluster_of("gateway", SUPERVISOR, "p", "p1", "d") as cluster:
        for message in (DrainActor(1, "p"), Scale(2, "n0", "prefill", 1)):
            cluster["p1"].send(message)
        cluster["gateway"].send(EnginesStarted(1, ()))
        await cluster["p1"].join()
        await cluster["gateway"].join()
        assert cluster.router.dropped == {"unexpected": 3}
        assert cluster.router.members["p"].state == "ready"
