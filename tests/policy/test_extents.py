from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors.policy.extents import grant, guaranteed, reachable, recall, shortage


@pytest.mark.parametrize(
    ("num_extents", "engines", "per_sequence", "minimum"),
    [(32, 2, 4, 4), (32, 2, 20, 16), (33, 2, 99, 16), (1, 2, 4, 1), (8, 0, 3, 3), (8, 1, 3, 3)],
)
def test_the_minimum_is_a_longest_sequence_or_an_even_share(num_extents, engines, per_sequence, minimum):
    assert guaranteed(num_extents, engines, per_sequence) == minimum


@given(st.integers(1, 64), st.integers(1, 8), st.integers(1, 64))
def test_all_minimums_fit_in_the_memory_when_there_is_one_for_each(num_extents, engines, per_sequence):
    minimum = guaranteed(num_extents, engines, per_sequence)
    assert minimum >= 1
    if num_extents >= engines:
        assert minimum * engines <= num_extents
        assert reachable(num_extents, engines, minimum) >= minimum


@st.composite
def nodes(draw):
    """Return (owned, free, minimum) of a node, as it can be."""
    engines = draw(st.integers(1, 5))
    num_extents = draw(st.integers(engines, 40))
    minimum = guaranteed(num_extents, engines, draw(st.integers(1, 40)))
    owned, free = Counter(dict.fromkeys(range(engines), 0)), num_extents
    for slot in owned:
        owned[slot] = draw(st.integers(0, reachable(num_extents, engines, minimum)))
        owned[slot] = min(owned[slot], free)
        free -= owned[slot]
    return owned, free, minimum


@given(nodes(), st.data())
def test_a_grant_is_what_is_free_and_wanted_at_most(node, data):
    owned, free, minimum = node
    slot, wanted = data.draw(st.sampled_from(sorted(owned))), data.draw(st.integers(0, 50))
    assert 0 <= grant(wanted, slot, owned, free, minimum) <= min(wanted, free)


@given(nodes(), st.data())
def test_a_grant_beyond_the_minimum_leaves_what_the_others_lack(node, data):
    owned, free, minimum = node
    slot = data.draw(st.sampled_from(sorted(owned)))
    count = grant(50, slot, owned, free, minimum)
    lacking = sum(max(0, minimum - n) for other, n in owned.items() if other != slot)
    if count:
        assert free - count >= lacking


@given(nodes(), st.data())
def test_recall_asks_others_for_what_they_can_spare(node, data):
    owned, _, minimum = node
    slot, wanted = data.draw(st.sampled_from(sorted(owned))), data.draw(st.integers(0, 50))
    asked = recall(wanted, slot, owned, minimum)
    assert slot not in asked
    assert all(count >= 1 and owned[other] - count >= minimum for other, count in asked.items())
    spare = sum(max(0, n - minimum) for other, n in owned.items() if other != slot)
    assert sum(asked.values()) == min(wanted, spare)


def test_recall_asks_the_richest_first():
    assert recall(5, 0, {0: 2, 1: 6, 2: 9}, 4) == {2: 5}
    assert recall(6, 0, {0: 2, 1: 6, 2: 9}, 4) == {2: 5, 1: 1}
    assert recall(0, 0, {0: 2, 1: 6, 2: 9}, 4) == {}


class Node:
    """Engines and migrator as they behave: wants are kept, recalls are answered late, partly, or not at all."""

    def __init__(self, num_extents: int, engines: int, minimum: int) -> None:
        self.minimum, self.free = minimum, num_extents
        self.owned = Counter(dict.fromkeys(range(engines), 0))
        self.demand: dict[int, int] = {}
        self.recalled: Counter[int] = Counter()

    def serve(self) -> None:
        for slot, wanted in list(self.demand.items()):
            count = grant(wanted, slot, self.owned, self.free, self.minimum)
            self.free -= count
            self.owned[slot] += count
            self.demand[slot] = wanted - count
            if not self.demand[slot]:
                del self.demand[slot]
                continue
            for other, spare in recall(self.demand[slot], slot, self.owned, self.minimum).items():
                self.recalled[other] = max(self.recalled[other], spare)

    def want(self, slot: int, count: int) -> None:
        self.demand[slot] = count
        self.serve()

    def give_back(self, slot: int, most: int) -> None:
        """An engine gives back what it was asked for, never below its minimum."""
        count = max(0, min(most, self.recalled[slot], self.owned[slot] - self.minimum))
        self.recalled[slot] = 0
        self.owned[slot] -= count
        self.free += count
        self.serve()


actions = st.lists(st.tuples(st.sampled_from(["want", "return"]), st.integers(0, 4), st.integers(0, 12)), max_size=60)


@given(st.integers(1, 5), st.integers(5, 40), st.integers(1, 40), actions)
def test_nobody_starves(engines, num_extents, per_sequence, history):
    node = Node(num_extents, engines, guaranteed(num_extents, engines, per_sequence))
    for action, slot, count in history:
        if action == "want":
            node.want(slot % engines, count)
        else:
            node.give_back(slot % engines, count)
        assert node.free + node.owned.total() == num_extents
        assert max(node.owned.values()) <= reachable(num_extents, engines, node.minimum)
    node.demand.clear()
    for slot in node.owned:  # all want more than there is, over and over; each returns all that it is asked for
        node.want(slot, num_extents)
    for slot in node.owned:
        node.give_back(slot, num_extents)
    assert min(node.owned.values()) >= node.minimum


@given(st.integers(1, 5), st.integers(5, 40), st.integers(1, 40), actions)
def test_an_engine_gets_its_minimum_as_soon_as_the_rich_give_back(engines, num_extents, per_sequence, history):
    node = Node(num_extents, engines, guaranteed(num_extents, engines, per_sequence))
    for action, slot, count in history:
        if action == "want":
            node.want(slot % engines, count)
    poorest = min(node.owned, key=lambda slot: node.owned[slot])
    node.demand.clear()
    node.want(poorest, max(0, node.minimum - node.owned[poorest]))
    for slot in node.owned:
        node.give_back(slot, num_extents)
    assert node.owned[poorest] >= node.minimum


@given(nodes(), st.data())
def test_once_the_shortage_is_free_the_wish_is_granted(node, data):
    owned, free, minimum = node
    slot, wanted = data.draw(st.sampled_from(sorted(owned))), data.draw(st.integers(1, 50))
    short = shortage(wanted, slot, owned, free, minimum)
    assert grant(wanted, slot, owned, free + short, minimum) == wanted
    assert not short or grant(wanted, slot, owned, free + short - 1, minimum) < wanted
