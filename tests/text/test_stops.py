import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pdactors.errors import BadRequest
from pdactors.text.stops import StopMatcher

letters = st.text("ab", max_size=24)


def run(stops, pieces):
    matcher = StopMatcher(stops)
    out = []
    for piece in pieces:
        text, stopped = matcher.push(piece)
        out.append(text)
        if stopped:
            break
    out.append(matcher.flush())
    return "".join(out), matcher.stopped


def cut(text, cuts):
    bounds = [0, *sorted(at % (len(text) + 1) for at in cuts), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@given(letters, st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(st.integers(0, 99), max_size=24))
@example("abab", ["abaa", "b"], [1, 2, 3])
@example("aab", ["ab"], [1, 2])
def test_the_text_ends_before_the_first_stop_string_however_it_is_cut(text, stops, cuts):
    first = min((text.find(stop) for stop in stops if stop in text), default=None)
    assert run(stops, cut(text, cuts)) == (text[:first], first is not None)


@given(letters, st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4))
def test_held_text_always_begins_a_stop_string(text, stops):
    matcher = StopMatcher(stops)
    emitted = ""
    for character in text:
        piece, stopped = matcher.push(character)
        emitted += piece
        if stopped:
            return
    held = text[len(emitted) :]
    assert not held or any(stop.startswith(held[: len(stop)]) for stop in stops)


def test_an_earlier_stop_that_may_still_come_true_is_waited_for():
    matcher = StopMatcher(["abcd", "bc"])
    assert matcher.push("xabc") == ("x", False)
    assert matcher.push("d") == ("", True)
    matcher = StopMatcher(["abcd", "bc"])
    matcher.push("xabc")
    assert matcher.push("e") == ("a", True)


def test_a_stop_that_is_held_at_the_end_still_counts():
    matcher = StopMatcher(["abcd", "bc"])
    matcher.push("abc")
    assert (matcher.flush(), matcher.stopped) == ("a", True)


def test_without_stop_strings_everything_passes_at_once():
    matcher = StopMatcher([])
    assert [matcher.push(piece) for piece in ("a", "", "b")] == [("a", False), ("", False), ("b", False)]
    assert matcher.flush() == ""


def test_nothing_comes_after_a_stop():
    matcher = StopMatcher(["."])
    assert matcher.push("a.b") == ("a", True)
    assert matcher.push("c") == ("", True)
    assert matcher.flush() == ""


def test_an_empty_stop_string_is_refused_by_its_place():
    with pytest.raises(BadRequest, match=r"stop\[1\] must not be empty"):
        StopMatcher(["a", ""])
