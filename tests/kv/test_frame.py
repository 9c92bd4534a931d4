"""A transfer's header: what it says survives the wire, what is none is refused, what differs is named."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from pdactors.errors import BadRequest
from pdactors.kv import frame
from pdactors.kv.frame import HEADER_BYTES, SECRET_BYTES, Header, unpack
from pdactors.kv.layout import KVLayout

LAYOUT = KVLayout(2, 2, 8, 8, "float32").fingerprint
SECRET = bytes(range(100, 100 + SECRET_BYTES))
HEADER = Header(SECRET, LAYOUT, 3, 4, 1, 77, 16, 5, "int8", 5 * 720, 0xFEED)
OTHERS = {
    "secret": bytes(SECRET_BYTES),
    "layout": "0" * len(LAYOUT),
    "source": 9,
    "target": 9,
    "attempt": 2,
    "transfer": 78,
    "start": 17,
    "num_blocks": 6,
    "codec": "none",
    "size": 1,
}
u32, u64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)


@given(
    st.builds(
        Header,
        secret=st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES),
        layout=st.text("0123456789abcdef", min_size=len(LAYOUT), max_size=len(LAYOUT)),
        source=u64,
        target=u64,
        attempt=u32,
        transfer=u64,
        start=u32,
        num_blocks=u32,
        codec=st.sampled_from(frame._CODECS),
        size=u64,
        checksum=u64,
        is_void=st.booleans(),
    )
)
def test_what_is_packed_comes_back(header):
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert unpack(packed) == header


@given(st.binary(max_size=2 * HEADER_BYTES))
def test_garbage_is_refused(data):
    with pytest.raises(BadRequest, match=r"header"):
        unpack(data)


@pytest.mark.parametrize("length", [0, 1, HEADER_BYTES - 1, HEADER_BYTES + 1])
def test_a_header_of_another_length_is_none(length):
    with pytest.raises(BadRequest, match=f"128 bytes, not {length}"):
        unpack((HEADER.pack() * 2)[:length])


@pytest.mark.parametrize(("place", "value"), [(0, ord("x")), (4, 2), (5, len(frame._CODECS)), (5, 255)])
def test_another_magic_version_or_codec_is_refused(place, value):
    data = bytearray(HEADER.pack())
    data[place] = value
    with pytest.raises(BadRequest, match="no header of version 1"):
        unpack(bytes(data))


@given(place=st.integers(0, HEADER_BYTES - 1), bit=st.integers(0, 7))
def test_a_damaged_header_is_refused_or_differs(place, bit):
    data = bytearray(HEADER.pack())
    data[place] ^= 1 << bit
    try:
        damaged = unpack(bytes(data))
    except BadRequest:
        return
    is_rest = damaged == HEADER  # padding
    aside = damaged._replace(checksum=HEADER.checksum, is_void=HEADER.is_void) == HEADER
    assert is_rest or aside or damaged.differs(HEADER)


def test_what_was_expected_does_not_differ():
    assert HEADER.differs(HEADER) == ""
    assert HEADER._replace(checksum=1, is_void=True).differs(HEADER) == ""


@pytest.mark.parametrize("field", [name for name in Header._fields if name not in ("checksum", "is_void")])
def test_each_field_that_differs_is_named_with_both_values(field):
    other = HEADER._replace(**{field: OTHERS[field]})
    reason = other.differs(HEADER)
    assert reason.startswith(field)
    if field != "secret":
        assert str(OTHERS[field]) in reason
        assert str(getattr(HEADER, field)) in reason


def test_a_secret_is_never_shown():
    reason = HEADER._replace(secret=bytes(SECRET_BYTES)).differs(HEADER)
    assert reason == "secret"
    wrong_twice = HEADER._replace(secret=bytes(SECRET_BYTES), start=99).differs(HEADER)
    for form in (SECRET.hex(), repr(SECRET)[2:-1], bytes(SECRET_BYTES).hex()):
        assert form not in wrong_twice
    with pytest.raises(BadRequest) as caught:
        unpack(b"x" + HEADER.pack()[1:])
    assert SECRET.hex()[:8] not in str(caught.value)


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_the_checksum_is_that_of_all_parts_in_a_row(parts):
    arrays = [np.frombuffer(part, np.uint8) for part in parts]
    assert frame.checksum(arrays) == xxhash.xxh3_64(b"".join(parts)).intdigest()
