"""Each arrow of a request's automaton, and what does not move it."""

from __future__ import annotations

import pytest

from pdactors.errors import InvariantError
from pdactors.messages import (
    Adopted,
    Cancel,
    Decode,
    Failed,
    Finished,
    Generate,
    KVHandle,
    Lease,
    Load,
    Member,
    Prefill,
    Prefilled,
    Rejected,
    Release,
    Resume,
    Sampling,
    Segment,
)
from pdactors.policy.dispatch import Dispatcher, Limits, Order
from pdactors.policy.requests import Stage
from pdactors.policy.retries import ASK_AGAIN_S, MAX_ATTEMPTS, backoff_s
from pdactors.token_ids import TokenIds

GATEWAY = "gateway"
SAMPLING = Sampling(max_tokens=8, seed=3)


def member(name, node="n0", state="ready", incarnation=1):
    role = "prefill" if name.startswith("p") else "decode"
    return Member(name, role, node, "r0", 100, incarnation, state=state)


def load(room=4, max_blocks=0):
    return Load(max_sequences=room, max_blocks=max_blocks)


def make(*engines, room=4, **limits):
    settings = {"block_tokens": 4, "max_model_len": 64, "max_queue": 3, "request_timeout_s": 100.0}
    dispatcher = Dispatcher(Limits(**{**settings, "prefix_key": b"key", **limits}))
    for name in engines:
        assert dispatcher.joined(member(name), load(room), 0.0) == []
    return dispatcher


def prompt(name="r", num_tokens=5):
    """Return a prompt that has nothing in common with others'."""
    return TokenIds.of([int.from_bytes(name.encode()[-2:]), *range(1, num_tokens)])


def ask(name="r", num_tokens=5, **fields):
    return Generate(name, prompt(name, num_tokens), SAMPLING, **fields)


def prefilled(name="r", attempt=1):
    handle = KVHandle("n0", "p", "layout", (Segment("p", Lease(0, 1), 0, (1, 2)),), 5)
    return Prefilled(name, attempt, 42, handle, 1.0)


def to_stage(stage, *engines, name="r", **limits):
    """Return a dispatcher with one request in `stage`, on p and d."""
    dispatcher = make(*(engines or ("p", "d")), **limits)
    dispatcher.generate(GATEWAY, ask(name), 0.0)
    if stage == "waiting":
        dispatcher.joined(member("d", state="draining"), load(), 0.0)
    if stage in ("waiting", "adopting", "decoding"):
        dispatcher.prefilled("p", prefilled(name), 1.0)
    if stage == "decoding":
        dispatcher.adopted("d", Adopted(name, 1))
    assert dispatcher.requests[name].stage == stage
    dispatcher.check()
    return dispatcher


EARLY = ["queued", "pinning"]
STAGES = ["prefilling", "waiting", "adopting", "decoding"]
HOLDERS = {"prefilling": ["p"], "waiting": ["p"], "adopting": ["d", "p"], "decoding": ["d", "p"]}


def releases(stage, without="", attempt=1):
    return [Order(name, Release("r", attempt)) for name in HOLDERS[stage] if name != without]


def resume(dispatcher, *generated, attempt=2, now=1.0):
    """Have the gateway say what the client of r has."""
    return dispatcher.resume(GATEWAY, Resume("r", attempt, TokenIds.of(generated)), now)


def asked(attempt=2):
    """What the gateway is told when an attempt was lost."""
    return Order(GATEWAY, Resume("r", attempt))


# ---- The way of a request --------


def test_a_request_goes_to_prefill_when_it_comes():
    dispatcher = make("p", "d")
    orders = dispatcher.generate(GATEWAY, ask(priority="batch", save_final_kv=False), 0.0)
    assert orders == [Order("p", Prefill("r", 1, prompt(), SAMPLING, "batch", False))]
    assert dispatcher.requests["r"].stage == "prefilling"


