from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors import messages
from pdactors.errors import BadRequest
from pdactors.messages import Generate, Sampling, decode, encode
from pdactors.token_ids import MAX_TOKEN_ID, TokenIds, from_wire, to_wire

IDS = st.lists(st.integers(0, MAX_TOKEN_ID), max_size=20)


@given(ids=IDS)
def test_ids_come_out_as_they_went_in(ids):
    packed = TokenIds.of(ids)
    assert list(packed) == ids
    assert len(packed) == len(ids)
    assert [packed[i] for i in range(-len(ids), len(ids))] == ids * 2
    assert np.asarray(packed, "<u4").tolist() == ids
    assert all(type(token) is int for token in [*packed, *packed[:], *(packed[i] for i in range(len(ids)))])


@given(ids=IDS, start=st.integers(-25, 25), stop=st.integers(-25, 25))
def test_a_slice_is_a_list_of_ids(ids, start, stop):
    assert TokenIds.of(ids)[start:stop] == ids[start:stop]


def test_ids_are_little_endian():
    assert TokenIds.of([1, 258]).packed == b"\x01\x00\x00\x00\x02\x01\x00\x00"


def test_equal_ids_are_equal_and_hash_alike():
    assert TokenIds.of([1, 2]) == TokenIds.of((1, 2))
    assert hash(TokenIds.of([1, 2])) == hash(TokenIds.of((1, 2)))
    assert TokenIds.of([1, 2]) != TokenIds.of([2, 1])
    assert TokenIds.of([1, 2]) != (1, 2)


def test_an_index_out_of_range_is_an_index_error():
    with pytest.raises(IndexError):
        TokenIds.of([1])[1]


@pytest.mark.parametrize("token", [-1, 2**31, 2**32, 2**70, 1.0, "1", None])
def test_what_is_no_token_id_is_refused(token):
    with pytest.raises(ValueError, match=r"a token id is"):
        TokenIds.of([1, token])


def test_ids_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        np.asarray(TokenIds.of([1]))[0] = 2


# ---- In messages --------


def generate(prompt: object) -> bytes:
    body = {"type": "Generate", "request": "r", "prompt": prompt, "sampling": {}}
    return msgspec.msgpack.encode(body)


def test_a_prompt_travels_as_one_run_of_bytes():
    prompt = TokenIds.of(range(3000))
    (frame,) = encode(Generate("r", prompt, Sampling()))
    assert prompt.packed in frame
    assert len(frame) < 4 * 3000 + 64
    assert decode(messages.control_decoder, [frame]).prompt == prompt


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (b"\x01\x00\x00", "token ids take 4 bytes each, got 3 bytes"),
        (b"\x01\x00\x00\x00\x00\x00\x00\x80", "a token id is at most 2147483647, got 2147483648"),
        ([1, 2], "expected packed token ids, got list"),
        ("1234", "expected packed token ids, got str"),
        (None, "expected packed token ids, got NoneType"),
    ],
)
def test_a_prompt_that_is_none_is_refused_by_name(prompt, reason):
    with pytest.raises(BadRequest) as caught:
        decode(messages.control_decoder, [generate(prompt)])
    assert caught.value.message == f"prompt: {reason}"


def test_other_types_are_none_of_its_business():
    with pytest.raises(TypeError, match="a set cannot travel"):
        to_wire({1})
    with pytest.raises(ValueError, match="expected packed token ids, got bytes"):
        from_wire(set, b"")
