"""Who is asked to lend the beginning of a prompt, what follows from the answers, and how lent room is won back."""

from __future__ import annotations

import pytest
from resuming import answered

from pdactors.kv.prefix import chain, parts
from pdactors.messages import (
    Adopted,
    Blocks,
    CacheChanged,
    Cancel,
    CopyOut,
    Decode,
    Failed,
    Finished,
    Generate,
    KVHandle,
    Lease,
    Load,
    Member,
    Pin,
    Pinned,
    Prefill,
    Prefilled,
    Rejected,
    Release,
    Sampling,
    Segment,
)
from pdactors.policy.borrowing import PIN_TIMEOUT_S
from pdactors.policy.dispatch import Dispatcher, Limits, Order
from pdactors.token_ids import TokenIds

GATEWAY, KEY = "gateway", b"key"
PROMPT = tuple(range(17))
DIGESTS = tuple(chain(PROMPT, 4, KEY))  # 4; the 17th token is always computed
ROLES = {"p": "prefill", "d": "decode", "w": "worker"}


def member(name, node="n0", state="ready", incarnation=1):
    return Member(name, ROLES[name[0]], node, "r0", 100, incarnation, state=state)


def load(room=8, lacking=0, leased=0, free=100):
    return Load(max_sequences=room, blocks=Blocks(free=free, leased_out=leased), blocks_lacking=lacking)


def make(*engines, **cached):
    """Return a dispatcher that knows engines, and what some of them have cached of the prompt."""
    dispatcher = Dispatcher(Limits(4, 128, 20, 100.0, KEY))
    for name in engines:
        dispatcher.joined(member(name), load(), 0.0)
    for name, digests in cached.items():
        dispatcher.cache_changed(name, CacheChanged(added=digests))
    return dispatcher


def ask(name="r", prompt=PROMPT, **fields):
    return Generate(name, TokenIds.of(prompt), Sampling(max_tokens=8), **fields)


def generate(dispatcher, name="r", prompt=PROMPT, now=0.0):
    return dispatcher.generate(GATEWAY, ask(name, prompt), now)


def segment(owner, start, count):
    return Segment(owner, Lease(start, 1), start, tuple(range(100 + start, 100 + start + count)))


def pinned(owner, start, count, name="r", attempt=1):
    return Pinned(name, attempt, start, segment(owner, start, count) if count else None)


def prefill_of(orders, to="p"):
    (order,) = orders
    assert (order.to, type(order.message)) == (to, Prefill)
    return order.message


def pin(owner, start, *digests, name="r", attempt=1):
    return Order(owner, Pin(name, attempt, start, digests))


def released(*names, name="r", attempt=1):
    return [Order(to, Release(name, attempt)) for to in names]


def to_decoding(dispatcher, name="r", prefill="p", decode="d"):
    handle = KVHandle("n0", prefill, "layout", (Segment(prefill, Lease(0, 1), 0, (1, 2)),), 5)
    dispatcher.prefilled(prefill, Prefilled(name, 1, 42, handle, 1.0), 0.0)
    dispatcher.adopted(decode, Adopted(name, 1))
    assert dispatcher.requests[name].stage == "decoding"


# ---- Who is asked --------


def test_who_has_a_part_is_asked_for_it():
    dispatcher = make("p", "d", d=DIGESTS[:2])
    assert generate(dispatcher) == [pin("d", 0, *DIGESTS[:2])]
    request = dispatcher.requests["r"]
    assert (request.stage, request.engine, request.holders) == ("pinning", "p", {"p", "d"})
    dispatcher.check()


def test_each_is_asked_for_its_own_part_and_the_reader_for_none():
    dispatcher = make("p", "d", "d1", d=(DIGESTS[0], DIGESTS[2]), p=(DIGESTS[1],), d1=(DIGESTS[3],))
    assert generate(dispatcher) == [pin("d", 0, DIGESTS[0]), pin("d", 2, DIGESTS[2]), pin("d1", 3, DIGESTS[3])]