def test_a_prefilled_request_goes_to_decode_with_its_handle():
    dispatcher = to_stage("prefilling")
    done = prefilled()
    assert dispatcher.prefilled("p", done, 1.0) == [
        Order("d", Decode("r", 1, prompt(), TokenIds.of([42]), SAMPLING, done.handle, 1.0, path_reason="same memory"))
    ]
    assert dispatcher.requests["r"].stage == "adopting"


def test_adoption_and_end():
    dispatcher = to_stage("adopting")
    assert dispatcher.adopted("d", Adopted("r", 1)) == []
    assert dispatcher.requests["r"].stage == "decoding"
    assert dispatcher.finished("d", Finished("r", 1, 8), 2.0) == releases("decoding")  # d too: it may lend something
    assert not dispatcher.requests
    assert not dispatcher.dropped


def test_a_request_can_end_at_its_prefill():
    dispatcher = to_stage("prefilling")
    assert dispatcher.finished("p", Finished("r", 1, 1), 2.0) == releases("prefilling")
    assert not dispatcher.requests


def test_a_request_waits_for_an_engine_and_goes_when_one_joins():
    dispatcher = make()
    assert dispatcher.generate(GATEWAY, ask(), 0.0) == []
    assert dispatcher.requests["r"].stage == "queued"
    assert dispatcher.joined(member("p", state="starting"), load(), 0.0) == []
    assert [order.to for order in dispatcher.joined(member("p"), load(), 0.0)] == ["p"]


def test_a_prefilled_request_waits_for_decode_and_goes_when_there_is_room():
    dispatcher = make("p", "d", room=1)
    dispatcher.generate(GATEWAY, ask("a"), 0.0)
    dispatcher.prefilled("p", prefilled("a"), 0.0)
    dispatcher.generate(GATEWAY, ask("b"), 0.0)
    assert dispatcher.prefilled("p", prefilled("b"), 0.0) == []
    assert dispatcher.requests["b"].stage == "waiting"
    dispatcher.adopted("d", Adopted("a", 1))
    orders = dispatcher.finished("d", Finished("a", 1, 3), 1.0)
    assert [(order.to, type(order.message)) for order in orders] == [("d", Release), ("p", Release), ("d", Decode)]


def test_all_that_wait_go_when_there_is_room_for_all():
    dispatcher = make("p")
    for name in ("a", "b", "c"):
        dispatcher.generate(GATEWAY, ask(name), 0.0)
        dispatcher.prefilled("p", prefilled(name), 0.0)
    orders = dispatcher.joined(member("d"), load(), 0.0)
    assert [order.message.request for order in orders] == ["a", "b", "c"]


def test_what_waits_for_decode_keeps_its_place_at_the_prefill():
    dispatcher = to_stage("waiting", room=1)
    assert dispatcher.generate(GATEWAY, ask("next"), 0.0) == []
    orders = dispatcher.joined(member("d"), load(1), 1.0)
    assert [(order.to, type(order.message)) for order in orders] == [("d", Decode), ("p", Prefill)]


def test_interactive_goes_before_batch_and_older_before_younger():
    dispatcher = make("d")
    for name, priority in [("a", "batch"), ("b", "interactive"), ("c", "interactive")]:
        dispatcher.generate(GATEWAY, ask(name, priority=priority), 0.0)
    orders = dispatcher.joined(member("p"), load(), 0.0)
    assert [order.message.request for order in orders] == ["b", "c", "a"]


def test_decode_room_goes_to_the_oldest_of_all_prefills():
    dispatcher = make("p0", "p1", room=4)
    for name in ("a", "b", "c"):
        dispatcher.generate(GATEWAY, ask(name), 0.0)
    for name in ("c", "b", "a"):
        dispatcher.prefilled(dispatcher.requests[name].prefill, prefilled(name), 0.0)
    orders = dispatcher.joined(member("d"), load(2), 0.0)
    assert [order.message.request for order in orders] == ["a", "b"]


