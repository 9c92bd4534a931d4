"""Registers of float32 to and from small integers in bytes, for the KV codecs.

`frame` is a uint8 array and `at` a byte of it, aligned to nothing and checked by nobody, as in `simd.py`. Where there
is a `count`, only so many lanes are read or written, 16 if it is larger.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdactors.kernels.simd import (
    I8,
    I16,
    I32,
    LANES,
    V_BF16,
    VB,
    VI,
    V,
    emit_aligned,
    emit_call,
    emit_narrow,
    emit_pointer,
    emit_splat,
    vector,
)  # fmt: skip

_V8 = ir.VectorType(I8, LANES)
_V16 = ir.VectorType(I16, LANES)
ELEMENTS = {types.uint16: V_BF16, types.int16: ir.VectorType(ir.HalfType(), LANES)}  # what arrays of integers hold
_TO_INTEGER = 12582912.0  # 1.5 * 2^23: a small number added to it is rounded, and its last bits are that integer


def _emit_integers(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Return lanes whose low bits are the nearest integers; those of numbers out of range are any."""
    shifted = builder.fadd(value, emit_splat(builder, ir.Constant(V.element, _TO_INTEGER), V))
    return builder.bitcast(shifted, VI)


def _emit_constant(builder: ir.IRBuilder, number: int) -> ir.Value:
    return ir.Constant(VI, [number] * LANES)


def _emit_split(builder: ir.IRBuilder, count: ir.Value, emit: Any) -> ir.Value:
    """Call `emit` with no mask for a whole register, and with that of the first lanes otherwise."""
    is_whole = builder.icmp_signed(">=", count, ir.Constant(count.type, LANES))
    results = []
    with builder.if_else(is_whole, likely=True) as (then, otherwise):
        with then:
            results.append((emit(None), builder.block))
        with otherwise:
            lanes = ir.Constant(VI, list(range(LANES)))
            limit = emit_splat(builder, builder.trunc(count, I32), VI)
            results.append((emit(builder.icmp_signed("<", lanes, limit)), builder.block))
    if isinstance(results[0][0].type, ir.VoidType):
        return results[0][0]
    found = builder.phi(results[0][0].type)
    for value, block in results:
        found.add_incoming(value, block)
    return found


def _emit_load(builder: ir.IRBuilder, pointer: ir.Value, count: ir.Value) -> ir.Value:
    """Load the first lanes of the register that a pointer points to; the rest are like the very first."""
    kind = pointer.type.pointee
    alignment = ir.Constant(I32, 1)

    def emit(mask: ir.Value | None) -> ir.Value:
        if mask is None:
            return emit_aligned(builder.load(pointer), 1)
        first = emit_aligned(builder.load(builder.bitcast(pointer, kind.element.as_pointer())), 1)
        arguments = [pointer, alignment, mask, emit_splat(builder, first, kind)]
        return emit_call(builder, f"llvm.masked.load.{_suffix(kind)}.p0", kind, arguments)

    return _emit_split(builder, count, emit)


def _emit_store(builder: ir.IRBuilder, value: ir.Value, pointer: ir.Value, count: ir.Value) -> None:
    """Store the first lanes of a register."""
    alignment = ir.Constant(I32, 1)

    def emit(mask: ir.Value | None) -> ir.Value:
        if mask is None:
            return emit_aligned(builder.store(value, pointer), 1)
        name = f"llvm.masked.store.{_suffix(value.type)}.p0"
        return emit_call(builder, name, ir.VoidType(), [value, pointer, alignment, mask])

    _emit_split(builder, count, emit)


def _suffix(kind: ir.VectorType) -> str:
    return f"v{LANES}{'f32' if kind == V else kind.element}"


def _emit_put(context: Any, builder: ir.IRBuilder, signature: Any, values: Any, number: ir.Value) -> Any:
    """Store a number or a register at a byte, of a register the first lanes if the last argument is their count."""
    pointer = emit_pointer(context, builder, signature.args[0], values[0], values[1], number.type)
    if isinstance(number.type, ir.VectorType):
        _emit_store(builder, number, pointer, values[-1])
    else:
        emit_aligned(builder.store(number, pointer), 1)
    return context.get_dummy_value()


