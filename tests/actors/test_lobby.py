from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdactors.actors.lobby import Lobby


class Guest:
    def __init__(self) -> None:
        self.cuts: list[str] = []

    def cut(self, why: str) -> None:
        self.cuts.append(why)


def test_the_one_that_waits_for_longest_gives_way() -> None:
    lobby: Lobby[Guest] = Lobby(3)
    guests = [Guest() for _ in range(5)]
    for guest in guests[:3]:
        assert lobby.enter(guest)
    lobby.work(guests[0])
    lobby.work(guests[2])
    lobby.wait(guests[0])
    assert lobby.enter(guests[3])
    assert [bool(guest.cuts) for guest in guests] == [False, True, False, False, False]
    assert lobby.enter(guests[4])
    assert [bool(guest.cuts) for guest in guests] == [True, True, False, False, False]


def test_nobody_gives_way_whose_request_is_under_way() -> None:
    lobby: Lobby[Guest] = Lobby(2)
    busy = [Guest(), Guest()]
    for guest in busy:
        lobby.enter(guest)
        lobby.work(guest)
    assert not lobby.enter(Guest())
    assert not any(guest.cuts for guest in busy)
    lobby.leave(busy[0])
    assert lobby.enter(Guest())


def test_the_oldest_unfinished_request_is_given_up() -> None:
    lobby: Lobby[Guest] = Lobby(10, max_bytes=100)
    first, second, third = Guest(), Guest(), Guest()
    lobby.hold(first, 10)
    lobby.hold(second, 80)
    lobby.hold(first, 20)
    lobby.hold(third, 1)
    assert [len(guest.cuts) for guest in (first, second, third)] == [1, 0, 0]
    lobby.hold(second, 0)
    lobby.hold(third, 100)
    assert not third.cuts


def test_a_guest_that_was_sent_away_does_not_come_back_by_itself() -> None:
    lobby: Lobby[Guest] = Lobby(1)
    first, second = Guest(), Guest()
    lobby.enter(first)
    lobby.enter(second)
    lobby.wait(first)
    lobby.work(first)
    assert first not in lobby
    assert second in lobby


moves = st.lists(
    st.tuples(st.sampled_from(["enter", "wait", "work", "leave", "hold"]), st.integers(0, 5), st.integers(0, 9))
)


@given(moves)
def test_limits_hold_and_books_are_right_whatever_happens(moves: list[tuple[str, int, int]]) -> None:
    lobby: Lobby[Guest] = Lobby(3, max_bytes=12)
    guests = [Guest() for _ in range(6)]
    for what, index, size in moves:
        guest = guests[index]
        if what == "hold":
            lobby.hold(guest, size)
        elif what != "enter" or guest not in lobby:
            getattr(lobby, what)(guest)
        assert len(lobby) <= 3
        assert lobby._num_bytes == sum(lobby._unfinished.values()) <= 12
        assert not lobby._busy & lobby._waiting.keys()
    for guest in guests:
        lobby.leave(guest)
    assert (len(lobby), lobby._num_bytes) == (0, 0)