def test_one_that_cannot_reach_a_decode_does_not_hold_up_another_node():
    dispatcher = make()
    for name, node in (("p0", "n0"), ("p1", "n1")):
        dispatcher.joined(member(name, node), load(1), 0.0)
        dispatcher.generate(GATEWAY, ask(f"on {node}"), 0.0)
        dispatcher.prefilled(name, prefilled(f"on {node}"), 0.0)
    orders = dispatcher.joined(member("d", "n1"), load(), 0.0)
    assert [order.message.request for order in orders] == ["on n1"]
    assert dispatcher.requests["on n0"].stage == "waiting"


def test_load_is_spread_by_prompt_tokens_before_any_heartbeat():
    dispatcher = make("p0", "p1", "d")
    sizes = {"a": 30, "b": 10, "c": 10, "d": 10}
    to = [dispatcher.generate(GATEWAY, ask(name, size), 0.0)[0].to for name, size in sizes.items()]
    assert to == ["p0", "p1", "p1", "p1"]


# ---- Refusals --------


def test_a_prompt_without_room_for_an_answer_is_too_long():
    dispatcher = make("p", "d")
    (order,) = dispatcher.generate(GATEWAY, ask(num_tokens=64), 0.0)
    assert order == Order(GATEWAY, Rejected("r", "prompt_too_long", order.message.message))
    assert "64" in order.message.message
    assert dispatcher.generate(GATEWAY, ask(num_tokens=63), 0.0)[0].to == "p"


def test_what_the_memory_of_no_engine_holds_is_refused():
    dispatcher = make("p", "d", "d1")
    dispatcher.joined(member("p"), load(max_blocks=2), 0.0)  # does not carry it to its end
    dispatcher.joined(member("d"), load(max_blocks=2), 0.0)
    dispatcher.joined(member("d1"), load(max_blocks=3), 0.0)
    assert dispatcher.generate(GATEWAY, ask("a", 12), 0.0)[0].message.code == "prompt_too_long"
    assert dispatcher.generate(GATEWAY, ask("b", 6), 0.0)[0].message.code == "bad_request"
    assert dispatcher.generate(GATEWAY, ask("c", 5), 0.0)[0].to == "p"


def test_a_full_queue_refuses_and_says_when_to_come_back():
    dispatcher = make("p", "d", room=1)
    for i in range(4):
        dispatcher.generate(GATEWAY, ask(f"r{i}"), 0.0)
    (order,) = dispatcher.generate(GATEWAY, ask("late"), 0.0)
    assert (order.to, order.message.code, order.message.retry_after_s) == (GATEWAY, "overloaded", 1.0)
    assert "late" not in dispatcher.requests


def test_retry_after_is_the_queue_over_the_rate_of_late():
    dispatcher = make("p", "d", room=1, max_queue=2)
    for i in range(1, 5):
        dispatcher.generate(GATEWAY, ask(f"r{i}"), float(i))
        dispatcher.finished("p", Finished(f"r{i}", 1, 1), float(i))
    for i in range(3):
        dispatcher.generate(GATEWAY, ask(f"s{i}"), 4.0)
    (order,) = dispatcher.generate(GATEWAY, ask("late"), 5.0)
    assert order.message.retry_after_s == 2.0  # 4 ended in 4 s, 2 wait


def test_a_request_that_is_there_already_is_dropped():
    dispatcher = to_stage("prefilling")
    assert dispatcher.generate(GATEWAY, ask(), 0.0) == []
    assert dispatcher.dropped == {"Generate": 1}


# ---- Other ends --------


@pytest.mark.parametrize("stage", STAGES)
def test_cancel_releases_every_holder(stage):
    dispatcher = to_stage(stage)
    assert dispatcher.cancel(Cancel("r"), 1.0) == releases(stage)
    assert not dispatcher.requests


def test_cancel_of_a_queued_request_tells_nobody():
    dispatcher = make()
    dispatcher.generate(GATEWAY, ask(), 0.0)
    assert dispatcher.cancel(Cancel("r"), 1.0) == []
    assert not dispatcher.requests


