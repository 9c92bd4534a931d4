"""Mode kvstore as the dispatcher sees it: the store hands prompts over, and who computed them may go."""

from __future__ import annotations

from collections import Counter

import pytest
from resuming import answered

from pdactors.messages import (
    CacheChanged,
    Cancel,
    Decode,
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
    Release,
    Sampling,
    Segment,
    Stranded,
)
from pdactors.policy.borrowing import PULL_TIMEOUT_S
from pdactors.policy.dispatch import Dispatcher, Limits, Order
from pdactors.token_ids import TokenIds

BLOCK = 4
STORE = "n0/migrator"
NODES = {"p": "n0", "q": "n0", "d": "n0", "e": "n1", STORE: "n0", "n1/migrator": "n1"}
ROLES = {"p": "prefill", "q": "prefill", "d": "decode", "e": "decode", "n": "migrator"}


def join(dispatcher, name, room=4):
    member = Member(name, ROLES[name[0]], NODES[name], "r0", 100, 1, state="ready")
    if member.role == "migrator":
        return dispatcher.migrator_ready(member, 0.0)
    return dispatcher.joined(member, Load(max_sequences=room), 0.0)


def make(*names, room=4):
    limits = Limits(BLOCK, 64, 8, 100.0, b"key", overlaps=False, data_transport="ucx", has_store=True, pulls=True)
    dispatcher = Dispatcher(limits)
    for name in names or ("p", "d", STORE):
        assert join(dispatcher, name, room) == []
    return dispatcher


def generate(dispatcher, name="r", tokens=range(10), priority="interactive"):
    ask = Generate(name, TokenIds.of(tokens), Sampling(max_tokens=8), priority)
    return dispatcher.generate("gateway", ask, 0.0)


def hand_over(dispatcher, name="r", attempt=1, sender=STORE):
    segment = Segment(sender, Lease(0, attempt), 0, (1, 2, 3))
    handle = KVHandle("n0", sender, "layout", (segment,), 10)
    return dispatcher.prefilled(sender, Prefilled(name, attempt, 42, handle, 1.0), 1.0)


def told(orders):
    return [(order.to, type(order.message)) for order in orders]


def stage(dispatcher, name="r"):
    dispatcher.check()
    return dispatcher.requests[name].stage


def test_the_store_hands_over_and_the_prefills_part_is_over():
    dispatcher = make()
    generate(dispatcher)
    release, decode = hand_over(dispatcher)
    assert release == Order("p", Release("r", 1))
    assert (decode.to, decode.message.handle.owner, decode.message.path) == ("d", STORE, "store")
    assert dispatcher.is_idle("p")
    assert dispatcher.cancel(Cancel("r"), 2.0) == [Order(name, Release("r", 1)) for name in ("d", STORE)]


def test_a_prefill_that_cannot_reach_the_store_lends_the_prompt_itself():
    dispatcher = make()
    generate(dispatcher)
    (decode,) = hand_over(dispatcher, sender="p")
    assert (decode.to, decode.message.path) == ("d", "lease")
    assert not dispatcher.is_idle("p")


@pytest.mark.parametrize("sender", ["q", "n1/migrator", "d"])
def test_nobody_else_hands_over(sender):
    dispatcher = make("p", "q", "d", STORE)
    generate(dispatcher)
    assert told(hand_over(dispatcher, sender=sender)) == [(sender, Release)]
    assert stage(dispatcher) == "prefilling"


def test_the_loss_of_a_prefill_changes_nothing_once_the_store_has_the_prompt():
    dispatcher = make("p", STORE)
    generate(dispatcher)
    assert told(hand_over(dispatcher)) == [("p", Release)]
    assert stage(dispatcher) == "waiting"
    assert dispatcher.lost("p", 2.0) == []
    assert told(join(dispatcher, "d")) == [("d", Decode)]


