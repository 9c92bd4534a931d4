"""SIMD for numba: a register of 16 float32 lanes as a value.

`load` and `store` go by the array's dtype: float32 as it is, uint16 as bfloat16 (rounded to nearest even on the way
out). LLVM splits a register where the CPU has narrower ones, so the same source runs on AVX2. Offsets count elements
from the array's first one, and **nothing checks them**: callers validate tables and sizes, and keep owners alive.
"""

from __future__ import annotations

import operator
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import PrimitiveModel
from numba.extending import intrinsic, overload, register_model

from pdactors.kernels import cpu

LANES = 16


class VectorType(types.Type):
    """16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="f32x16")


class _BFloat(ir.types._BaseFloatType):
    """LLVM's bfloat, which llvmlite does not name."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"


_BFloat._create_instance()
vector = VectorType()
I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, BF16 = ir.FloatType(), _BFloat()
V = ir.VectorType(F32, LANES)
VI = ir.VectorType(I32, LANES)
VL = ir.VectorType(I64, LANES)
VB = ir.VectorType(I1, LANES)
_V16 = ir.VectorType(I16, LANES)
V_BF16 = ir.VectorType(BF16, LANES)
_gather_alignment = [ir.Constant(I32, 4)]


@register_model(VectorType)
class _VectorModel(PrimitiveModel):
    def __init__(self, manager: Any, fe_type: Any) -> None:
        super().__init__(manager, fe_type, V)


def emit_address(context: Any, builder: ir.IRBuilder, array: Any, value: ir.Value, index: ir.Value) -> ir.Value:
    data = cgutils.create_struct_proxy(array)(context, builder, value).data
    return builder.gep(data, [index])


def emit_pointer(context: Any, builder: ir.IRBuilder, array: Any, value: ir.Value, index: ir.Value, to: ir.Type) -> Any:
    return builder.bitcast(emit_address(context, builder, array, value, index), to.as_pointer())


def emit_splat(builder: ir.IRBuilder, scalar: ir.Value, to: ir.VectorType) -> ir.Value:
    one = builder.insert_element(ir.Constant(to, ir.Undefined), scalar, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, ir.Constant(to, ir.Undefined), ir.Constant(VI, [0] * LANES))