@pytest.mark.parametrize(
    ("stage", "sender"), [("prefilling", "p"), ("waiting", "p"), ("adopting", "d"), ("decoding", "d")]
)
def test_a_failure_reaches_the_gateway_and_every_holder(stage, sender):
    dispatcher = to_stage(stage)
    orders = dispatcher.failed(sender, Failed("r", 1, "model", "p: broken"), 1.0)
    assert orders == [Order(GATEWAY, Rejected("r", "model", "p: broken")), *releases(stage)]
    assert not dispatcher.requests


@pytest.mark.parametrize("stage", STAGES)
def test_a_request_that_is_overdue_ends_with_the_stage_that_it_was_in(stage):
    dispatcher = to_stage(stage)
    assert dispatcher.tick(100.0) == []
    orders = dispatcher.tick(100.5)
    assert orders[0].message.code == "timeout"
    assert orders[0].message.message == f"{stage} when its time ran out after 100.5 s"
    assert orders[1:] == releases(stage)


def test_a_requests_own_deadline_may_be_sooner_but_not_later():
    dispatcher = make("p", "d")
    dispatcher.generate(GATEWAY, ask("soon", deadline_s=10.0), 0.0)
    dispatcher.generate(GATEWAY, ask("late", deadline_s=1e9), 0.0)
    assert [order.message.request for order in dispatcher.tick(11.0)] == ["soon", "soon"]
    assert [order.message.request for order in dispatcher.tick(101.0)] == ["late", "late"]


def test_room_that_a_timeout_makes_is_used():
    dispatcher = make("p", "d", room=1)
    dispatcher.generate(GATEWAY, ask("a", deadline_s=1.0), 0.0)
    dispatcher.generate(GATEWAY, ask("b"), 0.0)
    orders = dispatcher.tick(2.0)
    assert [(order.to, order.message.request) for order in orders] == [(GATEWAY, "a"), ("p", "a"), ("p", "b")]


# ---- Losses --------


@pytest.mark.parametrize("stage", ["prefilling", "waiting"])
def test_a_lost_prefill_costs_an_attempt_not_the_request(stage):
    dispatcher = to_stage(stage, "p", "p1", "d")
    assert dispatcher.lost("p", 1.0) == [asked()]
    dispatcher.check()
    (order,) = resume(dispatcher)
    assert (order.to, order.message) == ("p1", Prefill("r", 2, prompt(), SAMPLING))
    dispatcher.check()


@pytest.mark.parametrize("stage", ["prefilling", "waiting"])
def test_the_requests_of_a_lost_prefill_that_was_the_only_one_wait_for_its_successor(stage):
    dispatcher = to_stage(stage)
    assert dispatcher.lost("p", 1.0) == [asked()]
    assert resume(dispatcher) == []
    request = dispatcher.requests["r"]
    assert (request.stage, request.attempt, request.prefilled, request.holders) == ("queued", 2, None, set())
    dispatcher.check()
    (order,) = dispatcher.joined(member("p", incarnation=2), load(), 1.5)
    assert (order.to, type(order.message), order.message.attempt) == ("p", Prefill, 2)
    dispatcher.check()


def test_a_request_whose_lost_prefill_has_no_successor_ends_by_its_deadline():
    dispatcher = to_stage("prefilling")
    dispatcher.lost("p", 1.0)
    resume(dispatcher)
    (order,) = dispatcher.tick(100.5)
    assert (order.to, order.message.code) == (GATEWAY, "timeout")
    assert order.message.message == "queued when its time ran out after 100.5 s"


def test_a_request_whose_prefill_was_lost_is_queued_before_the_younger():
    dispatcher = to_stage("prefilling", "p", "p1", "d", room=1)
    dispatcher.generate(GATEWAY, ask("other"), 0.5)
    dispatcher.generate(GATEWAY, ask("younger"), 0.5)
    assert dispatcher.lost("p", 1.0) == [asked()]
    assert resume(dispatcher) == []
    (order,) = dispatcher.joined(member("p", incarnation=2), load(1), 2.0)
    assert (order.message.request, order.message.attempt) == ("r", 2)