def test_the_last_token_is_computed_even_when_all_is_cached():
    dispatcher = make("p", "d", d=DIGESTS)
    assert generate(dispatcher, prompt=PROMPT[:16]) == [pin("d", 0, *DIGESTS[:3])]


def test_nobody_is_asked_for_what_the_reader_has():
    dispatcher = make("p", "d", d=DIGESTS, p=DIGESTS)
    assert prefill_of(generate(dispatcher)).prefix == ()


def test_nobody_is_asked_for_what_follows_a_gap_or_is_too_short_for_a_block():
    dispatcher = make("p", "d", d=DIGESTS[1:])
    assert prefill_of(generate(dispatcher)).prefix == ()
    assert prefill_of(generate(dispatcher, "short", PROMPT[:4])).prefix == ()


def part(count, num_blocks):
    """Return the digest of the first `count` tokens of the block after the first `num_blocks`."""
    parent = DIGESTS[num_blocks - 1] if num_blocks else None
    return next(p.digest for p in parts(PROMPT[4 * num_blocks :][:4], 4, KEY, parent) if p.num_tokens == count)


def test_a_part_is_lent_with_the_blocks_before_it():
    tail = part(3, 2)
    dispatcher = make("p", "d", d=(*DIGESTS[:2], tail, part(1, 2), part(3, 1)))
    assert generate(dispatcher) == [pin("d", 0, *DIGESTS[:2], tail)]
    prefill = prefill_of(dispatcher.pinned("d", pinned("d", 0, 3), 0.0))
    assert (prefill.prefix, prefill.prefix_tokens) == ((segment("d", 0, 3),), 11)


def test_a_part_is_lent_to_who_has_the_blocks_before_it():
    dispatcher = make("p", "d", d=(part(2, 1),), p=DIGESTS[:1])
    assert generate(dispatcher) == [pin("d", 1, part(2, 1))]
    assert prefill_of(dispatcher.pinned("d", pinned("d", 1, 1), 0.0)).prefix_tokens == 6


def test_nobody_is_asked_for_a_part_that_the_reader_has():
    dispatcher = make("p", "d", d=(part(2, 0), part(3, 0)), p=(part(3, 0),))
    assert prefill_of(generate(dispatcher)).prefix == ()


def test_the_last_token_is_no_part_of_anything():
    dispatcher = make("p", "d", d=(part(3, 0),))
    assert prefill_of(generate(dispatcher, prompt=PROMPT[:3])).prefix == ()


def test_another_prompt_is_not_taken_for_the_same():
    dispatcher = make("p", "d", d=DIGESTS)
    assert prefill_of(generate(dispatcher, prompt=(99, *PROMPT[1:]))).prefix == ()


@pytest.mark.parametrize(("node", "state", "is_asked"), [
    ("n0", "ready", True), ("n0", "draining", False), ("n0", "starting", False), ("n1", "ready", False),
])  # fmt: skip
def test_only_engines_of_the_node_that_are_up_are_asked(node, state, is_asked):
    dispatcher = make("p", "d")
    dispatcher.joined(member("d1", node, state), load(), 0.0)
    dispatcher.cache_changed("d1", CacheChanged(added=DIGESTS))
    (order,) = generate(dispatcher)
    assert (type(order.message), order.to) == ((Pin, "d1") if is_asked else (Prefill, "p"))


def test_what_was_evicted_is_not_asked_for():
    dispatcher = make("p", "d", d=DIGESTS)
    dispatcher.cache_changed("d", CacheChanged(evicted=DIGESTS[1:]))
    assert generate(dispatcher) == [pin("d", 0, DIGESTS[0])]


def test_the_cache_of_a_stranger_is_not_noted():
    dispatcher = make("p", "d")
    dispatcher.cache_changed("d9", CacheChanged(added=DIGESTS))
    dispatcher.joined(member("d9"), load(), 0.0)
    assert prefill_of(generate(dispatcher)).prefix == ()


