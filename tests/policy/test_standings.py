"""The rules choose the same from the few engines that the standings offer as from all."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pdactors.policy.placement import EngineView, Place, choose_prefill, schedule_decode
from pdactors.policy.standings import Standings

PLACES = [Place(f"n{i}", f"r{i // 3}") for i in range(7)]


@st.composite
def fleets(draw, role):
    count = draw(st.integers(1, 9))
    room = draw(st.sampled_from([4, 24]))
    return [
        EngineView(
            f"{role}{i}",
            draw(st.sampled_from(PLACES)),
            draw(st.integers(0, room + (room == 4))),
            room,
            draw(st.sampled_from([0, 0, 100, 500])),
        )
        for i in range(count)
    ]


@st.composite
def histories(draw, *, has_decodes):
    """Return engines as they are told of, one after the other, and what of them is left at the end."""
    firsts, decodes = draw(fleets("p")), draw(fleets("d")) if has_decodes else []
    told = [*firsts, *decodes]
    for view in draw(st.lists(st.sampled_from(told), max_size=20)):
        change = draw(st.integers(0, view.max_requests))
        told.append(replace(view, num_requests=change, pending_tokens=draw(st.sampled_from([0, 100, 500]))))
    gone = draw(st.sets(st.sampled_from([view.name for view in told]), max_size=3))
    return told, gone


def standings_of(told, gone):
    standings = Standings()
    for view in told:
        standings.put(view, is_first=view.name.startswith("p"))
    for name in gone:
        standings.drop(name)
    last = {view.name: view for view in told}
    left = [view for name, view in last.items() if name not in gone]
    firsts = [view for view in left if view.name.startswith("p")]
    return standings, firsts, [view for view in left if view.name.startswith("d")]


@settings(max_examples=150, deadline=None)
@given(
    st.booleans().flatmap(lambda has: histories(has_decodes=has)),
    st.dictionaries(st.integers(0, 6), st.integers(1, 400)),
)
def test_the_best_for_a_prompt_is_among_the_few(history, known):
    standings, firsts, decodes = standings_of(*history)
    cached = {v.name: known.get(PLACES.index(v.place), 0) for v in firsts}
    nodes = {v.place.node for v in firsts if cached[v.name]}
    few = standings.firsts(nodes)
    near = standings.crowds(few)
    expected = choose_prefill(firsts, 500, cached=cached, decodes=decodes)
    assert choose_prefill(few, 500, cached=cached, decodes=near if decodes else []) == expected
    assert {view.name for view in few} <= {view.name for view in firsts}


@settings(max_examples=150, deadline=None)
@given(
    histories(has_decodes=True),
    st.sampled_from(PLACES),
    st.dictionaries(st.integers(0, 8), st.integers(1, 9), max_size=3),
    st.sampled_from(["locality", "least_loaded"]),
    st.integers(0, 3),
)
def test_the_best_for_a_sequence_is_among_the_few(history, source, owned, policy, max_distance):
    standings, _, decodes = standings_of(*history)
    owned = {f"d{number}": count for number, count in owned.items()}

    def choose(views):
        views = [replace(view, num_owned=owned.get(view.name, 0)) for view in views]
        return schedule_decode(
            source, views, policy=policy, max_distance=max_distance, needs_migration=lambda one, other: one != other
        )

    assert choose(standings.decodes(source, owned)) == choose(decodes)