def emit_call(builder: ir.IRBuilder, name: str, returns: ir.Type, arguments: list[ir.Value]) -> ir.Value:
    kind = ir.FunctionType(returns, [value.type for value in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def emit_narrow(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """Round float32 to nearest even bfloat16, held as 16-bit integers; one or a register."""
    is_vector = isinstance(value.type, ir.VectorType)
    if cpu.ROUNDS_BF16:
        rounded = builder.fptrunc(value, V_BF16 if is_vector else BF16)
        return builder.bitcast(rounded, _V16 if is_vector else I16)

    def constant(number: int) -> ir.Constant:
        return ir.Constant(VI, [number] * LANES) if is_vector else ir.Constant(I32, number)

    bits = builder.bitcast(value, VI if is_vector else I32)
    kept = builder.lshr(bits, constant(16))
    half = builder.add(builder.and_(kept, constant(1)), constant(0x7FFF))
    nearest = builder.lshr(builder.add(bits, half), constant(16))
    result = builder.select(builder.fcmp_unordered("uno", value, value), builder.or_(kept, constant(0x40)), nearest)
    return builder.trunc(result, _V16 if is_vector else I16)


def emit_aligned(instruction: Any, size: int) -> Any:
    instruction.align = size
    return instruction


# ---- Memory --------


@intrinsic
def load(typingctx, array, index):
    """Return elements `index .. index + 16`."""
    narrow = array.dtype == types.uint16

    def codegen(context, builder, signature, values):
        to = V_BF16 if narrow else V
        pointer = emit_pointer(context, builder, array, values[0], values[1], to)
        value = emit_aligned(builder.load(pointer), 2 if narrow else 4)
        return builder.fpext(value, V) if narrow else value

    return vector(array, types.intp), codegen


@intrinsic
def store(typingctx, array, index, value):
    """Write a register to elements `index .. index + 16`."""
    narrow = array.dtype == types.uint16

    def codegen(context, builder, signature, values):
        pointer = emit_pointer(context, builder, array, values[0], values[1], _V16 if narrow else V)
        result = emit_narrow(builder, values[2]) if narrow else values[2]
        emit_aligned(builder.store(result, pointer), 2 if narrow else 4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@intrinsic
def load_scalar(typingctx, array, index):
    """Return one element as float32."""
    narrow = array.dtype == types.uint16

    def codegen(context, builder, signature, values):
        value = builder.load(emit_address(context, builder, array, values[0], values[1]))
        if not narrow:
            return value
        return builder.bitcast(builder.shl(builder.zext(value, I32), ir.Constant(I32, 16)), F32)

    return types.float32(array, types.intp), codegen


@intrinsic
def load_strided(typingctx, array, index, stride):
    """Return 16 elements of a float32 array, `stride` apart."""

    def codegen(context, builder, signature, values):
        lanes = ir.Constant(VL, [4 * lane for lane in range(LANES)])
        base = builder.ptrtoint(emit_address(context, builder, array, values[0], values[1]), I64)
        spots = builder.add(emit_splat(builder, base, VL), builder.mul(lanes, emit_splat(builder, values[2], VL)))
        pointers = builder.inttoptr(spots, ir.VectorType(I8.as_pointer(), LANES))
        mask = ir.Constant(VB, [1] * LANES)
        arguments = [pointers, *_gather_alignment, mask, ir.Constant(V, ir.Undefined)]
        return emit_call(builder, "llvm.masked.gather.v16f32.v16p0", V, arguments)

    return vector(array, types.intp, types.intp), codegen


@intrinsic
def store_scalar(typingctx, array, index, value):
    """Write one float32 to an element."""
    narrow = array.dtype == types.uint16

    def codegen(context, builder, signature, values):
        pointer = emit_pointer(context, builder, array, values[0], values[1], I16 if narrow else F32)
        builder.store(emit_narrow(builder, values[2]) if narrow else values[2], pointer)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.float32), codegen


@intrinsic
def prefetch(typingctx, array, index):
    """Ask for the cache line of an element, which may lie outside the array."""

    def codegen(context, builder, signature, values):
        pointer = emit_pointer(context, builder, array, values[0], values[1], I8)
        flags = [ir.Constant(I32, flag) for flag in (0, 3, 1)]  # read, keep in all caches, data
        emit_call(builder, "llvm.prefetch.p0", ir.VoidType(), [pointer, *flags])
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


# ---- Arithmetic --------


@intrinsic
def splat(typingctx, scalar):
    """Return a register with one value in every lane."""

    def codegen(context, builder, signature, values):
        return emit_splat(builder, values[0], V)

    return vector(types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """Return a * b + c, rounded once."""

    def codegen(context, builder, signature, values):
        return emit_call(builder, "llvm.fma.v16f32", V, list(values))

    return vector(vector, vector, vector), codegen


@intrinsic
def maximum(typingctx, a, b):
    """Return the larger of each pair of lanes."""

    def codegen(context, builder, signature, values):
        return builder.select(builder.fcmp_ordered(">", values[0], values[1]), values[0], values[1])

    return vector(vector, vector), codegen


@intrinsic
def minimum(typingctx, a, b):
    """Return the smaller of each pair of lanes."""

    def codegen(context, builder, signature, values):
        return builder.select(builder.fcmp_ordered("<", values[0], values[1]), values[0], values[1])

    return vector(vector, vector), codegen


def _binary(symbol: str) -> Any:
    @intrinsic
    def operate(typingctx, a, b):
        def codegen(context, builder, signature, values):
            return getattr(builder, symbol)(values[0], values[1])

        return vector(vector, vector), codegen

    return operate


_add, _sub, _mul, _div = (_binary(symbol) for symbol in ("fadd", "fsub", "fmul", "fdiv"))


@overload(operator.add)
def _overload_add(a, b):
    if isinstance(a, VectorType) and isinstance(b, VectorType):
        return lambda a, b: _add(a, b)


@overload(operator.sub)
def _overload_sub(a, b):
    if isinstance(a, VectorType) and isinstance(b, VectorType):
        return lambda a, b: _sub(a, b)


@overload(operator.mul)
def _overload_mul(a, b):
    if isinstance(a, VectorType) and isinstance(b, VectorType):
        return lambda a, b: _mul(a, b)


@overload(operator.truediv)
def _overload_div(a, b):
    if isinstance(a, VectorType) and isinstance(b, VectorType):
        return lambda a, b: _div(a, b)


@intrinsic
def total(typingctx, value):
    """Return the sum of the lanes, pairwise."""

    def codegen(context, builder, signature, values):
        value, width = values[0], LANES
        while width > 1:
            width //= 2
            parts = [
                builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(I32, width), [*range(at, at + width)]))
                for at in (0, width)
            ]
            value = builder.fadd(*parts)
        return builder.extract_element(value, ir.Constant(I32, 0))

    return types.float32(vector), codegen


@intrinsic
def largest(typingctx, value):
    """Return the greatest lane."""

    def codegen(context, builder, signature, values):
        return emit_call(builder, "llvm.vector.reduce.fmax.v16f32", F32, [values[0]])

    return types.float32(vector), codegen


@intrinsic
def keep_below(typingctx, value, count, other):
    """Return `value` in lanes below `count` (any integer) and `other` in the rest."""

    def codegen(context, builder, signature, values):
        lanes = ir.Constant(VI, list(range(LANES)))
        count = emit_splat(builder, builder.trunc(values[1], I32), VI)
        return builder.select(builder.icmp_signed("<", lanes, count), values[0], values[2])

    return vector(vector, types.intp, vector), codegen


@intrinsic
def keep_if_at_most(typingctx, value, a, b, other):
    """Return `value` in lanes where a <= b and `other` in the rest."""

    def codegen(context, builder, signature, values):
        return builder.select(builder.fcmp_ordered("<=", values[1], values[2]), values[0], values[3])

    return vector(vector, vector, vector, vector), codegen


@intrinsic
def same(typingctx, a, b):
    """Whether all lanes are equal."""

    def codegen(context, builder, signature, values):
        lanes = builder.fcmp_ordered("==", values[0], values[1])
        bits = builder.bitcast(lanes, I16)
        return builder.icmp_unsigned("==", bits, ir.Constant(I16, 0xFFFF))

    return types.boolean(vector, vector), codegen


@intrinsic
def ceil(typingctx, value):
    """Return each lane rounded up to an integer."""

    def codegen(context, builder, signature, values):
        return emit_call(builder, "llvm.ceil.v16f32", V, [values[0]])

    return vector(vector), codegen