def test_a_lost_engine_takes_its_cache_with_it_and_its_successor_starts_without():
    dispatcher = make("p", "d", "d1", d=DIGESTS, d1=DIGESTS[:1])
    dispatcher.lost("d", 1.0)
    dispatcher.joined(member("d", incarnation=2), load(), 1.0)
    assert generate(dispatcher) == [pin("d1", 0, DIGESTS[0])]


# ---- Answers --------


def test_the_prefill_starts_when_all_have_answered_with_what_they_lend_in_order():
    dispatcher = make("p", "d", "d1", d=DIGESTS[:2], d1=DIGESTS[2:])
    generate(dispatcher)
    assert dispatcher.pinned("d1", pinned("d1", 2, 2), 0.0) == []
    message = prefill_of(dispatcher.pinned("d", pinned("d", 0, 2), 0.0))
    assert message.prefix == (segment("d", 0, 2), segment("d1", 2, 2))
    assert (message.request, message.attempt, tuple(message.prompt)) == ("r", 1, PROMPT)
    assert dispatcher.requests["r"].stage == "prefilling"
    dispatcher.check()


def test_a_shorter_answer_is_taken_as_it_is():
    dispatcher = make("p", "d", d=DIGESTS)
    generate(dispatcher)
    assert prefill_of(dispatcher.pinned("d", pinned("d", 0, 1), 0.0)).prefix == (segment("d", 0, 1),)


def test_one_that_has_nothing_any_more_lends_nothing():
    dispatcher = make("p", "d", "d1", d=DIGESTS[:2], d1=DIGESTS[2:])
    generate(dispatcher)
    assert dispatcher.pinned("d", pinned("d", 0, 0), 0.0) == []
    assert prefill_of(dispatcher.pinned("d1", pinned("d1", 2, 2), 0.0)).prefix == (segment("d1", 2, 2),)


def test_the_prefill_starts_when_nobody_lends_anything():
    dispatcher = make("p", "d", d=DIGESTS)
    generate(dispatcher)
    assert prefill_of(dispatcher.pinned("d", pinned("d", 0, 0), 0.0)).prefix == ()


@pytest.mark.parametrize(("sender", "start"), [("d1", 0), ("d", 1), ("p", 0)])
def test_an_answer_to_what_the_sender_was_not_asked_is_dropped(sender, start):
    dispatcher = make("p", "d", "d1", d=DIGESTS[:2], d1=DIGESTS[2:])
    generate(dispatcher)
    assert dispatcher.pinned(sender, pinned(sender, start, 1), 0.0) == []
    assert dispatcher.dropped == {"Pinned": 1}
    assert dispatcher.requests["r"].pins == {0: "d", 2: "d1"}
    assert dispatcher.requests["r"].prefix == []


def test_a_duplicate_answer_is_dropped_while_others_are_waited_for_and_after():
    dispatcher = make("p", "d", "d1", d=DIGESTS[:2], d1=DIGESTS[2:])
    generate(dispatcher)
    for _ in range(2):
        assert dispatcher.pinned("d", pinned("d", 0, 2), 0.0) == []
    assert len(prefill_of(dispatcher.pinned("d1", pinned("d1", 2, 2), 0.0)).prefix) == 2
    assert dispatcher.pinned("d1", pinned("d1", 2, 2), 0.0) == []
    assert dispatcher.dropped == {"Pinned": 2}


def test_an_answer_for_a_request_that_is_gone_is_released():
    dispatcher = make("p", "d", d=DIGESTS)
    generate(dispatcher)
    dispatcher.cancel(Cancel("r"), 0.0)
    assert dispatcher.pinned("d", pinned("d", 0, 4), 0.0) == released("d")
    assert dispatcher.dropped == {"Pinned": 1}


