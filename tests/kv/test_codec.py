from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pdactors.kv.codec import CodecName, decode, encode, encoded_bytes, prepare
from pdactors.kv.layout import KVDtype, KVLayout

CODECS: tuple[CodecName, ...] = ("int8", "int4")
DTYPES: dict[KVDtype, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
ROUNDING: dict[KVDtype, float] = {"bfloat16": 2**-8, "float16": 2**-10, "float32": 2**-22}
LARGEST: dict[KVDtype, float] = {"bfloat16": 3e38, "float16": 6e4, "float32": 3e38}
SMALLEST: dict[KVDtype, float] = {"bfloat16": 2.0**-125, "float16": 2.0**-23, "float32": 2.0**-125}
CANARY = 0xA5
some = settings(max_examples=40, deadline=None)
SMOLLM = KVLayout(30, 3, 64, 32, "bfloat16")

layouts = st.builds(
    KVLayout,
    num_layers=st.integers(1, 3),
    num_kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 81),
    block_tokens=st.integers(1, 40),
    dtype=st.sampled_from(list(DTYPES)),
)


def blocks_of(layout: KVLayout, keys: Any, values: Any) -> Any:
    """Return blocks from K and V `[blocks, layers, kv_heads, tokens, channels]`, rounded to the layout's dtype."""
    planes = torch.stack([keys.flatten(-2), values.transpose(-1, -2).flatten(-2)], 2).to(DTYPES[layout.dtype])
    return planes.contiguous().view(torch.uint8).reshape(len(keys), -1).numpy()


def numbers(layout: KVLayout, blocks: Any) -> tuple[Any, Any]:
    """Return K and V of blocks as float64, the reverse of `blocks_of`."""
    planes = torch.from_numpy(blocks.copy()).view(DTYPES[layout.dtype]).double().numpy()
    planes = planes.reshape(len(blocks), *layout.shape)
    shape = len(blocks), layout.num_layers, layout.num_kv_heads
    keys = planes[:, :, 0].reshape(*shape, layout.block_tokens, layout.head_dim)
    values = planes[:, :, 1].reshape(*shape, layout.head_dim, layout.block_tokens).swapaxes(-1, -2)
    return keys, values


def random_blocks(layout: KVLayout, seed: int, spread: float, count: int = 2) -> Any:
    """Return blocks of numbers whose magnitudes lie far apart: from group to group, and in some groups too."""
    rng = np.random.default_rng(seed)
    shape = (2, count, layout.num_layers, layout.num_kv_heads, layout.block_tokens, layout.head_dim)
    low, high = np.log(SMALLEST[layout.dtype]) * spread, np.log(LARGEST[layout.dtype] / 8) * spread
    scale = np.exp(rng.uniform(low, high, (*shape[:-1], 1)))
    found = rng.normal(size=shape) * scale
    found[rng.random(shape) < 0.1] = 0
    found += scale * (rng.random((*shape[:-1], 1)) < 0.3) * 3  # a range far from zero
    found[:, 0, 0, 0, 0] = 0.0
    found = np.clip(found, -LARGEST[layout.dtype], LARGEST[layout.dtype])
    return blocks_of(layout, *torch.from_numpy(found))


def most_wrong(codec: CodecName, layout: KVLayout, exact: Any, is_key: bool) -> Any:
    """Return how far each number, `[..., channels]` in float64, may be from what is decoded."""
    width, levels = (16, 127) if codec == "int8" else (32, 63 if is_key else 15)
    bound = np.empty_like(exact)
    for begin in range(0, layout.head_dim, width):
        group = exact[..., begin : begin + width]
        if codec == "int8":
            scale = np.abs(group).max(-1, keepdims=True) / levels
        else:
            low = group.min(-1, keepdims=True)
            scale = (group.max(-1, keepdims=True) - low + np.abs(low) * 2**-7) / levels
        largest = np.abs(group).max(-1, keepdims=True)
        bound[..., begin : begin + width] = scale * 0.51 + largest * ROUNDING[layout.dtype] + 2**-125
    if layout.dtype == "float16":
        bound += 2**-24
    return bound