def _emit_get(context: Any, builder: ir.IRBuilder, signature: Any, values: Any, kind: ir.Type) -> ir.Value:
    pointer = emit_pointer(context, builder, signature.args[0], values[0], values[1], kind)
    if isinstance(kind, ir.VectorType):
        return _emit_load(builder, pointer, values[-1])
    return emit_aligned(builder.load(pointer), 1)


def _emit_widened(builder: ir.IRBuilder, bits: ir.Value) -> ir.Value:
    """Make float32 of bfloat16 by integers: without AVX-512 LLVM takes a way for which it has no code."""
    return builder.bitcast(builder.shl(builder.zext(bits, VI), ir.Constant(VI, [16] * LANES)), V)


# ---- Elements --------


@intrinsic
def load_some(typingctx, array, index, count):
    """Return elements `index .. index + count`, at least one; the lanes that are not there are like the first."""
    kind = ELEMENTS.get(array.dtype, V)

    def codegen(context, builder, signature, values):
        held = V if kind is V else _V16
        value = _emit_load(builder, emit_pointer(context, builder, array, values[0], values[1], held), values[2])
        if kind is V_BF16:
            return _emit_widened(builder, value)
        return value if kind is V else builder.fpext(builder.bitcast(value, kind), V)

    return vector(array, types.intp, types.intp), codegen


@intrinsic
def store_some(typingctx, array, index, value, count):
    """Write the first lanes to elements `index .. index + count`."""
    kind = ELEMENTS.get(array.dtype, V)

    def codegen(context, builder, signature, values):
        value = values[2]
        if kind is V_BF16:
            value = emit_narrow(builder, value)
        elif kind is not V:
            value = builder.bitcast(builder.fptrunc(value, kind), _V16)
        pointer = emit_pointer(context, builder, array, values[0], values[1], value.type)
        _emit_store(builder, value, pointer, values[3])
        return context.get_dummy_value()

    return types.void(array, types.intp, vector, types.intp), codegen


# ---- Integers --------


@intrinsic
def store_bytes(typingctx, frame, at, value, count):
    """Write each lane as the nearest signed byte."""

    def codegen(context, builder, signature, values):
        integers = _emit_integers(builder, values[2])
        return _emit_put(context, builder, signature, values, builder.trunc(integers, _V8))

    return types.void(frame, types.intp, vector, types.intp), codegen


@intrinsic
def load_bytes(typingctx, frame, at, count):
    """Return up to 16 signed bytes."""

    def codegen(context, builder, signature, values):
        integers = builder.sext(_emit_get(context, builder, signature, values, _V8), VI)
        return builder.sitofp(integers, V)

    return vector(frame, types.intp, types.intp), codegen


@intrinsic
def store_nibbles(typingctx, frame, at, low, high, count):
    """Write 16 bytes: the last four bits of the integers nearest to `low` and, above them, to `high`."""

    def codegen(context, builder, signature, values):
        low, high = (_emit_integers(builder, value) for value in values[2:4])
        low = builder.and_(low, _emit_constant(builder, 15))
        both = builder.or_(low, builder.shl(high, _emit_constant(builder, 4)))
        return _emit_put(context, builder, signature, values, builder.trunc(both, _V8))

    return types.void(frame, types.intp, vector, vector, types.intp), codegen