def test_a_store_that_is_lost_takes_along_what_it_holds_or_was_just_given():
    dispatcher = make("p", STORE)
    generate(dispatcher, "a")
    generate(dispatcher, "b", range(20, 30))
    hand_over(dispatcher, "a")
    orders = answered(dispatcher, dispatcher.lost(STORE, 2.0))
    assert Counter(told(orders)) == {("p", Prefill): 2, ("p", Release): 1}
    assert [dispatcher.requests[name].attempt for name in "ab"] == [2, 2]
    dispatcher.check()


def test_what_the_store_cannot_take_is_computed_again():
    dispatcher = make()
    generate(dispatcher)
    orders = answered(dispatcher, dispatcher.stranded(STORE, Stranded("r", 1, "all lease records are in use"), 1.0))
    assert told(orders) == [("p", Release), ("p", Prefill)]
    assert dispatcher.stranded(STORE, Stranded("r", 1, "late"), 1.0) == []
    assert dispatcher.stranded("n1/migrator", Stranded("r", 2, "not its own"), 1.0) == []
    assert stage(dispatcher) == "prefilling"


def test_to_another_node_kv_moves_from_store_to_store():
    dispatcher = make("p", "e", STORE, "n1/migrator")
    generate(dispatcher)
    release, migrate = hand_over(dispatcher)
    assert told([release, migrate]) == [("p", Release), (STORE, Migrate)]
    assert (migrate.message.handle.owner, migrate.message.target) == (STORE, "n1/migrator")


def test_what_waits_in_the_store_counts_as_if_it_was_at_its_prefill():
    dispatcher = make("p", STORE, room=2)
    for i in range(2):
        generate(dispatcher, f"r{i}", range(50 * i, 50 * i + 10))
        hand_over(dispatcher, f"r{i}")
    assert generate(dispatcher, "r2", range(100, 110)) == []
    assert stage(dispatcher, "r2") == "queued"


# ---- Prompts with a common beginning --------


def in_store(dispatcher, name):
    dispatcher.cache_changed(STORE, CacheChanged(dispatcher.requests[name].digests))


@pytest.mark.parametrize("engines", [("p",), ("p", "q")])
def test_one_that_begins_like_another_waits_until_the_store_has_that(engines):
    dispatcher = make(*engines, "d", STORE)
    generate(dispatcher, "a")
    assert generate(dispatcher, "b", [*range(9), 77]) == []
    assert stage(dispatcher, "b") == "held"
    in_store(dispatcher, "a")
    orders = hand_over(dispatcher, "a")
    assert told(orders) == [("p", Release), ("d", Decode), (STORE, Pin)]
    assert orders[-1].message == Pin("b", 1, 0, dispatcher.requests["a"].digests)


def test_one_with_little_in_common_does_not_wait():
    dispatcher = make()
    generate(dispatcher, "a", range(20))
    assert told(generate(dispatcher, "b", [*range(8), *range(70, 80)])) == [("p", Prefill)]


def test_an_urgent_one_does_not_wait_for_one_that_is_not():
    dispatcher = make()
    generate(dispatcher, "a", priority="batch")
    assert told(generate(dispatcher, "b")) == [("p", Prefill)]


@pytest.mark.parametrize("end", ["cancel", "lost", "stranded"])
def test_those_that_wait_go_on_when_the_first_does_not(end):
    dispatcher = make("p", "q", "d", STORE)
    generate(dispatcher, "a")
    generate(dispatcher, "b")
    generate(dispatcher, "c")
    first = dispatcher.requests["a"].prefill
    assert [stage(dispatcher, name) for name in "bc"] == ["held", "held"]
    if end == "cancel":
        orders = dispatcher.cancel(Cancel("a"), 1.0)
    elif end == "lost":
        orders = dispatcher.lost(first, 1.0)
    else:
        orders = dispatcher.stranded(STORE, Stranded("a", 1, "no room"), 1.0)
    assert [order.message.request for order in orders if isinstance(order.message, Prefill)] == ["b"]
    assert sorted(request.stage for request in dispatcher.requests.values())[:1] == ["held"]
    dispatcher.check()


def test_one_that_waits_can_be_cancelled_and_times_out():
    dispatcher = make()
    for name in "abc":
        generate(dispatcher, name)
    assert dispatcher.cancel(Cancel("b"), 1.0) == []
    dispatcher.check()
    dispatcher.tick(200.0)
    assert not dispatcher.requests
    dispatcher.check()


