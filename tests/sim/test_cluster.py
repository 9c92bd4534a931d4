"""The simulated cluster: the same every time, its books in order, and times that can be worked out by hand."""

from __future__ import annotations

import pytest

from pdactors.bench.figures import itl_ms, ttft_ms
from pdactors.bench.workload import Request
from pdactors.sim.cost import StepWork
from pdactors.sim.virtual_engine import VirtualEngine
from tests.sim.conftest import some

MODES = ("colocated", "chunked", "disaggregated", "kvstore")


def settled(cluster):
    """Let what is on its way arrive, and see that nothing is held for nobody."""
    end_s = cluster.clock.now + 2
    cluster.clock.run(lambda: cluster.clock.now > end_s)
    cluster.check()
    for node in cluster.nodes.values():
        pools = [engine.pool for engine in node.engines.values()]
        assert [pool.account().used + pool.account().leased_out for pool in (*pools, node.mover.pool)] == [
            0 for _ in range(len(pools) + 1)
        ]
        assert node.mover.num_reserved == 0
        assert all(engine.engine.num_reserved == 0 for engine in node.engines.values())
    assert not cluster.dispatcher.requests
    return cluster


@pytest.mark.parametrize("mode", MODES)
def test_every_request_is_answered_in_full_and_nothing_stays_behind(make_cluster, mode):
    cluster = make_cluster(None, f"cluster.mode={mode}")
    records = cluster.run(some(60, 3.0), patience_s=100)
    assert len(records) == 60
    assert all(record.error is None for record in records)
    assert all(record.num_tokens == len(record.stamps) == (64 if record.kind == "chat" else 16) for record in records)
    assert {record.path for record in records} == {"disaggregated": {"lease"}, "kvstore": {"store"}}.get(mode, {"none"})
    settled(cluster)


@pytest.mark.parametrize("mode", MODES)
def test_the_same_seed_gives_the_same_run(make_cluster, mode):
    runs = [make_cluster(None, f"cluster.mode={mode}").run(some(40, 3.0), patience_s=100) for _ in range(2)]
    assert runs[0] == runs[1]


@pytest.mark.parametrize("mode", MODES)
def test_steps_that_are_taken_at_once_change_nothing(make_cluster, mode, monkeypatch):
    collapsed = make_cluster(None, f"cluster.mode={mode}")
    taken_at_once = collapsed.run(some(40, 2.0), patience_s=100)
    monkeypatch.setattr(VirtualEngine, "num_unchanged", lambda self, spare_blocks: 0)
    single = make_cluster(None, f"cluster.mode={mode}")
    one_by_one = single.run(some(40, 2.0), patience_s=100)
    assert [r.begin_s for r in taken_at_once] == [r.begin_s for r in one_by_one]
    for ours, theirs in zip(taken_at_once, one_by_one, strict=True):
        assert ours.stamps == pytest.approx(theirs.stamps, abs=1e-9)
    steps = {name: engine.num_steps for name, engine in collapsed.engines.items()}
    assert steps == {name: engine.num_steps for name, engine in single.engines.items()}


def test_one_request_takes_what_the_formula_says(make_cluster):
    cluster = make_cluster(None, "cluster.mode=chunked", "node.0.workers=1")
    (record,) = cluster.run([Request("one", tuple(range(600)), 3)], patience_s=100)
    cost = cluster.cost
    first = StepWork(512, 0, 0, 512 * 513 / 2, 1)
    second = StepWork(88, 1, 0, sum(range(513, 601)), 1)
    prompt_s = cost.step(first) + cost.step(second)
    assert ttft_ms(record) == pytest.approx(1000 * (prompt_s + 3 * cost.control_s + cost.request_s))
    decode_ms = [1000 * cost.step(StepWork(1, 1, context, 0, 1)) for context in (601, 602)]
    assert itl_ms(record) == pytest.approx(decode_ms)


@pytest.mark.parametrize(
    "sets", [(), ("kv.compression=int8",), ("kv.overlap=false",), ("kv.memory=110MiB",), ("router.policy=round_robin",)]
)
def test_kv_moves_between_nodes_and_nothing_stays_behind(make_cluster, two_nodes, sets):
    cluster = make_cluster(two_nodes, *sets)
    records = cluster.run(some(40, 1.0), patience_s=100)
    assert {record.path for record in records} == {"ucx"}
    assert all(record.error is None for record in records)
    settled(cluster)


@pytest.mark.parametrize("sets", [(), ("kv.memory=110MiB",)])
def test_stores_of_two_nodes_bring_each_other_what_they_lack(make_cluster, two_nodes, sets):
    cluster = make_cluster(two_nodes, "cluster.mode=kvstore", *sets)
    records = cluster.run(some(40, 1.0), patience_s=100)
    assert {record.path for record in records} == {"ucx"}
    assert all(record.error is None for record in records)
    settled(cluster)


