"""KV that moves between nodes, as the dispatcher sees it: who is told what, and what follows from each end."""

from __future__ import annotations

import pytest
from resuming import answered

from pdactors.messages import (
    Cancel,
    Decode,
    Generate,
    KVHandle,
    Lease,
    Load,
    Member,
    Migrate,
    Migrated,
    Prefill,
    Prefilled,
    Rejected,
    Release,
    Sampling,
    Segment,
    Stranded,
)
from pdactors.policy.dispatch import Dispatcher, Limits, Order
from pdactors.policy.retries import MAX_ATTEMPTS
from pdactors.token_ids import TokenIds

PROMPT = TokenIds.of(range(10))  # two full blocks and a rest
NODES = {"p": "n0", "d": "n1", "e": "n1", "m0": "n0", "m1": "n1"}
ROLES = {"p": "prefill", "d": "decode", "e": "decode", "m": "migrator"}


def member(name, incarnation=1, state="ready"):
    return Member(name, ROLES[name[0]], NODES[name], "r0", 100, incarnation, state=state)


def join(dispatcher, name, room=1):
    if name.startswith("m"):
        return dispatcher.migrator_ready(member(name), 0.0)
    return dispatcher.joined(member(name), Load(max_sequences=room), 0.0)


def make(*names, transport="auto", overlaps=False, prunes=False):
    dispatcher = Dispatcher(Limits(4, 64, 3, 100.0, b"key", "locality", 2, transport, overlaps, "ucx", prunes))
    for name in names or ("p", "d", "m0", "m1"):
        assert join(dispatcher, name) == []
    return dispatcher


def generate(dispatcher, name="r", **fields):
    return dispatcher.generate("gateway", Generate(name, PROMPT, Sampling(max_tokens=8), **fields), 0.0)


def handle(owner, attempt=1):
    return KVHandle(NODES[owner], owner, "layout", (Segment(owner, Lease(0, attempt), 0, (1, 2, 3)),), 10)


def hand_over(dispatcher, name="r", attempt=1):
    return dispatcher.prefilled("p", Prefilled(name, attempt, 42, handle("p", attempt), 1.0), 1.0)


def migrated(dispatcher, attempt=1, sender="m1"):
    return dispatcher.migrated(sender, Migrated("r", attempt, handle("m1", attempt), 100, 0.1, "none"), 2.0)


def to_migrating(*names, **limits):
    dispatcher = make(*names, **limits)
    generate(dispatcher)
    hand_over(dispatcher)
    assert dispatcher.requests["r"].stage == "migrating"
    dispatcher.check()
    return dispatcher


def released(*names, attempt=1):
    return [Order(name, Release("r", attempt)) for name in names]


def told(orders):
    return [(order.to, type(order.message)) for order in orders]


# ---- The way --------


def test_kv_that_the_decode_engine_cannot_read_is_moved_to_its_node_first():
    dispatcher = make()
    generate(dispatcher, priority="batch", deadline_s=50.0)
    digests = dispatcher.requests["r"].digests
    assert len(digests) == 2
    assert hand_over(dispatcher) == [Order("m0", Migrate("r", 1, handle("p"), "m1", digests, "batch", 49.0))]
    (order,) = migrated(dispatcher)
    assert order.to == "d"
    assert isinstance(order.message, Decode)
    assert (order.message.handle, order.message.path) == (handle("m1"), "ucx")
    assert dispatcher.requests["r"].stage == "adopting"
    assert dispatcher.cancel(Cancel("r"), 2.0) == released("d", "m0", "m1", "p")


@pytest.mark.parametrize("names", [("p", "d"), ("p", "d", "m0"), ("p", "d", "m1")])
def test_it_waits_for_both_migrators(names):
    dispatcher = make(*names)
    generate(dispatcher)
    assert hand_over(dispatcher) == []
    assert dispatcher.requests["r"].stage == "waiting"
    orders = [order for name in ("m0", "m1") if name not in names for order in join(dispatcher, name)]
    assert told(orders) == [("m0", Migrate)]
    assert join(dispatcher, "m0") == []  # no news


def test_with_leases_only_nothing_leaves_its_node():
    dispatcher = make(transport="lease")
    generate(dispatcher)
    assert hand_over(dispatcher) == []


# ---- Chosen early --------


def test_the_decode_engine_is_chosen_early_and_keeps_a_place():
    dispatcher = make(overlaps=True)
    (order,) = generate(dispatcher)
    assert isinstance(order.message, Prefill)
    assert order.message.ship_to == "m1"
    assert dispatcher.requests.assigned["d"].num_requests == 1
    assert told(hand_over(dispatcher)) == [("m0", Migrate)]
    assert dispatcher.requests.assigned["d"].num_requests == 1
    migrated(dispatcher)
    assert dispatcher.requests.assigned["d"].num_requests == 1
    dispatcher.check()


def test_without_overlap_nothing_is_chosen_early():
    dispatcher = make()
    (order,) = generate(dispatcher)
    assert order.message.ship_to == ""
    assert "d" not in dispatcher.requests.assigned


def test_another_engine_takes_over_where_the_planned_one_is_lost():
    dispatcher = make("p", "d", "e", "m0", "m1", overlaps=True)
    generate(dispatcher)
    planned = dispatcher.requests["r"].planned
    other = {"d": "e", "e": "d"}[planned]
    assert dispatcher.lost(planned, 0.5) == []
    assert dispatcher.requests["r"].stage == "prefilling"
    assert told(hand_over(dispatcher)) == [("m0", Migrate)]
    assert dispatcher.requests["r"].decode == other


