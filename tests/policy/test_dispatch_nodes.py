"""Engines that orders do not reach, and engines of other nodes."""

from __future__ import annotations

from resuming import answered

from pdactors.messages import Generate, Load, Member, Prefill, Rejected, Sampling
from pdactors.policy.dispatch import Dispatcher, Limits
from pdactors.policy.retries import MAX_ATTEMPTS
from pdactors.token_ids import TokenIds

ENGINES = {"p0": ("prefill", "n0"), "d0": ("decode", "n0"), "p1": ("prefill", "n1"), "d1": ("decode", "n1")}


def member(name, state="ready"):
    role, node = ENGINES[name]
    return Member(name, role, node, "r0", 1, 1, state=state)


def join(dispatcher, *names):
    for name in names:
        dispatcher.joined(member(name), Load(max_sequences=4), 0.0)
    return dispatcher


def make(*names):
    return join(Dispatcher(Limits(4, 1000, 10, 100.0, b"key")), *names)


def ask(dispatcher, name="r", first=1):
    prompt = TokenIds.of(range(first, first + 9))
    return dispatcher.generate("gateway", Generate(name, prompt, Sampling(max_tokens=8)), 1.0)


def test_a_prompt_that_does_not_reach_its_engine_goes_to_another_node():
    dispatcher = make(*ENGINES)
    (order,) = ask(dispatcher)
    assert order.to == "p0"
    orders = answered(dispatcher, dispatcher.undelivered("p0", order.message, 2.0))
    assert [(o.to, o.message.attempt) for o in orders if isinstance(o.message, Prefill)] == [("p1", 2)]
    dispatcher.check()


def test_an_engine_that_was_not_reached_gets_nothing_until_it_is_heard():
    dispatcher = make("p0", "d0")
    (order,) = ask(dispatcher)
    orders = answered(dispatcher, dispatcher.undelivered("p0", order.message, 2.0))
    assert not [o for o in orders if isinstance(o.message, Prefill)]
    assert dispatcher.requests["r"].stage == "queued"
    assert ask(dispatcher, "s", 50) == []
    orders = dispatcher.joined(member("p0"), Load(max_sequences=4), 3.0)
    assert [(o.to, o.message.request) for o in orders] == [("p0", "r"), ("p0", "s")]


def test_what_cannot_be_delivered_again_and_again_is_given_up():
    dispatcher = make("p0", "d0")
    orders = ask(dispatcher)
    for _ in range(MAX_ATTEMPTS):
        (prefill,) = [o.message for o in orders if isinstance(o.message, Prefill)]
        orders = answered(dispatcher, dispatcher.undelivered("p0", prefill, 2.0))
        orders += dispatcher.joined(member("p0"), Load(max_sequences=4), 3.0)
    assert [o.message.code for o in orders if isinstance(o.message, Rejected)] == ["worker_lost"]
    assert not dispatcher.requests


def test_an_old_order_that_was_not_delivered_changes_nothing():
    dispatcher = make(*ENGINES)
    (order,) = ask(dispatcher)
    dispatcher.undelivered("p0", order.message, 2.0)
    assert dispatcher.undelivered("p0", order.message, 2.0) == []
    assert dispatcher.requests["r"].attempt == 2


def test_a_prompt_does_not_go_to_a_node_whose_decode_is_gone():
    dispatcher = make(*ENGINES)
    dispatcher.lost("d0", 1.0)
    assert [order.to for order in ask(dispatcher)] == ["p1"]


def test_a_prefix_of_another_node_is_not_lent():
    dispatcher = make(*ENGINES)
    ask(dispatcher)
    digests = dispatcher.requests["r"].digests
    for name in ("p1", "d1"):
        dispatcher.fleet.index.add(name, digests)
    dispatcher.lost("d1", 1.0)  # so that n0 must compute it
    assert [(o.to, type(o.message), o.message.prefix) for o in ask(dispatcher, "s")] == [("p0", Prefill, ())]