@intrinsic
def load_nibbles(typingctx, frame, at, count):
    """Return the numbers 0 to 15 in the low halves of 16 bytes, and those in the high ones."""

    def codegen(context, builder, signature, values):
        both = builder.zext(_emit_get(context, builder, signature, values, _V8), VI)
        low = builder.and_(both, _emit_constant(builder, 15))
        high = builder.lshr(both, _emit_constant(builder, 4))
        halves = [builder.sitofp(half, V) for half in (low, high)]
        return context.make_tuple(builder, signature.return_type, halves)

    return types.UniTuple(vector, 2)(frame, types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def store_bit(typingctx, frame, at, value, weight):
    """Write two bytes: for each lane one bit of the nearest integer, the one that counts `weight`, a constant."""
    number = weight.literal_value

    def codegen(context, builder, signature, values):
        bit = builder.and_(_emit_integers(builder, values[2]), _emit_constant(builder, number))
        is_set = builder.icmp_unsigned("!=", bit, _emit_constant(builder, 0))
        return _emit_put(context, builder, signature, values, builder.bitcast(is_set, I16))

    return types.void(frame, types.intp, vector, weight), codegen


@intrinsic(prefer_literal=True)
def add_bit(typingctx, frame, at, value, weight):
    """Return `value` and, in lanes whose bit is set in two bytes, `weight` more, a constant."""
    number = weight.literal_value

    def codegen(context, builder, signature, values):
        is_set = builder.bitcast(_emit_get(context, builder, signature, values, I16), VB)
        more = builder.fadd(values[2], ir.Constant(V, [float(number)] * LANES))
        return builder.select(is_set, more, values[2])

    return vector(frame, types.intp, vector, weight), codegen


# ---- Scales --------


@intrinsic
def store_scales(typingctx, frame, at, value, count):
    """Write a register as 16 bfloat16."""

    def codegen(context, builder, signature, values):
        return _emit_put(context, builder, signature, values, emit_narrow(builder, values[2]))

    return types.void(frame, types.intp, vector, types.intp), codegen


@intrinsic
def load_scales(typingctx, frame, at, count):
    """Return up to 16 bfloat16."""

    def codegen(context, builder, signature, values):
        bits = _emit_get(context, builder, signature, values, _V16)
        return _emit_widened(builder, bits)

    return vector(frame, types.intp, types.intp), codegen


@intrinsic
def load_scale(typingctx, frame, at):
    """Return one bfloat16 in every lane."""

    def codegen(context, builder, signature, values):
        bits = builder.zext(_emit_get(context, builder, signature, values, I16), I32)
        high = builder.shl(bits, ir.Constant(I32, 16))
        return emit_splat(builder, builder.bitcast(high, V.element), V)

    return vector(frame, types.intp), codegen


def _emit_outwards(builder: ir.IRBuilder, value: ir.Value, is_outwards: ir.Value | None) -> ir.Value:
    """Cut lanes to bfloat16: away from zero where it `is_outwards`, everywhere if None; else towards it."""
    bits = builder.bitcast(value, VI)
    more = _emit_constant(builder, 0xFFFF)
    if is_outwards is not None:
        more = builder.select(is_outwards, more, _emit_constant(builder, 0))
    cut = builder.and_(builder.add(bits, more), _emit_constant(builder, 0xFFFF0000))
    return builder.bitcast(cut, V)


@intrinsic
def up(typingctx, value):
    """Return the least bfloat16 that is not below each lane, none of which is negative."""

    def codegen(context, builder, signature, values):
        return _emit_outwards(builder, values[0], None)

    return vector(vector), codegen


@intrinsic
def down(typingctx, value):
    """Return the greatest bfloat16 that is not above each lane."""

    def codegen(context, builder, signature, values):
        is_negative = builder.fcmp_ordered("<", values[0], ir.Constant(V, [0.0] * LANES))
        return _emit_outwards(builder, values[0], is_negative)

    return vector(vector), codegen


# ---- Extent --------


@intrinsic
def absolute(typingctx, value):
    """Return each lane without its sign."""

    def codegen(context, builder, signature, values):
        return emit_call(builder, "llvm.fabs.v16f32", V, [values[0]])

    return vector(vector), codegen


def _across(comparison: str) -> Any:
    """Return an intrinsic that finds the lane that comes first by a comparison; one that is NaN may be lost."""

    @intrinsic
    def reduce(typingctx, value):
        def codegen(context, builder, signature, values):
            value, width = values[0], LANES
            while width > 1:
                width //= 2
                kind = ir.VectorType(I32, width)
                halves = [
                    builder.shuffle_vector(value, value, ir.Constant(kind, [*range(at, at + width)]))
                    for at in (0, width)
                ]
                value = builder.select(builder.fcmp_ordered(comparison, *halves), *halves)
            return builder.extract_element(value, ir.Constant(I32, 0))

        return types.float32(vector), codegen

    return reduce


highest, lowest = _across(">"), _across("<")