def test_attempts_are_counted_pause_longer_and_longer_and_end():
    dispatcher = to_stage("prefilling", "p", "p1", "d", room=1)
    dispatcher.generate(GATEWAY, ask("other"), 0.5)  # keeps p1 busy
    now = 1.0
    for i in range(2, MAX_ATTEMPTS + 1):
        orders = dispatcher.lost("p", now)
        if pause := backoff_s(i):
            assert orders == dispatcher.tick(now + 0.9 * pause) == []
            now += pause
            orders = dispatcher.tick(now)
        assert orders == [asked(i)]
        assert resume(dispatcher, attempt=i, now=now) == []
        assert dispatcher.joined(member("p", incarnation=i), load(1), now)[0].message.attempt == i
    (order,) = dispatcher.lost("p", now)
    assert (order.to, order.message.code) == (GATEWAY, "worker_lost")
    assert set(dispatcher.requests) == {"other"}
    assert 0 == backoff_s(2) < backoff_s(3) < backoff_s(4)


@pytest.mark.parametrize("stage", ["adopting", "decoding"])
def test_the_requests_of_a_lost_decode_go_on_after_what_their_clients_have(stage):
    dispatcher = to_stage(stage, "p", "d", "d1")
    loser = dispatcher.requests["r"].decode
    released, question = dispatcher.lost(loser, 1.0)
    assert released == Order("p", Release("r", 1))
    assert question == asked()
    (order,) = resume(dispatcher, 42, 7, 8)
    assert order == Order("p", Prefill("r", 2, prompt(), SAMPLING, generated=TokenIds.of([42, 7, 8])))
    (order,) = dispatcher.prefilled("p", prefilled(attempt=2), 2.0)
    assert (order.to, type(order.message)) == (({"d", "d1"} - {loser}).pop(), Decode)
    assert list(order.message.generated) == [42, 7, 8, 42]
    dispatcher.check()


def test_what_was_generated_is_found_in_prefix_caches_and_counted_as_work():
    dispatcher = to_stage("decoding", "p", "p1", "d")
    dispatcher.lost("d", 1.0)
    resume(dispatcher, *range(10))
    request = dispatcher.requests["r"]
    assert len(request.digests) == (5 + 10 - 1) // 4
    assert dispatcher.requests.assigned[request.prefill].num_tokens == 15


def test_a_gateway_that_does_not_answer_is_asked_again_and_only_it_is_heard():
    dispatcher = to_stage("decoding")
    assert asked() in dispatcher.lost("d", 1.0)
    assert dispatcher.tick(1.0 + ASK_AGAIN_S / 2) == []
    assert dispatcher.tick(1.0 + ASK_AGAIN_S) == [asked()]
    assert dispatcher.resume("other", Resume("r", 2), 2.0) == []
    assert resume(dispatcher, attempt=1) == resume(dispatcher, attempt=3) == []
    assert dispatcher.requests["r"].stage == "resuming"
    (order,) = resume(dispatcher)
    assert order.message.attempt == 2
    assert resume(dispatcher) == []
    assert dispatcher.dropped == {"Resume": 4}


def test_an_engine_that_lost_what_it_read_costs_an_attempt():
    dispatcher = to_stage("adopting")
    orders = dispatcher.failed("d", Failed("r", 1, "worker_lost", "the lease has ended"), 1.0)
    assert orders == [*releases("adopting"), asked()]


def test_a_request_that_comes_with_an_attempt_goes_on_from_there_and_is_not_turned_away():
    dispatcher = make("p", "d", max_queue=1, room=1)
    for name in ("a", "b"):
        dispatcher.generate(GATEWAY, ask(name), 0.0)
    assert dispatcher.generate(GATEWAY, ask("c"), 0.0)[0].message.code == "overloaded"
    assert dispatcher.generate(GATEWAY, ask("r", attempt=3, generated=TokenIds.of([9])), 0.0) == []
    for name in ("a", "b"):
        dispatcher.cancel(Cancel(name), 1.0)
    request = dispatcher.requests["r"]
    assert (request.stage, request.attempt, list(request.generated)) == ("prefilling", 3, [9])


