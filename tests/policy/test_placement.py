from __future__ import annotations

import pytest

from pdactors.policy.placement import DecodeDecision, EngineView, Place, choose_prefill, schedule_decode

HERE = Place("n0", "r0")
GPU = Place("n0", "r0", "cuda:0")
NEIGHBOUR = Place("n1", "r0")
FAR = Place("n2", "r1")


def moves(source, target):
    """Everything is within reach, and what is elsewhere has to move."""
    return source != target


def stays(source, target):
    """Nothing moves."""
    return False if source == target else None


def decide(source, engines, needs_migration=moves, **how):
    return schedule_decode(source, engines, needs_migration=needs_migration, **how)


def engine(name, place=HERE, num=0, most=4, tokens=0, owned=0):
    return EngineView(name, place, num, most, tokens, owned)


@pytest.mark.parametrize(
    ("a", "b", "distance"),
    [(HERE, HERE, 0), (HERE, GPU, 1), (HERE, NEIGHBOUR, 2), (HERE, FAR, 3), (GPU, NEIGHBOUR, 2)],
)
def test_distance_is_the_same_both_ways(a, b, distance):
    assert a.distance(b) == b.distance(a) == distance


def test_a_node_name_decides_before_its_rack():
    assert Place("n0", "r0").distance(Place("n0", "r9")) == 0


@pytest.mark.parametrize(("num", "most", "room"), [(0, 0, False), (3, 4, True), (4, 4, False), (5, 4, False)])
def test_capacity_ends_at_the_limit(num, most, room):
    assert engine("e", num=num, most=most).has_capacity is room


# ---- Prefill --------


def test_prefill_goes_where_fewest_tokens_come_first():
    engines = [engine("a", tokens=100), engine("b", tokens=20), engine("c", tokens=300)]
    assert choose_prefill(engines, 50) == "b"


def test_cached_tokens_count_as_computed():
    engines = [engine("a", tokens=100), engine("b", tokens=20)]
    assert choose_prefill(engines, 200, cached={"a": 192}) == "a"
    assert choose_prefill(engines, 200, cached={"a": 64, "b": 64}) == "b"


def test_computing_again_what_another_engine_has_counts_twice():
    """It is only worth while when the other is far behind."""
    for behind, target in [(199, "a"), (200, "a"), (201, "b")]:
        engines = [engine("a", tokens=behind), engine("b", tokens=0)]
        assert choose_prefill(engines, 104, cached={"a": 100}) == target


def test_a_tie_goes_to_the_engine_nearest_to_a_decode_with_room():
    engines = [engine("a", FAR), engine("b", HERE)]
    assert choose_prefill(engines, 5, decodes=[engine("d", NEIGHBOUR)]) == "b"
    full = engine("d", HERE, num=4)
    assert choose_prefill(engines, 5, decodes=[full, engine("e", FAR)]) == "a"


def test_a_tie_goes_to_the_engine_that_has_most_of_the_prompt_itself():
    cached = {"a": 64, "b": 64}
    assert choose_prefill([engine("a", owned=1), engine("b", num=3, owned=2)], 80, cached=cached) == "b"
    assert choose_prefill([engine("a"), engine("b", tokens=1, owned=2)], 80, cached=cached) == "a"
    near = engine("a", NEIGHBOUR)
    assert choose_prefill([near, engine("b", FAR, owned=2)], 80, cached=cached, decodes=[engine("d", NEIGHBOUR)]) == "a"


def test_a_tie_in_distance_goes_to_the_one_with_fewer_requests_and_then_by_name():
    assert choose_prefill([engine("a", num=2), engine("b", num=1)], 5) == "b"
    assert choose_prefill([engine("b"), engine("a")], 5) == "a"


def test_a_full_prefill_engine_is_passed_over():
    assert choose_prefill([engine("a", num=4), engine("b", num=3, tokens=999)], 5) == "b"
    assert choose_prefill([engine("a", num=4)], 5) is None
    assert choose_prefill([], 5) is None


# ---- Decode --------


def test_locality_takes_the_nearest_even_when_it_has_more_to_do():
    engines = [engine("far", FAR), engine("near", HERE, num=3), engine("next", NEIGHBOUR)]
    assert decide(HERE, engines) == DecodeDecision("near", need_migration=False, distance=0)


def test_locality_takes_the_least_loaded_of_the_nearest():
    engines = [engine("a", num=2), engine("b", num=1), engine("c", num=2)]
    assert decide(HERE, engines) == DecodeDecision("b", need_migration=False, distance=0)


def test_locality_takes_the_nearest_that_has_most_of_the_sequence_itself():
    engines = [engine("a", num=0), engine("b", num=3, owned=2), engine("c", num=1, owned=1)]
    assert decide(HERE, engines) == DecodeDecision("b", need_migration=False, distance=0)
    assert decide(HERE, [*engines, engine("far", FAR, owned=9)]).target == "b"
    assert decide(HERE, engines, policy="least_loaded").target == "a"


def test_locality_moves_on_when_the_nearest_is_full():
    engines = [engine("near", num=4), engine("next", NEIGHBOUR, num=3), engine("far", FAR)]
    assert decide(HERE, engines) == DecodeDecision("next", need_migration=True, distance=2)


