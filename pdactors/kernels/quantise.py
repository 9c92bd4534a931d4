"""The KV codecs' arithmetic: planes of a block to small integers in a frame, and back.

Channels of a token form groups, and what is stored of a group depends on that token alone: slots that hold nobody's KV
may hold anything. Numbers become integers by a scale, and in int4 an offset, each a bfloat16; both cover all of the
group, and the integers are those nearest under what is stored, so no number is wrong by more than half a scale.

A K plane is `[tokens, channels]`, a V plane `[channels, tokens]`; the lanes of a register are channels in the one and
tokens in the other. A frame holds the planes in the block's order, each of them so (`groups` of a token):

    int8, groups of 16 channels
        K   scales [tokens, groups] bfloat16, integers [tokens, channels] int8
        V   scales [groups, tokens] bfloat16, integers [channels, tokens] int8
    int4, groups of 32 channels: 16 pairs of channels i and i + 16 in a byte's low and high half
        K   offsets, scales [tokens, groups] bfloat16, [tokens, groups, (16 pairs, 4 * 16 bits)]
        V   offsets, scales [groups, tokens] bfloat16, [groups, 16 pairs, tokens]

K's errors cost far more than V's: in int4 K has 6 bits a number, V 4. K's upper two lie as bits, of channels 0 to 15
and of 16 to 31, first those that count 16.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from pdactors.kernels.codes import (
    absolute,
    add_bit,
    down,
    highest,
    load_bytes,
    load_nibbles,
    load_scale,
    load_scales,
    load_some,
    lowest,
    store_bit,
    store_bytes,
    store_nibbles,
    store_scales,
    store_some,
    up,
)  # fmt: skip
from pdactors.kernels.simd import LANES, fma, load, maximum, minimum, splat, store

NARROW, WIDE = LANES, 2 * LANES  # channels of a group: in int8, in int4
_MOST_8, _MOST_KEY, _MOST_VALUE = 127.0, 63.0, 15.0  # the largest integers
_KEY_BYTES = 24  # of a group, beside its offset and scale
_TINY = 2.0**-126  # a scale is no less, so that it has an inverse
_LOWEST = -3.3895313892515355e38  # bfloat16's


def frame_bytes8(layers: int, kv_heads: int, head_dim: int, block_tokens: int) -> int:
    """Return the bytes of a block in int8."""
    return layers * 2 * kv_heads * _plane8(head_dim, block_tokens)


def frame_bytes4(layers: int, kv_heads: int, head_dim: int, block_tokens: int) -> int:
    """Return the bytes of a block in int4."""
    return layers * kv_heads * (_key_plane4(head_dim, block_tokens) + _value_plane4(head_dim, block_tokens))


@njit(nogil=True, forceinline=True)
def _groups(head_dim, width):
    return (head_dim + width - 1) // width


@njit(nogil=True, forceinline=True)
def _after(channel, head_dim):
    """Return where the next group begins in its token: at 0 after the last. A division takes longer than a group."""
    return channel if channel < head_dim else 0


@njit(nogil=True, forceinline=True)
def _plane8(head_dim, block_tokens):
    return block_tokens * (2 * _groups(head_dim, NARROW) + head_dim)


@njit(nogil=True, forceinline=True)
def _key_plane4(head_dim, block_tokens):
    return block_tokens * _groups(head_dim, WIDE) * (4 + _KEY_BYTES)


@njit(nogil=True, forceinline=True)
def _value_plane4(head_dim, block_tokens):
    return block_tokens * _groups(head_dim, WIDE) * (4 + LANES)


# ---- int8 --------


@njit(nogil=True, forceinline=True)
def _scale8(top):
    """Return the scales of groups whose largest numbers these are."""
    return up(maximum(top * splat(1.0 / _MOST_8), splat(_TINY)))


@njit(nogil=True)
def _encode_keys8(source, at, head_dim, block_tokens, frame, to, floats):
    """Take 16 groups at a time, so that their scales are one register."""
    num_groups = block_tokens * _groups(head_dim, NARROW)
    integers = to + 2 * num_groups
    place = channel = 0
    for first in range(0, num_groups, LANES):
        count = min(LANES, num_groups - first)
        began, from_channel = place, channel
        for i in range(count):
            size = min(NARROW, head_dim - channel)
            floats[LANES + i] = highest(absolute(load_some(source, at + place, size)))
            place, channel = place + size, _after(channel + size, head_dim)
        scale = _scale8(load(floats, LANES))
        store_scales(frame, to + 2 * first, scale, count)
        store(floats, LANES, splat(1.0) / scale)
        place, channel = began, from_channel
        for i in range(count):
            size = min(NARROW, head_dim - channel)
            value = load_some(source, at + place, size) * splat(floats[LANES + i])
            store_bytes(frame, integers + place, value, size)
            place, channel = place + size, _after(channel + size, head_dim)


@njit(nogil=True)
def _decode_keys8(frame, at, head_dim, block_tokens, target, to):
    num_groups = block_tokens * _groups(head_dim, NARROW)
    integers = at + 2 * num_groups
    place = channel = 0
    for i in range(num_groups):
        size = min(NARROW, head_dim - channel)
        value = load_bytes(frame, integers + place, size) * load_scale(frame, at + 2 * i)
        store_some(target, to + place, value, size)
        place, channel = place + size, _after(channel + size, head_dim)


@njit(nogil=True)
def _encode_values8(source, at, head_dim, block_tokens, frame, to):
    integers = to + 2 * block_tokens * _groups(head_dim, NARROW)
    for token in range(0, block_tokens, LANES):
        count = min(LANES, block_tokens - token)
        for begin in range(0, head_dim, NARROW):
            end = min(begin + NARROW, head_dim)
            top = splat(0.0)
            for row in range(begin, end):
                top = maximum(absolute(load_some(source, at + row * block_tokens + token, count)), top)
            scale = _scale8(top)
            store_scales(frame, to + 2 * (begin // NARROW * block_tokens + token), scale, count)
            inverse = splat(1.0) / scale
            for row in range(begin, end):
                place = row * block_tokens + token
                value = load_some(source, at + place, count) * inverse
                store_bytes(frame, integers + place, value, count)


@njit(nogil=True)
def _decode_values8(frame, at, head_dim, block_tokens, target, to):
    integers = at + 2 * block_tokens * _groups(head_dim, NARROW)
    for token in range(0, block_tokens, LANES):
        count = min(LANES, block_tokens - token)
        for begin in range(0, head_dim, NARROW):
            scale = load_scales(frame, at + 2 * (begin // NARROW * block_tokens + token), count)
            for row in range(begin, min(begin + NARROW, head_dim)):
                place = row * block_tokens + token
                value = load_bytes(frame, integers + place, count) * scale
                store_some(target, to + place, value, count)


@njit(nogil=True, cache=True)
def encode8(source, rows, row_elements, layers, kv_heads, head_dim, block_tokens, frames):
    """Encode `rows` (int64) of a flat array of blocks to the frames of a flat uint8 array, one after the other."""
    floats = np.zeros(2 * LANES, np.float32)
    plane, size = head_dim * block_tokens, _plane8(head_dim, block_tokens)
    to = 0
    for row in rows:
        at = row * row_elements
        for _ in range(layers):
            for _ in range(kv_heads):
                _encode_keys8(source, at, head_dim, block_tokens, frames, to, floats)
                at, to = at + plane, to + size
            for _ in range(kv_heads):
                _encode_values8(source, at, head_dim, block_tokens, frames, to)
                at, to = at + plane, to + size


@njit(nogil=True, cache=True)
def decode8(frames, rows, row_elements, layers, kv_heads, head_dim, block_tokens, target):
    """Decode frames to `rows` of a flat array of blocks, the reverse of `encode8`."""
    plane, size = head_dim * block_tokens, _plane8(head_dim, block_tokens)
    at = 0
    for row in rows:
        to = row * row_elements
        for _ in range(layers):
            for _ in range(kv_heads):
                _decode_keys8(frames, at, head_dim, block_tokens, target, to)
                at, to = at + size, to + plane
            for _ in range(kv_heads):
                _decode_values8(frames, at, head_dim, block_tokens, target, to)
                at, to = at + size, to + plane


# ---- int4 --------


@njit(nogil=True, forceinline=True)
def _offset4(low):
    return down(maximum(low, splat(_LOWEST)))


@njit(nogil=True, forceinline=True)
def _scale4(low, high, most):
    """Return the scales of groups between two numbers. Each is divided alone: their difference may be infinite."""
    part = splat(1.0 / most)
    return up(maximum(high * part - low * part, splat(_TINY)))


@njit(nogil=True, forceinline=True)
def _integer4(value, inverse, shift, most):
    """Return numbers between 0 and `most`, to be rounded; 0 for NaN."""
    return minimum(maximum(fma(value, inverse, shift), splat(0.0)), splat(most))


@njit(nogil=True)
def _encode_keys4(source, at, head_dim, block_tokens, frame, to, floats):
    """Take 16 groups at a time, so that their offsets and scales are registers."""
    num_groups = block_tokens * _groups(head_dim, WIDE)
    integers = to + 4 * num_groups
    place = channel = 0
    for start in range(0, num_groups, LANES):
        count = min(LANES, num_groups - start)
        began, from_channel = place, channel
        for i in range(count):
            size = min(WIDE, head_dim - channel)
            first = load_some(source, at + place, size)
            second = load_some(source, at + place + LANES, size - LANES) if size > LANES else first
            floats[LANES + i] = lowest(minimum(first, second))
            floats[2 * LANES + i] = highest(maximum(first, second))
            place, channel = place + size, _after(channel + size, head_dim)
        low = _offset4(load(floats, LANES))
        scale = _scale4(low, load(floats, 2 * LANES), _MOST_KEY)
        store_scales(frame, to + 2 * start, low, count)
        store_scales(frame, to + 2 * (num_groups + start), scale, count)
        inverse = splat(1.0) / scale
        store(floats, LANES, inverse)
        store(floats, 2 * LANES, splat(0.0) - low * inverse)
        place, channel = began, from_channel
        for i in range(count):
            size = min(WIDE, head_dim - channel)
            first = load_some(source, at + place, size)
            second = load_some(source, at + place + LANES, size - LANES) if size > LANES else first
            inverse, shift = splat(floats[LANES + i]), splat(floats[2 * LANES + i])
            first = _integer4(first, inverse, shift, _MOST_KEY)
            second = _integer4(second, inverse, shift, _MOST_KEY)
            store_nibbles(frame, integers, first, second, LANES)
            store_bit(frame, integers + 16, first, 16)
            store_bit(frame, integers + 18, second, 16)
            store_bit(frame, integers + 20, first, 32)
            store_bit(frame, integers + 22, second, 32)
            integers += _KEY_BYTES
            place, channel = place + size, _after(channel + size, head_dim)


@njit(nogil=True)
def _decode_keys4(frame, at, head_dim, block_tokens, target, to):
    num_groups = block_tokens * _groups(head_dim, WIDE)
    integers = at + 4 * num_groups
    channel = 0
    for i in range(num_groups):
        size = min(WIDE, head_dim - channel)
        low, scale = load_scale(frame, at + 2 * i), load_scale(frame, at + 2 * (num_groups + i))
        first, second = load_nibbles(frame, integers, LANES)
        first = add_bit(frame, integers + 20, add_bit(frame, integers + 16, first, 16), 32)
        second = add_bit(frame, integers + 22, add_bit(frame, integers + 18, second, 16), 32)
        store_some(target, to, fma(first, scale, low), size)
        if size > LANES:
            store_some(target, to + LANES, fma(second, scale, low), size - LANES)
        integers += _KEY_BYTES
        to, channel = to + size, _after(channel + size, head_dim)


@njit(nogil=True)
def _encode_values4(source, at, head_dim, block_tokens, frame, to):
    num_groups = _groups(head_dim, WIDE)
    scales = to + 2 * block_tokens * num_groups
    integers = scales + 2 * block_tokens * num_groups
    for token in range(0, block_tokens, LANES):
        count = min(LANES, block_tokens - token)
        for group in range(num_groups):
            begin, end = group * WIDE, min((group + 1) * WIDE, head_dim)
            low = high = load_some(source, at + begin * block_tokens + token, count)
            for row in range(begin + 1, end):
                value = load_some(source, at + row * block_tokens + token, count)
                low, high = minimum(value, low), maximum(value, high)
            low = _offset4(low)
            scale = _scale4(low, high, _MOST_VALUE)
            place = group * block_tokens + token
            store_scales(frame, to + 2 * place, low, count)
            store_scales(frame, scales + 2 * place, scale, count)
            inverse = splat(1.0) / scale
            shift = splat(0.0) - low * inverse
            for pair in range(LANES):
                row = min(begin + pair, end - 1)  # what is not there is like the last
                first = load_some(source, at + row * block_tokens + token, count)
                row = min(begin + pair + LANES, end - 1)
                second = load_some(source, at + row * block_tokens + token, count)
                first = _integer4(first, inverse, shift, _MOST_VALUE)
                second = _integer4(second, inverse, shift, _MOST_VALUE)
                pairs = integers + (group * LANES + pair) * block_tokens + token
                store_nibbles(frame, pairs, first, second, count)


@njit(nogil=True)
def _decode_values4(frame, at, head_dim, block_tokens, target, to):
    num_groups = _groups(head_dim, WIDE)
    scales = at + 2 * block_tokens * num_groups
    integers = scales + 2 * block_tokens * num_groups
    for token in range(0, block_tokens, LANES):
        count = min(LANES, block_tokens - token)
        for group in range(num_groups):
            place = group * block_tokens + token
            low = load_scales(frame, at + 2 * place, count)
            scale = load_scales(frame, scales + 2 * place, count)
            for pair in range(LANES):
                pairs = integers + (group * LANES + pair) * block_tokens + token
                first, second = load_nibbles(frame, pairs, count)
                row = group * WIDE + pair
                if row < head_dim:
                    store_some(target, to + row * block_tokens + token, fma(first, scale, low), count)
                row += LANES
                if row < head_dim:
                    store_some(target, to + row * block_tokens + token, fma(second, scale, low), count)


@njit(nogil=True, cache=True)
def encode4(source, rows, row_elements, layers, kv_heads, head_dim, block_tokens, frames):
    """Encode `rows` (int64) of a flat array of blocks to the frames of a flat uint8 array, one after the other."""
    floats = np.zeros(3 * LANES, np.float32)
    plane = head_dim * block_tokens
    to = 0
    for row in rows:
        at = row * row_elements
        for _ in range(layers):
            for _ in range(kv_heads):
                _encode_keys4(source, at, head_dim, block_tokens, frames, to, floats)
                at, to = at + plane, to + _key_plane4(head_dim, block_tokens)
            for _ in range(kv_heads):
                _encode_values4(source, at, head_dim, block_tokens, frames, to)
                at, to = at + plane, to + _value_plane4(head_dim, block_tokens)


@njit(nogil=True, cache=True)
def decode4(frames, rows, row_elements, layers, kv_heads, head_dim, block_tokens, target):
    """Decode frames to `rows` of a flat array of blocks, the reverse of `encode4`."""
    plane = head_dim * block_tokens
    at = 0
    for row in rows:
        to = row * row_elements
        for _ in range(layers):
            for _ in range(kv_heads):
                _decode_keys4(frames, at, head_dim, block_tokens, target, to)
                at, to = at + _key_plane4(head_dim, block_tokens), to + plane
            for _ in range(kv_heads):
                _decode_values4(frames, at, head_dim, block_tokens, target, to)
                at, to = at + _value_plane4(head_dim, block_tokens), to + plane