# ---- What another node's store has --------

OTHER = "n1/migrator"


def pulling(*engines, digests=2):
    """A request whose first blocks the other node's store has; it was asked for them."""
    dispatcher = make("p", "d", *engines, STORE, OTHER)
    generate(dispatcher, "first")
    dispatcher.cache_changed(OTHER, CacheChanged(dispatcher.requests["first"].digests[:digests]))
    dispatcher.cancel(Cancel("first"), 0.0)
    (pin,) = generate(dispatcher)
    assert pin == Order(OTHER, Pin("r", 1, 0, dispatcher.requests["r"].digests[:digests]))
    return dispatcher


def lent(dispatcher, count=2, owner=OTHER):
    segment = Segment(owner, Lease(5, 1), 0, tuple(range(count))) if count else None
    return dispatcher.pinned(owner, Pinned("r", 1, 0, segment), 0.5)


def arrived(dispatcher, count=2, sender=STORE):
    handle = KVHandle("n0", sender, "", (Segment(sender, Lease(9, 1), 0, tuple(range(count))),), count * BLOCK)
    return dispatcher.migrated(sender, Migrated("r", 1, handle, 100, 0.1, "none"), 1.0)


@pytest.mark.parametrize("count", [2, 1])
def test_what_another_nodes_store_has_is_brought_before_the_rest_is_computed(count):
    dispatcher = pulling()
    (migrate,) = lent(dispatcher, count)
    assert migrate.to == OTHER
    assert migrate.message.target == STORE
    assert (migrate.message.handle.owner, migrate.message.handle.num_tokens) == ("", count * BLOCK)
    assert migrate.message.digests == dispatcher.requests["r"].digests[:count]
    assert stage(dispatcher) == "pinning"
    (prefill,) = arrived(dispatcher, count)
    assert (prefill.to, prefill.message.prefix_tokens) == ("p", count * BLOCK)
    assert [segment.owner for segment in prefill.message.prefix] == [STORE]
    assert stage(dispatcher) == "prefilling"
    assert dispatcher.cancel(Cancel("r"), 2.0) == [Order(name, Release("r", 1)) for name in (STORE, OTHER, "p")]


@pytest.mark.parametrize("when", ["nothing lent", "stranded", "source lost", "late", "unreachable"])
def test_when_nothing_comes_from_there_what_the_own_store_has_is_borrowed(when):
    dispatcher = pulling()
    dispatcher.cache_changed(STORE, CacheChanged(dispatcher.requests["r"].digests[:1]))
    if when == "nothing lent":
        orders = lent(dispatcher, 0)
    else:
        (migrate,) = lent(dispatcher)
        if when == "stranded":
            orders = dispatcher.stranded(OTHER, Stranded("r", 1, "it broke"), 1.0)
        elif when == "source lost":
            orders = dispatcher.lost(OTHER, 1.0)
        elif when == "late":
            assert dispatcher.tick(PULL_TIMEOUT_S) == []
            orders = dispatcher.tick(PULL_TIMEOUT_S + 1)
        else:
            orders = dispatcher.undelivered(OTHER, migrate.message, 1.0)
    assert told(orders) == [(STORE, Pin)]
    assert orders[0].message.digests == dispatcher.requests["r"].digests[:1]
    assert stage(dispatcher) == "pinning"
    assert arrived(dispatcher) == []  # late
    assert stage(dispatcher) == "pinning"
    assert told(lent(dispatcher, 1, STORE)) == [("p", Prefill)]


def test_what_the_own_store_has_too_is_not_brought():
    dispatcher = make("p", "d", STORE, OTHER)
    generate(dispatcher, "first")
    digests = dispatcher.requests["first"].digests
    for store in (STORE, OTHER):
        dispatcher.cache_changed(store, CacheChanged(digests))
    dispatcher.cancel(Cancel("first"), 0.0)
    assert told(generate(dispatcher)) == [(STORE, Pin)]