def test_an_answer_for_an_old_attempt_is_released():
    dispatcher = make("p", "p1", "d", d=DIGESTS)
    generate(dispatcher)
    answered(dispatcher, dispatcher.lost("p", 0.0))
    assert dispatcher.pinned("d", pinned("d", 0, 4), 0.0) == released("d")
    assert dispatcher.requests["r"].pins == {0: "d"}
    assert prefill_of(dispatcher.pinned("d", pinned("d", 0, 4, attempt=2), 0.0), "p1").attempt == 2


# ---- Time --------


def test_an_owner_that_does_not_answer_is_waited_for_only_so_long():
    dispatcher = make("p", "d", "d1", d=DIGESTS[:2], d1=DIGESTS[2:])
    generate(dispatcher, now=5.0)
    dispatcher.pinned("d", pinned("d", 0, 2), 0.0)
    assert dispatcher.tick(5.0 + PIN_TIMEOUT_S) == []
    assert prefill_of(dispatcher.tick(5.01 + PIN_TIMEOUT_S)).prefix == (segment("d", 0, 2),)
    dispatcher.check()
    assert dispatcher.tick(9.0) == []


def test_an_answer_that_comes_too_late_is_dropped_and_its_owner_released_at_the_end():
    dispatcher = make("p", "d", d=DIGESTS)
    generate(dispatcher)
    dispatcher.tick(1.0 + PIN_TIMEOUT_S)
    assert dispatcher.pinned("d", pinned("d", 0, 4), 0.0) == []
    assert dispatcher.dropped == {"Pinned": 1}
    assert dispatcher.requests["r"].prefix == []
    assert dispatcher.finished("p", Finished("r", 1, 1), 3.0) == released("d", "p")


def test_a_request_whose_time_runs_out_while_owners_are_asked():
    dispatcher = make("p", "d", d=DIGESTS)
    dispatcher.generate(GATEWAY, ask(deadline_s=0.5), 0.0)
    rejected, *rest = dispatcher.tick(0.6)
    assert (rejected.to, type(rejected.message), rejected.message.code) == (GATEWAY, Rejected, "timeout")
    assert "pinning" in rejected.message.message
    assert rest == released("d", "p")


# ---- Ends and losses while owners are asked --------


@pytest.mark.parametrize("answers", [[], ["d"], ["d", "d1"]])
@pytest.mark.parametrize("how", ["cancel", "gateway lost"])
def test_everyone_who_was_asked_is_released_when_the_request_ends(answers, how):
    dispatcher = make("p", "d", "d1", d=DIGESTS[:2], d1=DIGESTS[2:])
    generate(dispatcher)
    for owner in answers:
        dispatcher.pinned(owner, pinned(owner, {"d": 0, "d1": 2}[owner], 2), 0.0)
    orders = dispatcher.cancel(Cancel("r"), 0.0) if how == "cancel" else dispatcher.lost(GATEWAY, 0.0)
    assert orders == released("d", "d1", "p")
    assert not dispatcher.requests
    dispatcher.check()


def test_lenders_are_released_when_the_answer_is_complete():
    dispatcher = make("p", "d", "d1", d1=DIGESTS)
    generate(dispatcher)
    dispatcher.pinned("d1", pinned("d1", 0, 4), 0.0)
    to_decoding(dispatcher)
    assert dispatcher.finished("d", Finished("r", 1, 8), 2.0) == released("d", "d1", "p")


def test_the_prefill_starts_without_an_owner_that_is_lost():
    dispatcher = make("p", "d", "d1", d=(DIGESTS[0], DIGESTS[2]), d1=(DIGESTS[1], DIGESTS[3]))
    generate(dispatcher)
    dispatcher.pinned("d1", pinned("d1", 1, 1), 0.0)
    assert dispatcher.lost("d", 0.0) == []  # d1 was asked twice
    assert dispatcher.requests["r"].pins == {3: "d1"}
    dispatcher.check()
    assert prefill_of(dispatcher.pinned("d1", pinned("d1", 3, 1), 0.0)).prefix == (
        segment("d1", 1, 1),
        segment("d1", 3, 1),
    )
    assert dispatcher.cancel(Cancel("r"), 0.0) == released("d1", "p")


