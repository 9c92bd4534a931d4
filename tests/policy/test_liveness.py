from __future__ import annotations

from pdactors.policy.liveness import Liveness


def watch(liveness: Liveness, until: float, step: float = 0.5, start: float = 0.0) -> list[str]:
    """Look every `step` seconds from `start` to `until`; return the last answer."""
    silent: list[str] = []
    now = start
    while now <= until:
        silent = liveness.silent(now)
        now += step
    return silent


def test_nobody_is_watched_before_it_was_heard():
    assert watch(Liveness(2.0), 100.0) == []


def test_a_peer_is_silent_after_its_term_and_not_before():
    liveness = Liveness(2.0)
    liveness.heard("a", 0.0)
    assert watch(liveness, 2.0) == []
    assert liveness.silent(2.5) == ["a"]


def test_a_sign_of_life_starts_a_new_term():
    liveness = Liveness(2.0)
    liveness.heard("a", 0.0)
    watch(liveness, 1.5)
    liveness.heard("a", 1.5)
    assert watch(liveness, 3.5, start=2.0) == []
    assert liveness.silent(4.0) == ["a"]


def test_only_the_silent_are_named():
    liveness = Liveness(2.0)
    liveness.heard("a", 0.0)
    liveness.heard("b", 0.0)
    watch(liveness, 2.0)
    liveness.heard("b", 2.0)
    assert liveness.silent(2.5) == ["a"]


def test_the_forgotten_are_not_watched_and_may_come_back():
    liveness = Liveness(2.0)
    liveness.forget("a")
    liveness.heard("a", 0.0)
    liveness.forget("a")
    assert watch(liveness, 5.0) == []
    liveness.heard("a", 5.0)
    assert watch(liveness, 7.5, start=5.5) == ["a"]


def test_a_pause_of_the_observer_is_not_the_peers_silence():
    liveness = Liveness(2.0)
    liveness.heard("a", 0.0)
    watch(liveness, 0.5)
    assert liveness.silent(60.0) == []
    assert watch(liveness, 62.0, start=60.5) == []
    assert liveness.silent(62.5) == ["a"]


def test_the_first_look_may_come_late():
    liveness = Liveness(2.0)
    liveness.heard("a", 0.0)
    assert liveness.silent(3.0) == ["a"]