def through(codec: CodecName, layout: KVLayout, blocks: Any) -> Any:
    """Return blocks that were encoded and decoded."""
    frames = np.zeros((len(blocks), encoded_bytes(codec, layout)), np.uint8)
    found = np.zeros_like(blocks)
    encode(codec, layout, blocks, frames)
    decode(codec, layout, frames, found)
    return found


def check_numbers_come_back(codec: CodecName, layout: KVLayout, seed: int, spread: float) -> None:
    blocks = random_blocks(layout, seed, spread)
    before, after = numbers(layout, blocks), numbers(layout, through(codec, layout, blocks))
    for exact, found, is_key in zip(before, after, (True, False), strict=True):
        wrong = np.abs(found - exact) - most_wrong(codec, layout, exact, is_key)
        assert np.isfinite(found).all()
        assert (wrong <= 0).all(), wrong.max()


@pytest.mark.parametrize("codec", CODECS)
@some
@given(layout=layouts, seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.0, 0.05, 0.5, 1.0]))
def test_a_number_is_wrong_by_half_a_step_of_its_group_at_most(codec, layout, seed, spread):
    check_numbers_come_back(codec, layout, seed, spread)


def check_only_the_named_places_are_touched(codec: CodecName, layout: KVLayout, seed: int) -> None:
    blocks = random_blocks(layout, seed, 0.05, count=5)
    size, order = encoded_bytes(codec, layout), [3, 0, 4]
    wide = np.full((len(order) + 2) * size, CANARY, np.uint8)
    before = blocks.copy()
    encode(codec, layout, blocks, wide[size:-size].reshape(-1, size), blocks=order)
    assert (blocks == before).all()
    assert (wide[:size] == CANARY).all()
    assert (wide[-size:] == CANARY).all()
    target = np.full((7, layout.block_bytes), CANARY, np.uint8)
    decode(codec, layout, wide[size:-size].reshape(-1, size), target, blocks=[1, 5, 3])
    assert (target[[0, 2, 4, 6]] == CANARY).all()
    assert (target[[1, 5, 3]] == through(codec, layout, blocks[order])).all()


@pytest.mark.parametrize("codec", CODECS)
@some
@given(layout=layouts, seed=st.integers(0, 2**32 - 1))
def test_blocks_are_read_and_written_where_they_lie_and_nothing_beside_them(codec, layout, seed):
    check_only_the_named_places_are_touched(codec, layout, seed)


@pytest.mark.parametrize("codec", CODECS)
@some
@given(layout=layouts, seed=st.integers(0, 2**32 - 1))
def test_every_byte_of_a_frame_is_written(codec, layout, seed):
    blocks = random_blocks(layout, seed, 0.05)
    frames = [np.full((2, encoded_bytes(codec, layout)), fill, np.uint8) for fill in (0, 255)]
    for frame in frames:
        encode(codec, layout, blocks, frame)
    assert (frames[0] == frames[1]).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_and_single_numbers_come_back_as_they_were(codec, dtype):
    layout = KVLayout(2, 2, 24, 16, dtype)
    for number in (0.0, 1.0, -2.5, 96.0):
        shape = (1, 2, 2, 16, 24)
        blocks = blocks_of(layout, torch.full(shape, number), torch.full(shape, number))
        for exact, found in zip(numbers(layout, blocks), numbers(layout, through(codec, layout, blocks)), strict=True):
            assert np.abs(found - exact).max() <= (0 if codec == "int4" else abs(number) / 120)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rubbish", [float("nan"), float("inf"), float("-inf")])