@pytest.mark.parametrize("stage", ["adopting", "decoding"])
def test_a_prefill_lost_after_the_hand_over_changes_nothing(stage):
    dispatcher = to_stage(stage)
    assert dispatcher.lost("p", 1.0) == []
    assert dispatcher.requests["r"].stage == stage
    if stage == "adopting":
        dispatcher.adopted("d", Adopted("r", 1))
    assert dispatcher.finished("d", Finished("r", 1, 8), 2.0) == releases(stage, without="p")


@pytest.mark.parametrize("stage", STAGES)
def test_a_lost_gateway_takes_its_requests_with_it(stage):
    dispatcher = to_stage(stage)
    assert dispatcher.lost(GATEWAY, 1.0) == releases(stage)
    assert not dispatcher.requests


def test_a_loss_of_somebody_unknown_changes_nothing():
    dispatcher = to_stage("decoding")
    assert dispatcher.lost("nobody", 1.0) == []
    assert "r" in dispatcher.requests


# ---- What comes late, twice, or from the wrong one --------

STIMULI = {
    "Prefilled": lambda d, sender, name, attempt: d.prefilled(sender, prefilled(name, attempt), 1.0),
    "Adopted": lambda d, sender, name, attempt: d.adopted(sender, Adopted(name, attempt)),
    "Finished": lambda d, sender, name, attempt: d.finished(sender, Finished(name, attempt, 1), 1.0),
    "Failed": lambda d, sender, name, attempt: d.failed(sender, Failed(name, attempt, "internal", "x"), 1.0),
}


@pytest.mark.parametrize("kind", STIMULI)
@pytest.mark.parametrize(
    ("sender", "name", "attempt"), [("d", "other", 1), ("d", "r", 2), ("d", "r", 0), ("x", "r", 1)]
)
def test_what_concerns_no_attempt_of_that_sender_is_dropped(kind, sender, name, attempt):
    dispatcher = to_stage("decoding")
    orders = STIMULI[kind](dispatcher, sender, name, attempt)
    assert orders == ([Order(sender, Release(name, attempt))] if kind == "Prefilled" else [])
    assert dispatcher.dropped == {kind: 1}
    assert dispatcher.requests["r"].stage == "decoding"


@pytest.mark.parametrize(
    ("stage", "kind", "sender"),
    [
        ("prefilling", "Adopted", "p"),
        ("waiting", "Prefilled", "p"),
        ("waiting", "Finished", "p"),
        ("adopting", "Prefilled", "p"),
        ("adopting", "Failed", "p"),
        ("decoding", "Prefilled", "p"),
        ("decoding", "Finished", "p"),
        ("decoding", "Failed", "p"),
        ("decoding", "Adopted", "d"),
    ],
)
def test_a_holder_whose_turn_it_is_not_moves_nothing(stage, kind, sender):
    dispatcher = to_stage(stage)
    assert STIMULI[kind](dispatcher, sender, "r", 1) == []
    assert dispatcher.dropped == {kind: 1}
    assert dispatcher.requests["r"].stage == stage


def test_a_prefill_that_comes_after_the_end_is_released():
    dispatcher = to_stage("prefilling")
    dispatcher.cancel(Cancel("r"), 1.0)
    assert dispatcher.prefilled("p", prefilled(), 1.0) == [Order("p", Release("r", 1))]


def test_a_cancel_of_the_unknown_is_counted():
    dispatcher = make()
    assert dispatcher.cancel(Cancel("r"), 1.0) == []
    assert dispatcher.dropped == {"Cancel": 1}


# ---- The table --------


