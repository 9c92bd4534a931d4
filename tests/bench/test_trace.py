from __future__ import annotations

import json
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors.bench.trace import TraceLine, _prompt, read_trace, trace_requests
from pdactors.errors import ConfigError

VOCABULARY = range(10, 400)
GOOD = {"timestamp": 0, "input_length": 600, "output_length": 50, "hash_ids": [1, 2]}


@pytest.fixture
def write(tmp_path):
    """Write a trace of objects, or of lines as they are."""

    def writer(*lines):
        path = tmp_path / "trace.jsonl"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        path.write_text("".join(text + "\n" for text in texts), "utf-8", errors="surrogateescape")
        return path

    return writer


def test_requests_have_the_traces_lengths_and_times(write):
    path = write({**GOOD, "timestamp": 7000, "session": "more"}, {**GOOD, "timestamp": 8500})
    first, second = trace_requests(path, 1.0, VOCABULARY, "1")
    assert (first.kind, len(first.prompt), first.max_tokens, first.at_s) == ("trace", 600, 50, 0.0)
    assert second.at_s == 1.5
    assert first.prompt == second.prompt


def test_lengths_are_divided_and_never_fall_to_nothing(write):
    path = write(GOOD, {**GOOD, "input_length": 1, "output_length": 1, "hash_ids": [9]})
    scaled, tiny = trace_requests(path, 10.0, VOCABULARY, "1")
    assert (len(scaled.prompt), scaled.max_tokens) == (60, 5)
    assert (len(tiny.prompt), tiny.max_tokens) == (1, 1)


def test_another_seed_gives_other_tokens_of_the_same_lengths(write):
    one, other = (next(trace_requests(write(GOOD), 4.0, VOCABULARY, seed)) for seed in "12")
    assert one.prompt[:16] != other.prompt[:16]
    assert len(one.prompt) == len(other.prompt)


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
    st.floats(1, 512),
    st.data(),
)
def test_equal_hash_ids_are_equal_prefixes_and_others_are_not(ids_a, ids_b, scale, data):
    """Ids of a trace say what is before them, too: make such ones of the drawn ones."""
    prompts = []
    for ids in (ids_a, ids_b):
        chained = tuple(hash(tuple(ids[: i + 1])) & 0xFFFFFFFF for i in range(len(ids)))
        length = data.draw(st.integers(512 * (len(ids) - 1) + 1, 512 * len(ids)))
        prompts.append(_prompt(TraceLine(0, length, 1, chained), scale, range(10**6), "1"))
        assert len(prompts[-1]) == max(1, round(length / scale))
    equal = next((i for i, (a, b) in enumerate(zip(ids_a, ids_b, strict=False)) if a != b), min(len(ids_a), len(ids_b)))
    common = min(round(512 * equal / scale), *map(len, prompts))
    assert prompts[0][:common] == prompts[1][:common]
    rest = [prompt[common : common + 4] for prompt in prompts]
    if ids_a[equal : equal + 1] != ids_b[equal : equal + 1] and all(len(part) == 4 for part in rest) and scale < 100:
        assert rest[0] != rest[1]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("{", "line 3: "),
        ("", "line 3: "),
        ("[]", "line 3: "),
        ("\udcff", "line 3: "),
        ({**GOOD, "timestamp": -1}, "timestamp"),
        ({**GOOD, "timestamp": "soon"}, "timestamp"),
        ({**GOOD, "input_length": 0}, "input_length"),
        ({**GOOD, "output_length": 1.5}, "output_length"),
        ({**GOOD, "hash_ids": [1, 2, 3]}, "3 hash_ids for an input_length of 600; expected 2"),
        ({**GOOD, "hash_ids": [1, -2]}, "hash_ids"),
        ({"timestamp": 0, "input_length": 5, "output_length": 5}, "hash_ids"),
        ({**GOOD, "timestamp": 3}, "timestamp 3 is before 5, the one before it"),
        ('{"x": "' + "a" * (1 << 20) + '"}', "longer than 1048576 bytes"),
    ],
)
def test_a_wrong_line_is_named_and_those_before_it_are_read(write, line, part):
    lines = read_trace(write(GOOD, {**GOOD, "timestamp": 5}, line))
    assert len(list(islice(lines, 2))) == 2
    with pytest.raises(ConfigError, match=r"trace\.jsonl, line 3: ") as caught:
        next(lines)
    assert part in str(caught.value)


def test_a_trace_that_is_missing_or_empty_is_refused(tmp_path, write):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        next(read_trace(tmp_path / "none.jsonl"))
    with pytest.raises(ConfigError, match="has no requests"):
        next(read_trace(write()))