def test_rubbish_in_one_token_spoils_no_other(codec, dtype, rubbish):
    layout = KVLayout(2, 2, 64, 32, dtype)
    blocks = random_blocks(layout, 5, 0.05)
    keys, values = (torch.from_numpy(part.copy()) for part in numbers(layout, blocks))
    keys[..., 20:, 3], values[..., 20:, 3] = rubbish, rubbish
    spoilt = blocks_of(layout, keys, values)
    clean, dirty = (numbers(layout, through(codec, layout, given)) for given in (blocks, spoilt))
    width = 16 if codec == "int8" else 32
    for before, after in zip(clean, dirty, strict=True):
        assert (before[..., :20, :] == after[..., :20, :]).all()
        assert (before[..., width:] == after[..., width:]).all()


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bytes_can_be_decoded(codec, dtype):
    layout = KVLayout(1, 2, 50, 9, dtype)
    size = encoded_bytes(codec, layout)
    random = np.random.default_rng(3).integers(0, 256, (4, size), np.uint8)
    for frames in (random, np.full((4, size), 0xFF, np.uint8), np.full((4, size), 0x7F, np.uint8)):
        target = np.zeros((4, layout.block_bytes), np.uint8)
        decode(codec, layout, frames, target)
        assert target.any()


def test_sizes_are_known_before():
    assert encoded_bytes("int8", SMOLLM) == SMOLLM.block_bytes * 9 // 16
    assert encoded_bytes("int4", SMOLLM) == SMOLLM.block_bytes * 3 // 8
    wide = KVLayout(30, 3, 64, 32, "float32")
    assert encoded_bytes("int8", wide) == encoded_bytes("int8", SMOLLM)


@pytest.mark.parametrize("codec", CODECS)
def test_what_does_not_fit_is_refused(codec):
    layout = KVLayout(1, 1, 16, 8, "bfloat16")
    size = encoded_bytes(codec, layout)
    blocks, frames = np.zeros((3, layout.block_bytes), np.uint8), np.zeros((3, size), np.uint8)
    fixed = frames.copy()
    fixed.flags.writeable = False
    refused = [
        (blocks[:, 1:], frames, None, "source"),
        (blocks.view(np.int8), frames, None, "source"),
        (blocks[:2], frames, None, "3 frames for 2 blocks"),
        (blocks, frames[:, :-1], None, "frames"),
        (blocks, frames[:1], [3], "not all among"),
        (blocks, frames[:1], [-1], "not all among"),
        (blocks, fixed, None, "written"),
    ]
    for source, out, named, message in refused:
        with pytest.raises(ValueError, match=message):
            encode(codec, layout, source, out, blocks=named)
    with pytest.raises(ValueError, match="named twice"):
        decode(codec, layout, frames[:2], blocks, blocks=[1, 1])
    with pytest.raises(ValueError, match="target"):
        decode(codec, layout, frames, blocks[:, 2:])
    odd = np.zeros(3 * layout.block_bytes + 1, np.uint8)[1:].reshape(3, -1)
    with pytest.raises(ValueError, match="aligned"):
        encode(codec, layout, odd, frames)


def test_an_unknown_codec_is_refused_by_name():
    with pytest.raises(ValueError, match="no codec 'int3'; there are int8, int4"):
        encoded_bytes("int3", SMOLLM)


@pytest.mark.parametrize("codec", CODECS)
def test_nothing_at_all_can_be_encoded_and_frames_may_be_read_only(codec):
    layout = KVLayout(1, 1, 16, 16, "bfloat16")
    prepare(codec, layout)
    size = encoded_bytes(codec, layout)
    blocks = random_blocks(layout, 1, 0.05)
    encode(codec, layout, blocks, np.zeros((0, size), np.uint8), blocks=[])
    frames = np.zeros((2, size), np.uint8)
    encode(codec, layout, blocks, frames)
    received = np.frombuffer(frames.tobytes(), np.uint8).reshape(2, size)
    target = np.zeros_like(blocks)
    decode(codec, layout, received, target)
    assert (target == through(codec, layout, blocks)).all()