def test_the_loss_of_the_last_one_that_has_not_answered_starts_the_prefill():
    dispatcher = make("p", "d", "d1", d=DIGESTS[:2], d1=DIGESTS[2:])
    generate(dispatcher)
    dispatcher.pinned("d", pinned("d", 0, 2), 0.0)
    assert prefill_of(dispatcher.lost("d1", 0.0)).prefix == (segment("d", 0, 2),)
    dispatcher.check()


def test_the_loss_of_a_lender_after_the_start_changes_nothing():
    dispatcher = make("p", "d", "d1", d=DIGESTS[:2], d1=DIGESTS[2:])
    generate(dispatcher)
    dispatcher.pinned("d", pinned("d", 0, 2), 0.0)
    dispatcher.pinned("d1", pinned("d1", 2, 2), 0.0)
    assert dispatcher.lost("d1", 0.0) == []
    assert (dispatcher.requests["r"].stage, dispatcher.requests["r"].attempt) == ("prefilling", 1)


def test_a_prefill_lost_while_owners_are_asked_frees_them_and_asks_anew():
    dispatcher = make("p", "p1", "d", d=DIGESTS)
    generate(dispatcher)
    orders = answered(dispatcher, dispatcher.lost("p", 0.0))
    assert orders == [*released("d"), pin("d", 0, *DIGESTS, attempt=2)]
    request = dispatcher.requests["r"]
    assert (request.stage, request.engine, request.holders, request.prefix) == ("pinning", "p1", {"p1", "d"}, [])
    dispatcher.check()


def test_what_was_lent_in_a_lost_attempt_is_not_used_in_the_next():
    dispatcher = make("p", "d", d=DIGESTS)
    generate(dispatcher)
    dispatcher.pinned("d", pinned("d", 0, 4), 0.0)
    assert answered(dispatcher, dispatcher.lost("p", 0.0)) == released("d")
    dispatcher.cache_changed("d", CacheChanged(evicted=DIGESTS))
    message = prefill_of(dispatcher.joined(member("p", incarnation=2), load(), 1.0))
    assert (message.attempt, message.prefix) == (2, ())
    assert dispatcher.requests["r"].holders == {"p"}


@pytest.mark.parametrize("sender", ["p", "d"])
def test_nobody_can_finish_what_has_not_begun(sender):
    dispatcher = make("p", "d", d=DIGESTS)
    generate(dispatcher)
    assert dispatcher.finished(sender, Finished("r", 1, 1), 0.0) == []
    assert dispatcher.dropped == {"Finished": 1}
    assert dispatcher.requests["r"].stage == "pinning"


# ---- Prompts with a common beginning --------

LONG = tuple(range(1000, 1104))


def same_beginning(count):
    return [(f"r{i}", (*LONG, i)) for i in range(count)]


def test_prompts_with_an_equal_beginning_go_to_the_engine_that_computes_it():
    dispatcher = make("p", "p1", "d")
    to = [generate(dispatcher, name, prompt)[0].to for name, prompt in same_beginning(8)]
    assert to == ["p"] * 8
    assert generate(dispatcher, "other", tuple(range(100)))[0].to == "p1"


def test_prompts_that_differ_are_spread():
    dispatcher = make("p", "p1", "d")
    to = [generate(dispatcher, f"r{i}", (i, *LONG))[0].to for i in range(4)]
    assert sorted(to) == ["p", "p", "p1", "p1"]