@pytest.mark.parametrize(("max_distance", "target"), [(0, "idle"), (1, "gpu"), (2, "gpu"), (3, "gpu")])
def test_beyond_max_distance_load_decides(max_distance, target):
    engines = [engine("gpu", GPU, num=3), engine("idle", FAR, num=0), engine("busy", NEIGHBOUR, num=2)]
    decision = decide(HERE, engines, max_distance=max_distance)
    assert decision is not None
    assert decision.target == target


def test_a_tie_in_load_goes_to_the_nearer():
    engines = [engine("far", FAR), engine("next", NEIGHBOUR)]
    assert decide(HERE, engines, policy="least_loaded") == DecodeDecision("next", True, 2)


def test_least_loaded_does_not_mind_the_distance():
    engines = [engine("near", num=1), engine("far", FAR)]
    assert decide(HERE, engines, policy="least_loaded") == DecodeDecision("far", True, 3)


def test_round_robin_takes_each_with_room_in_turn():
    engines = [engine("c", FAR), engine("a", num=3), engine("full", num=4), engine("b", NEIGHBOUR)]
    turns = [decide(HERE, engines, policy="round_robin", turn=turn) for turn in range(6)]
    assert [decision and decision.target for decision in turns] == ["a", "b", "c", "a", "b", "c"]
    assert [decision and decision.need_migration for decision in turns[:3]] == [False, True, True]


@pytest.mark.parametrize("policy", ["locality", "least_loaded", "round_robin"])
def test_nobody_with_room_means_no_decision(policy):
    assert decide(HERE, [], policy=policy) is None
    assert decide(HERE, [engine("a", num=4), engine("b", FAR, most=0)], policy=policy) is None


@pytest.mark.parametrize("policy", ["locality", "least_loaded", "round_robin"])
def test_what_cannot_move_is_decoded_on_its_device_or_not_at_all(policy):
    elsewhere = [engine("gpu", GPU), engine("next", NEIGHBOUR), engine("far", FAR)]
    assert decide(HERE, elsewhere, policy=policy, needs_migration=stays) is None
    near = [*elsewhere, engine("near", num=3)]
    decision = decide(HERE, near, policy=policy, needs_migration=stays, turn=5)
    assert decision == DecodeDecision("near", need_migration=False, distance=0)


# ---- Prompts over several nodes --------


def test_a_tie_goes_to_the_node_whose_decode_has_less_to_do():
    engines = [engine("a", HERE), engine("b", NEIGHBOUR)]
    decodes = [engine("da", HERE, num=2), engine("db", NEIGHBOUR, num=1)]
    assert choose_prefill(engines, 5, decodes=decodes) == "b"
    assert choose_prefill(engines, 5, decodes=[*decodes, engine("da2", HERE)]) == "a"


def test_a_prefix_does_not_draw_every_prompt_to_its_node():
    """Up to a quarter of what an engine can hold; then another node computes the prefix once, too."""
    engines, cached = [engine("a", HERE, most=32), engine("b", NEIGHBOUR, most=32)], {"a": 500}
    for num, target in [(0, "a"), (7, "a"), (8, "b"), (32, "b")]:
        decodes = [engine("da", HERE, num=num, most=32), engine("db", NEIGHBOUR, most=32)]
        assert choose_prefill(engines, 550, cached=cached, decodes=decodes, can_migrate=False) == target


def test_a_prefix_does_not_draw_every_prompt_to_its_worker():
    for num, target in [(7, "a"), (8, "b")]:
        engines = [engine("a", num=num, most=32, owned=9), engine("b", NEIGHBOUR, most=32)]
        assert choose_prefill(engines, 300, cached={"a": 288}) == target


def test_64_prompts_at_once_are_spread_over_two_equal_nodes():
    counts = {"a": 0, "b": 0}
    for _ in range(64):
        engines = [engine(name, place, counts[name], 64, 20 * counts[name]) for name, place in PAIR]
        decodes = [engine(f"d{name}", place, most=64) for name, place in PAIR]
        counts[choose_prefill(engines, 20, decodes=decodes)] += 1
    assert counts == {"a": 32, "b": 32}


PAIR = (("a", HERE), ("b", NEIGHBOUR))


def test_without_migration_no_prompt_goes_where_nobody_can_decode_it():
    engines = [engine("a", HERE, tokens=900), engine("b", NEIGHBOUR)]
    decodes = [engine("da", HERE, num=3)]
    assert choose_prefill(engines, 5, decodes=decodes) == "b"
    assert choose_prefill(engines, 5, decodes=decodes, can_migrate=False) == "a"
    assert choose_prefill(engines[1:], 5, decodes=decodes, can_migrate=False) is None


def test_without_migration_a_full_node_gets_prompts_only_when_all_are_full():
    engines = [engine("a", HERE), engine("b", NEIGHBOUR, tokens=900)]
    full, free = engine("da", HERE, num=4), engine("db", NEIGHBOUR, num=3)
    assert choose_prefill(engines, 5, decodes=[full, free], can_migrate=False) == "b"
    assert choose_prefill(engines, 5, decodes=[full, engine("db", NEIGHBOUR, num=4)], can_migrate=False) == "a"


def test_while_no_decode_is_ready_prompts_are_computed_all_the_same():
    assert choose_prefill([engine("a"), engine("b", NEIGHBOUR)], 5, can_migrate=False) == "a"