@pytest.mark.parametrize("stage", [*EARLY, "migrating", *STAGES, "resuming"])
def test_only_the_drawn_arrows_can_be_taken(stage):
    arrows = {
        "queued": {"held", "pinning", "prefilling"},
        "pinning": {"prefilling", "resuming"},
        "prefilling": {"waiting", "resuming"},
        "waiting": {"adopting", "migrating", "resuming"},
        "migrating": {"adopting", "resuming"},
        "adopting": {"decoding", "resuming"},
        "decoding": {"resuming"},
        "resuming": {"queued"},
    }
    for other in Stage:
        begin = {"migrating": "waiting", "resuming": "prefilling"}.get(stage, stage)
        dispatcher = to_stage(begin) if stage not in EARLY else make()
        dispatcher.generate(GATEWAY, ask(), 0.0)
        request = dispatcher.requests["r"]
        if stage == "pinning":
            dispatcher.requests.move(request, Stage.PINNING, "p")
        elif stage == "migrating":
            dispatcher.requests.move(request, Stage.MIGRATING, "d")
        elif stage == "resuming":
            dispatcher.requests.move(request, Stage.RESUMING)
        if other.value in arrows[stage]:
            dispatcher.requests.move(request, other, "x")
            assert request.stage == other
        else:
            with pytest.raises(InvariantError, match=f"{stage} -> {other.value} is not a legal move"):
                dispatcher.requests.move(request, other, "x")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prefilled": None}, "with the hand-over"),
        ({"decode": ""}, "at no engine"),
        ({"decode": "elsewhere"}, "elsewhere, which is not among its holders"),
        ({"decode": "elsewhere", "holders": {"elsewhere"}}, "assigned"),
        ({"pins": {0: "d"}}, "decoding and waits for"),
        ({"stage": Stage.PINNING, "prefilled": None}, "pinning and waits for"),
        ({"stage": Stage.WAITING}, "waiting"),
        ({"stage": Stage.QUEUED, "prefilled": None, "prefill": ""}, "queued"),
    ],
)
def test_check_finds_a_table_that_was_tampered_with(change, reason):
    dispatcher = to_stage("decoding")
    for name, value in change.items():
        setattr(dispatcher.requests["r"], name, value)
    with pytest.raises(InvariantError, match=reason):
        dispatcher.check()


def test_check_finds_a_request_filed_under_another_name():
    dispatcher = to_stage("decoding")
    dispatcher.requests._requests["s"] = dispatcher.requests._requests.pop("r")
    with pytest.raises(InvariantError, match="filed under s"):
        dispatcher.check()


class Counted(dict):
    """Counts how many values are walked over."""

    walked = 0

    def values(self):
        for value in super().values():
            self.walked += 1
            yield value

    def __getitem__(self, key):
        self.walked += 1
        return super().__getitem__(key)

    def __iter__(self):
        for key in super().__iter__():
            self.walked += 1
            yield key


@pytest.mark.parametrize("num_queued", [10, 1000])
def test_a_long_queue_does_not_make_a_stimulus_longer(num_queued):
    dispatcher = make("p", "d", room=8, max_queue=10_000)
    dispatcher.requests._requests = Counted()
    dispatcher.requests.queued._requests = Counted()
    for i in range(num_queued + 8):
        dispatcher.generate(GATEWAY, ask(f"r{i}"), 0.0)
    assert len(dispatcher.requests.queued) == num_queued
    counters = [dispatcher.requests._requests, dispatcher.requests.queued._requests]
    for counter in counters:
        counter.walked = 0
    dispatcher.generate(GATEWAY, ask("late"), 0.0)
    dispatcher.prefilled("p", prefilled("r0"), 0.0)
    dispatcher.adopted("d", Adopted("r0", 1))
    dispatcher.finished("d", Finished("r0", 1, 1), 0.0)
    dispatcher.joined(member("p"), load(8), 0.0)
    dispatcher.cancel(Cancel("r500"), 0.0)
    assert sum(counter.walked for counter in counters) <= 30
