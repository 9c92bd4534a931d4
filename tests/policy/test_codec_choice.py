from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pdactors.policy.codec_choice import CodecCost, choose_codec

GIGABYTE = 1_000_000_000
MEASURED = {"int8": CodecCost(0.5625, 4e9, 6e9), "int4": CodecCost(0.375, 3e9, 5e9)}
LOSS = {"none": 0, "int8": 1, "int4": 2}
rates = st.floats(1e8, 2e10)
costs = st.fixed_dictionaries(
    {},
    optional={
        "int8": st.builds(CodecCost, st.just(0.5625), rates, rates),
        "int4": st.builds(CodecCost, st.just(0.375), rates, rates),
    },
)
links = st.floats(1e6, 2e10)
sizes = st.integers(1, 10 * GIGABYTE)
times = st.none() | st.floats(0, 100)


def loss(size: int, link: float | None, costs: dict, left_s: float | None) -> int:
    return LOSS[choose_codec(size, link_bytes_s=link, costs=costs, left_s=left_s)]


def test_nothing_is_lost_on_a_link_that_nobody_measured():
    assert choose_codec(GIGABYTE, link_bytes_s=None, costs=MEASURED, left_s=0.001) == "none"


def test_nothing_is_lost_by_a_codec_that_nobody_measured():
    assert choose_codec(GIGABYTE, link_bytes_s=1e8, costs={}, left_s=0.001) == "none"


def test_a_gigabit_link_takes_int8():
    assert choose_codec(46_000_000, link_bytes_s=125e6, costs=MEASURED) == "int8"


def test_a_link_as_fast_as_the_codec_takes_none():
    assert choose_codec(46_000_000, link_bytes_s=5e9, costs=MEASURED) == "none"


def test_int4_is_for_those_that_would_be_late():
    assert choose_codec(125_000_000, link_bytes_s=125e6, costs=MEASURED, left_s=0.7) == "int8"
    assert choose_codec(125_000_000, link_bytes_s=125e6, costs=MEASURED, left_s=0.5) == "int4"


def test_what_is_late_anyway_takes_the_fastest():
    assert choose_codec(GIGABYTE, link_bytes_s=125e6, costs=MEASURED, left_s=0.001) == "int4"
    assert choose_codec(GIGABYTE, link_bytes_s=1e10, costs=MEASURED, left_s=0.001) == "none"


@given(sizes, links, links, costs, times)
def test_a_slower_link_never_loses_less(size, first, second, costs, left_s):
    slow, fast = sorted((first, second))
    assert loss(size, slow, costs, left_s) >= loss(size, fast, costs, left_s)


@given(sizes, sizes, links, costs, times)
def test_more_bytes_never_lose_less(first, second, link, costs, left_s):
    few, many = sorted((first, second))
    assert loss(many, link, costs, left_s) >= loss(few, link, costs, left_s)


@given(sizes, links, costs, st.floats(0, 100), st.floats(0, 100))
def test_less_time_never_loses_less(size, link, costs, first, second):
    short, long = sorted((first, second))
    assert loss(size, link, costs, short) >= loss(size, link, costs, long) >= loss(size, link, costs, None)


@given(sizes, links, costs, times)
def test_what_is_chosen_was_measured_and_nothing_lossless_is_both_in_time_and_nearly_as_fast(size, link, costs, left_s):
    chosen = choose_codec(size, link_bytes_s=link, costs=costs, left_s=left_s)
    assert chosen == "none" or chosen in costs
    if chosen != "none" and (left_s is None or size / link <= left_s):
        assert costs["int8"].ratio / link + 1 / costs["int8"].quantise_bytes_s < 0.8 / link