@pytest.mark.parametrize(("num_before", "target"), [(1, "p"), (3, "p1")])
def test_a_common_beginning_is_computed_again_only_where_its_engine_is_far_behind(num_before, target):
    dispatcher = make("p", "d")
    for i in range(num_before):
        generate(dispatcher, f"r{i}", (i, *LONG))
    dispatcher.joined(member("p1"), load(), 0.0)
    assert generate(dispatcher, "again", (0, *LONG))[0].to == target


def test_nothing_is_under_way_any_more_where_it_is_done_or_given_up():
    dispatcher = make("p", "d")
    for name, prompt in same_beginning(2):
        generate(dispatcher, name, prompt)
    assert set(dispatcher.requests.under_way) == {"p"}
    dispatcher.cancel(Cancel("r0"), 0.0)
    assert [len(digests) for digests in dispatcher.requests.under_way["p"].values()] == [26]
    to_decoding(dispatcher, "r1")
    assert dispatcher.requests.under_way == {}
    dispatcher.check()


def test_an_engine_is_charged_for_what_it_has_to_compute_only():
    dispatcher = make("p", "p1", "d", d=DIGESTS)
    generate(dispatcher)
    assert dispatcher.requests.assigned["p"].num_tokens == 1
    dispatcher.pinned("d", pinned("d", 0, 4), 0.0)
    assert dispatcher.requests.assigned["p"].num_tokens == 1
    dispatcher.lost("p", 0.0)
    dispatcher.lost("d", 0.0)
    answered(dispatcher, dispatcher.lost("p1", 0.0))
    assert dispatcher.requests["r"].num_cached == 0
    prefill_of(dispatcher.joined(member("p", incarnation=2), load(), 0.0))
    assert dispatcher.requests.assigned["p"].num_tokens == len(PROMPT)
    dispatcher.check()


# ---- Workers only --------


def test_a_worker_computes_and_decodes_and_ends_the_request():
    dispatcher = make("w", "w1")
    (order,) = generate(dispatcher)
    assert (order.to, type(order.message)) == ("w", Prefill)
    assert dispatcher.requests["r"].stage == "prefilling"
    assert dispatcher.finished("w", Finished("r", 1, 8), 1.0) == released("w")
    assert not dispatcher.requests
    assert not dispatcher.dropped


def test_a_worker_borrows_from_one_that_is_full():
    dispatcher = make("w", "w1", w1=DIGESTS)
    dispatcher.joined(member("w1"), load(room=0), 0.0)
    assert generate(dispatcher) == [pin("w1", 0, *DIGESTS)]
    assert prefill_of(dispatcher.pinned("w1", pinned("w1", 0, 4), 0.0), "w").prefix == (segment("w1", 0, 4),)
    assert dispatcher.finished("w", Finished("r", 1, 8), 1.0) == released("w", "w1")


def test_a_worker_that_has_the_beginning_gets_the_request():
    dispatcher = make("w", "w1", w1=DIGESTS)
    dispatcher.joined(member("w2", "n1"), load(), 0.0)
    assert prefill_of(generate(dispatcher, prompt=(*PROMPT, 5, 6)), "w1").prefix == ()


def test_a_lost_worker_costs_an_attempt_and_a_failed_one_the_request():
    dispatcher = make("w", "w1")
    generate(dispatcher)
    (order,) = answered(dispatcher, dispatcher.lost("w", 1.0), 8, 9)
    assert (order.to, type(order.message), order.message.attempt) == ("w1", Prefill, 2)
    assert list(order.message.generated) == [8, 9]
    rejected, *rest = dispatcher.failed("w1", Failed("r", 2, "internal", "w1: x"), 1.0)
    assert rejected.message.code == "internal"
    assert rest == released("w1", attempt=2)


def test_workers_are_what_limits_the_length():
    dispatcher = make("w")
    dispatcher.joined(member("w"), Load(max_sequences=8, max_blocks=6), 0.0)
    assert generate(dispatcher, "fits")[0].to == "w"  # 17 + 8 - 1 = 24 tokens
    (order,) = dispatcher.generate(GATEWAY, ask("long", tuple(range(18))), 0.0)
    assert order.message.code == "bad_request"