@pytest.mark.parametrize("lost", ["m0", "m1"])
def test_a_migrator_that_is_lost_while_the_prompt_is_computed_costs_nothing_but_the_head_start(lost):
    dispatcher = make(overlaps=True)
    generate(dispatcher)
    assert dispatcher.lost(lost, 0.5) == []
    assert dispatcher.requests["r"].planned == ""
    assert "d" not in dispatcher.requests.assigned
    assert hand_over(dispatcher) == []
    assert told(dispatcher.migrator_ready(member(lost, 2), 2.0)) == [("m0", Migrate)]
    assert dispatcher.cancel(Cancel("r"), 3.0) == released("d", "m0", "m1", "p")


# ---- Pruned on its way --------


def test_where_kv_is_pruned_the_prefill_passes_it_on():
    dispatcher = make(prunes=True)
    generate(dispatcher)
    digests = dispatcher.requests["r"].digests
    assert hand_over(dispatcher) == [Order("p", Migrate("r", 1, handle("p"), "m1", digests))]
    assert dispatcher.cancel(Cancel("r"), 2.0) == released("d", "m0", "m1", "p")


def test_a_prefill_that_cannot_be_told_to_prune_costs_an_attempt():
    dispatcher = to_migrating(prunes=True)
    orders = answered(dispatcher, dispatcher.undelivered("p", Migrate("r", 1, handle("p"), "m1"), 2.0))
    assert orders == released("d", "m0", "m1", "p")
    assert (dispatcher.requests["r"].attempt, dispatcher.requests["r"].stage) == (2, "queued")


def test_what_stays_on_its_node_is_not_pruned():
    dispatcher = Dispatcher(Limits(4, 64, 3, 100.0, b"key", data_transport="ucx", prunes=True))
    join(dispatcher, "p")
    near = Member("d", "decode", "n0", "r0", 100, 1, state="ready")
    dispatcher.joined(near, Load(max_sequences=1), 0.0)
    generate(dispatcher)
    (order,) = hand_over(dispatcher)
    assert (order.to, order.message.handle) == ("d", handle("p"))


# ---- When it goes wrong --------


@pytest.mark.parametrize("lost", ["p", "d", "m0", "m1"])
def test_whoever_is_lost_on_the_way_the_prompt_is_computed_again(lost):
    dispatcher = to_migrating()
    orders = answered(dispatcher, dispatcher.lost(lost, 2.0))
    rest = [name for name in ("d", "m0", "m1", "p") if name != lost]
    assert orders[:3] == released(*rest)
    request = dispatcher.requests["r"]
    assert (request.attempt, request.stage) == (2, "queued" if lost == "p" else "prefilling")
    assert migrated(dispatcher) == released("m1")  # what arrives all the same is let go
    assert dispatcher.requests["r"].attempt == 2


@pytest.mark.parametrize("sender", ["m0", "m1"])
def test_stranded_kv_is_computed_again_until_the_attempts_are_used_up(sender):
    dispatcher = to_migrating()
    for attempt in range(1, MAX_ATTEMPTS):
        orders = answered(
            dispatcher, dispatcher.stranded(sender, Stranded("r", attempt, "the wire is cut"), 2.0), now=2
        )
        assert orders[:4] == released("d", "m0", "m1", "p", attempt=attempt)
        assert told(orders[4:]) == [("p", Prefill)]
        hand_over(dispatcher, attempt=attempt + 1)
    end, *orders = dispatcher.stranded(sender, Stranded("r", MAX_ATTEMPTS, "the wire is cut"), 2.0)
    assert isinstance(end.message, Rejected)
    assert (end.to, end.message.code) == ("gateway", "worker_lost")
    assert "the wire is cut" in end.message.message
    assert orders == released("d", "m0", "m1", "p", attempt=MAX_ATTEMPTS)


def test_an_overdue_migration_is_ended():
    dispatcher = to_migrating()
    orders = dispatcher.tick(101.0)
    assert isinstance(orders[0].message, Rejected)
    assert "migrating when its time ran out" in orders[0].message.message
    assert orders[1:] == released("d", "m0", "m1", "p")


# ---- What moves nothing --------


@pytest.mark.parametrize("sender", ["m0", "p", "d", "nobody"])
def test_only_the_destination_can_say_that_it_arrived(sender):
    dispatcher = to_migrating()
    held = sender in ("m0", "p", "d")
    assert migrated(dispatcher, sender=sender) == ([] if held else [Order(sender, Release("r", 1))])
    assert dispatcher.requests["r"].stage == "migrating"
    assert dispatcher.dropped == {"Migrated": 1}


def test_what_has_arrived_once_stays_where_it_is_read():
    dispatcher = to_migrating()
    migrated(dispatcher)
    assert migrated(dispatcher) == []
    assert dispatcher.stranded("m0", Stranded("r", 1, "late"), 2.0) == []
    assert dispatcher.requests["r"].stage == "adopting"
    assert dispatcher.dropped == {"Migrated": 1, "Stranded": 1}


@pytest.mark.parametrize(("sender", "attempt"), [("p", 1), ("d", 1), ("m0", 0), ("m0", 2)])
def test_only_its_migrators_strand_it(sender, attempt):
    dispatcher = to_migrating()
    assert dispatcher.stranded(sender, Stranded("r", attempt, "?"), 2.0) == []
    assert dispatcher.requests["r"].stage == "migrating"
