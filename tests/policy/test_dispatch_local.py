"""Prompts of which little is left to compute go to the engine that decodes them (router.local_prefill_tokens)."""

from __future__ import annotations

import pytest
from resuming import answered

from pdactors.kv.prefix import chain
from pdactors.messages import (
    CacheChanged,
    Failed,
    Finished,
    Generate,
    Load,
    Member,
    Pin,
    Pinned,
    Prefill,
    Release,
    Sampling,
    Stranded,
)
from pdactors.policy.dispatch import Dispatcher, Limits, Order
from pdactors.token_ids import TokenIds

BLOCK, LOCAL, KEY = 4, 8, b"key"
ROLES = {"p": "prefill", "d": "decode", "e": "decode", "n": "migrator"}
LONG = tuple(range(100, 140))
DIGESTS = tuple(chain(LONG, BLOCK, KEY))


def join(dispatcher, name, room=2, state="ready"):
    member = Member(name, ROLES[name[0]], "n0", "r0", 100, 1, state=state)
    if member.role == "migrator":
        return dispatcher.migrator_ready(member, 0.0)
    return dispatcher.joined(member, Load(max_sequences=room), 0.0)


def make(*names, local=LOCAL, has_store=False):
    limits = Limits(BLOCK, 64, 8, 100.0, KEY, has_store=has_store, local_prefill_tokens=local)
    dispatcher = Dispatcher(limits)
    for name in names or ("p", "d"):
        assert join(dispatcher, name) == []
    return dispatcher


def generate(dispatcher, name="r", tokens=range(LOCAL), priority="interactive"):
    ask = Generate(name, TokenIds.of(tokens), Sampling(max_tokens=8), priority)
    return [(order.to, type(order.message)) for order in dispatcher.generate("gateway", ask, 0.0)]


@pytest.mark.parametrize(
    ("num_tokens", "local", "to"), [(LOCAL, LOCAL, "d"), (LOCAL + 1, LOCAL, "p"), (1, 0, "p"), (1, 1, "d")]
)
def test_short_prompts_go_to_decode_and_longer_ones_do_not(num_tokens, local, to):
    dispatcher = make(local=local)
    assert generate(dispatcher, tokens=range(num_tokens)) == [(to, Prefill)]
    dispatcher.check()


def test_it_ends_where_it_began():
    dispatcher = make()
    generate(dispatcher)
    assert dispatcher.requests["r"].stage == "prefilling"
    assert dispatcher.finished("d", Finished("r", 1, 8), 1.0) == [Order("d", Release("r", 1))]
    assert not dispatcher.requests
    assert not dispatcher.dropped


def test_what_counts_is_what_is_not_cached():
    """The decode engine has the conversation so far, and its last turn is short."""
    dispatcher = make()
    dispatcher.cache_changed("d", CacheChanged(DIGESTS))
    assert generate(dispatcher, tokens=(*LONG, *range(LOCAL))) == [("d", Prefill)]
    assert generate(dispatcher, "s", tokens=(*LONG, *range(50, 51 + LOCAL))) == [("d", Pin)]  # p borrows it
    dispatcher.check()


def test_what_a_neighbour_has_is_borrowed_and_the_rest_computed_by_decode():
    dispatcher = make()
    dispatcher.cache_changed("p", CacheChanged(DIGESTS))
    assert generate(dispatcher, tokens=(*LONG, *range(LOCAL))) == [("p", Pin)]
    assert dispatcher.requests["r"].prefill == "d"
    orders = dispatcher.pinned("p", Pinned("r", 1, 0), 0.0)  # it has it no more: decode computes all of it
    assert [(order.to, type(order.message)) for order in orders] == [("d", Prefill)]


def test_of_several_the_one_that_has_it_takes_it_then_the_one_with_least_to_compute():
    dispatcher = make("p", "d", "e")
    dispatcher.cache_changed("e", CacheChanged(tuple(chain(range(LOCAL), BLOCK, KEY))))
    for name in ("a", "b"):
        generate(dispatcher, name)
    assert [dispatcher.requests[name].prefill for name in ("a", "b")] == ["e", "d"]  # d borrows what e has
    assert generate(make("p", "d", "e"), "c") == [("d", Prefill)]


def test_full_decode_engines_leave_it_to_prefill():
    dispatcher = make()
    assert [generate(dispatcher, name)[0][0] for name in ("a", "b", "c")] == ["d", "d", "p"]
    dispatcher.check()


def test_a_draining_decode_engine_gets_none():
    dispatcher = make()
    join(dispatcher, "d", state="draining")
    assert generate(dispatcher) == [("p", Prefill)]


def test_a_lost_decode_engine_has_it_begun_again_after_what_the_client_has():
    dispatcher = make("p", "d", "e")
    generate(dispatcher)
    orders = answered(dispatcher, dispatcher.lost("d", 1.0), 7, 7)
    (order,) = orders
    assert (order.to, type(order.message), order.message.attempt) == ("p", Prefill, 2)  # ten tokens are left by now
    assert order.message.generated == TokenIds.of([7, 7])


def test_an_engine_that_fails_ends_it():
    dispatcher = make()
    generate(dispatcher)
    orders = dispatcher.failed("d", Failed("r", 1, "model", "broken"), 1.0)
    assert [order.to for order in orders] == ["gateway", "d"]
    assert not dispatcher.requests


def test_the_store_has_no_part_in_it():
    """It is handed nothing, so neither its loss nor its word ends anything."""
    dispatcher = make("p", "d", "n0/migrator", has_store=True)
    assert generate(dispatcher) == [("d", Prefill)]
    assert dispatcher.stranded("n0/migrator", Stranded("r", 1, "no"), 1.0) == []
    assert dispatcher.lost("n0/migrator", 1.0) == []
    assert (dispatcher.requests["r"].stage, dispatcher.requests["r"].attempt) == ("prefilling", 1)