# ---- Room that is lent --------


def lent(*sizes, free=100):
    """Return a dispatcher with one decoding request for each prompt size: prefill p lends, d reads."""
    dispatcher = make("p", "d")
    for i, size in enumerate(sizes):
        generate(dispatcher, f"r{i}", (500 + i, *range(1, size)))
        to_decoding(dispatcher, f"r{i}")
    dispatcher.joined(member("d"), load(free=free), 0.0)
    return dispatcher


def starve(dispatcher, **changes):
    return dispatcher.joined(member("p"), load(**{"lacking": 3, "leased": 9, **changes}), 1.0)


def test_a_prefill_that_lacks_blocks_gets_the_largest_back_first_each_once():
    dispatcher = lent(8, 40, 20)
    orders = [starve(dispatcher) for _ in range(5)]
    assert orders == [[Order("d", CopyOut(name, 1))] for name in ("r1", "r2", "r0")] + [[], []]


@pytest.mark.parametrize("changes", [{"lacking": 0}, {"leased": 0}])
def test_nothing_is_copied_while_nobody_lacks_anything_or_nothing_is_lent(changes):
    assert starve(lent(40), **changes) == []


def test_nothing_is_copied_to_where_there_is_no_room_for_it():
    dispatcher = lent(40, 20, free=6)
    assert starve(dispatcher) == [Order("d", CopyOut("r1", 1))]
    assert starve(dispatcher) == []
    dispatcher.joined(member("d"), load(free=11), 0.0)
    assert starve(dispatcher) == [Order("d", CopyOut("r0", 1))]


def test_only_what_decodes_is_copied():
    dispatcher = make("p", "d")
    generate(dispatcher)
    assert starve(dispatcher) == []
    handle = KVHandle("n0", "p", "layout", (), 5)
    (order,) = dispatcher.prefilled("p", Prefilled("r", 1, 42, handle, 1.0), 0.0)
    assert isinstance(order.message, Decode)
    assert starve(dispatcher) == []
    dispatcher.adopted("d", Adopted("r", 1))
    assert starve(dispatcher) == [Order("d", CopyOut("r", 1))]


def test_only_what_that_prefill_lends_is_copied():
    dispatcher = lent(40)
    dispatcher.joined(member("p1"), load(), 0.0)
    assert dispatcher.joined(member("p1"), load(lacking=3, leased=9), 1.0) == []


# ---- Who is needed --------


def test_an_engine_is_idle_when_no_request_needs_it():
    dispatcher = make("p", "p1", "d", "d1", d1=DIGESTS)
    generate(dispatcher)
    busy = {"p", "d1"}
    assert {name for name in dispatcher.fleet.engines if not dispatcher.is_idle(name)} == busy
    dispatcher.pinned("d1", pinned("d1", 0, 4), 0.0)
    assert not dispatcher.is_idle("d1"), "it lends"
    to_decoding(dispatcher)
    assert {name for name in dispatcher.fleet.engines if not dispatcher.is_idle(name)} == {"p", "d", "d1"}
    dispatcher.finished("d", Finished("r", 1, 8), 2.0)
    assert all(dispatcher.is_idle(name) for name in dispatcher.fleet.engines)
    assert dispatcher.is_idle("nobody")


def test_a_draining_engine_gets_nothing_new_and_goes_on_with_what_it_has():
    dispatcher = make("p", "p1", "d")
    generate(dispatcher)
    dispatcher.joined(member("p", state="draining"), load(), 0.0)
    assert generate(dispatcher, "other", PROMPT)[0].to == "p1"
    to_decoding(dispatcher)
    assert not dispatcher.is_idle("p")
    dispatcher.cancel(Cancel("r"), 0.0)
    assert dispatcher.is_idle("p")