@pytest.mark.parametrize("memory", ["40MiB", "24MiB"])
def test_a_store_makes_room_for_whoever_lacks_memory(make_cluster, memory):
    cluster = make_cluster(None, "cluster.mode=kvstore", f"kv.memory={memory}", "model.max_model_len=512")
    records = cluster.run(some(60, 30.0, "chat"), patience_s=1000)
    assert all(record.error is None for record in records)
    settled(cluster)
    (node,) = cluster.nodes.values()
    owners = [*(engine.owner for engine in node.engines.values()), node.mover.owner]
    assert [len(owner.pool.extents) for owner in owners] == [owner.num_extents for owner in owners]
    assert sum(owner.num_extents for owner in owners) <= cluster.config.kv.memory_bytes // node.layout.block_bytes
    assert node.mover.pool.account().cached > 0


def test_what_was_published_outlives_its_sequence(make_cluster):
    cluster = make_cluster(None, "cluster.mode=kvstore")
    first, second = tuple(range(320)), (*range(320), *[0] * 40, *range(40))
    asked = [Request("a", first, 41), Request("b", second, 2, at_s=60.0)]  # simulated answers are zeros
    assert [record.cached_tokens for record in cluster.run(asked, patience_s=100)] == [0, 360]


def test_a_codec_sends_less_and_overlap_hides_the_way(make_cluster, two_nodes):
    prompt = [Request("long", tuple(range(2000)), 4)]
    plain, coded, whole = (
        make_cluster(two_nodes, *sets) for sets in ((), ("kv.compression=int4",), ("kv.overlap=false",))
    )
    gaps = [itl_ms(cluster.run(prompt, patience_s=100)[0])[0] for cluster in (plain, coded, whole)]
    sent = [cluster.nodes["n0"].mover.num_bytes for cluster in (plain, coded, whole)]
    block = plain.nodes["n0"].layout.block_bytes
    assert sent == [63 * block, pytest.approx(0.375 * 63 * block, rel=1e-3), 63 * block]
    assert gaps[0] < gaps[2]
    assert gaps[1] < gaps[2]


def test_impatient_clients_cancel_and_memory_comes_back(make_cluster, two_nodes):
    cluster = make_cluster(two_nodes)
    records = cluster.run(some(60, 20.0), patience_s=3)
    lost = [record for record in records if record.error == "timeout"]
    assert 0 < len(lost) < len(records)
    settled(cluster)


def test_what_lacks_memory_is_preempted_and_still_answered(make_cluster):
    cluster = make_cluster(
        None, "cluster.mode=chunked", "node.0.workers=1", "kv.memory=40MiB", "model.max_model_len=512"
    )
    records = cluster.run(some(60, 30.0, "chat"), patience_s=1000)
    assert all(record.error is None for record in records)
    assert cluster.engines["n0/worker-0"].engine.num_preempted > 0
    settled(cluster)


def test_the_second_prompt_with_a_beginning_finds_it_unless_caches_are_hidden(make_cluster):
    prompt = tuple(range(320))
    asked = [Request("a", prompt, 2), Request("b", (*prompt, *prompt), 2, at_s=60.0)]
    found = make_cluster().run(asked, patience_s=100)
    assert [record.cached_tokens for record in found] == [0, 320]
    cluster = make_cluster(None, "node.0.prefill=2", knows_caches=False)
    assert cluster.run([asked[0], asked[1]], patience_s=100)[0].cached_tokens == 0


def test_caches_take_idle_memory_and_leave_a_sixteenth_for_needs(make_cluster):
    cluster = make_cluster(
        None, "cluster.mode=chunked", "node.0.workers=2", "kv.memory=200MiB", "model.max_model_len=512"
    )  # 284 blocks in 36 extents
    prompts = [tuple(range(1000 * i, 1000 * i + 320)) for i in range(16)]
    turns = [[Request("", ids, 2, at_s=t + 60.0 * i) for i, ids in enumerate(prompts)] for t in (0, 2000)]
    found = cluster.run(turns[0] + turns[1], patience_s=100)
    assert [record.cached_tokens for record in found] == [0] * 16 + [288] * 16
    for seed in "12":
        cluster.run(some(40, 10.0, "chat", seed), patience_s=1000)
        settled(cluster)
        given = sum(engine.pool.account().total for engine in cluster.engines.values())
        assert 31 * 8 <= given <= 34 * 8


def test_too_long_a_prompt_is_refused_as_the_gateway_does(make_cluster):
    (record,) = make_cluster().run([Request("long", (1,) * 5000, 2)], patience_s=10)
    assert record.error == "prompt_too_long"


def test_without_gaps_only_the_ends_of_an_answer_are_stamped(make_cluster):
    whole = make_cluster().run(some(20, 2.0), patience_s=100)
    ends = make_cluster(wants_gaps=False).run(some(20, 2.0), patience_s=100)
    assert [r.stamps for r in ends] == [(r.stamps[0], r.stamps[-1]) for r in whole]
    assert [r.num_tokens for r in ends] == [r.num_tokens for r in whole]
