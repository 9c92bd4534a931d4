"""SIMD for numba: products of pair lines, which is how packed matrices lie (see `pack.py`), and what goes with them.

Nothing is checked here either, see `simd.py`.
"""

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdactors.kernels import cpu
from pdactors.kernels.simd import (
    BF16,
    F32,
    I16,
    I32,
    LANES,
    VI,
    V,
    emit_aligned,
    emit_call,
    emit_narrow,
    emit_pointer,
    emit_splat,
    vector,
)

_V4 = ir.VectorType(F32, 4)
_PAIRS = ir.VectorType(BF16, 2 * LANES)


def _products(builder: ir.IRBuilder, sums: ir.Value, line: ir.Value, factors: ir.Value, *, narrow: bool) -> ir.Value:
    """Add the products of two registers of 32-bit lanes: of one float32 each, or of two bfloat16, the lower first."""
    if not narrow:
        return emit_call(builder, "llvm.fma.v16f32", V, [builder.bitcast(line, V), builder.bitcast(factors, V), sums])
    if cpu.ROUNDS_BF16:
        pairs = [builder.bitcast(side, _PAIRS) for side in (line, factors)]
        return emit_call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", V, [sums, *pairs])
    high = emit_splat(builder, ir.Constant(I32, 0xFFFF0000), VI)
    sixteen = emit_splat(builder, ir.Constant(I32, 16), VI)
    even = [builder.bitcast(builder.shl(side, sixteen), V) for side in (line, factors)]
    odd = [builder.bitcast(builder.and_(side, high), V) for side in (line, factors)]
    return emit_call(builder, "llvm.fma.v16f32", V, [*odd, emit_call(builder, "llvm.fma.v16f32", V, [*even, sums])])


def _transposed(builder: ir.IRBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """Return the columns of 16 registers, or of each quarter of 4: swap ever larger blocks beside the diagonal."""
    rows, size = list(rows), 1
    while size < len(rows):
        upper = [lane if not lane & size else LANES + lane - size for lane in range(LANES)]
        lower = [LANES + lane if lane & size else lane + size for lane in range(LANES)]
        for number in range(len(rows)):
            if not number & size:
                pair = rows[number], rows[number + size]
                rows[number] = builder.shuffle_vector(*pair, ir.Constant(VI, upper))
                rows[number + size] = builder.shuffle_vector(*pair, ir.Constant(VI, lower))
        size *= 2
    return rows


def _joined(builder: ir.IRBuilder, first: ir.Value, second: ir.Value) -> ir.Value:
    count = 2 * first.type.count
    return builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, count), [*range(count)]))


@intrinsic
def add_pair(typingctx, sums, packed, index, a, i):
    """Return `sums` + a[i] * row 2p + a[i + 1] * row 2p + 1 of a packed matrix, whose pair line begins at `index`.

    Where the CPU has an instruction for it, as for AMX's tiles, each product of bfloat16 is exact.
    """
    narrow = packed.dtype == types.uint16

    def codegen(context, builder, signature, values):
        sums, right, index, left, i = values
        for number in range(1 if narrow else 2):
            at = builder.add(index, ir.Constant(index.type, number * LANES))
            line = emit_aligned(builder.load(emit_pointer(context, builder, packed, right, at, VI)), 2)
            at = builder.add(i, ir.Constant(i.type, number))
            factor = emit_aligned(builder.load(emit_pointer(context, builder, a, left, at, I32)), 2)
            sums = _products(builder, sums, line, emit_splat(builder, factor, VI), narrow=narrow)
        return sums

    return vector(vector, packed, types.intp, a, types.intp), codegen


@intrinsic
def add_tile(typingctx, sums, a, index, stride, packed, at):
    """Return the `sums` of 16 rows of `a` with four columns, one column a register, with more products added.

    They are those of each row's 64 bytes from `index` on, rows `stride` apart, with a packed column tile from `at` on:
    the products that `add_pair` adds, in the same order.
    """
    narrow = packed.dtype == types.uint16
    line = 2 * LANES if narrow else LANES  # elements in 64 bytes

    def codegen(context, builder, signature, values):
        columns, left, index, stride, right, at = values
        rows = []
        for number in range(LANES):
            spot = builder.add(index, builder.mul(stride, ir.Constant(stride.type, number)))
            rows.append(emit_aligned(builder.load(emit_pointer(context, builder, a, left, spot, VI)), line // LANES))
        sums = [builder.extract_value(columns, number) for number in range(4)]
        for step, lanes in enumerate(_transposed(builder, rows)):
            for column in range(4):
                spot = builder.add(at, ir.Constant(at.type, step * line + column * line // LANES))
                bits = emit_pointer(context, builder, packed, right, spot, I32)
                factors = emit_splat(builder, emit_aligned(builder.load(bits), line // LANES), VI)
                sums[column] = _products(builder, sums[column], lanes, factors, narrow=narrow)
        return context.make_tuple(builder, signature.return_type, sums)

    return sums(sums, a, types.intp, types.intp, packed, types.intp), codegen


@intrinsic
def load_four(typingctx, array, index):
    """Return the first four columns of float32 `[16, 16]`, one a register."""

    def codegen(context, builder, signature, values):
        parts = []
        for row in range(LANES):
            at = builder.add(values[1], ir.Constant(values[1].type, row * LANES))
            parts.append(emit_aligned(builder.load(emit_pointer(context, builder, array, values[0], at, _V4)), 4))
        rows = []
        for first in range(4):
            halves = [_joined(builder, parts[first + 8 * half], parts[first + 8 * half + 4]) for half in range(2)]
            rows.append(_joined(builder, *halves))
        return context.make_tuple(builder, signature.return_type, _transposed(builder, rows))

    return types.UniTuple(vector, 4)(array, types.intp), codegen


@intrinsic
def store_four(typingctx, array, index, columns):
    """Write the first four columns of float32 `[16, 16]`, the reverse of `load_four`."""

    def codegen(context, builder, signature, values):
        rows = _transposed(builder, [builder.extract_value(values[2], number) for number in range(4)])
        for row in range(LANES):
            lanes = [*range(row // 4 * 4, row // 4 * 4 + 4)]
            part = builder.shuffle_vector(rows[row % 4], rows[row % 4], ir.Constant(ir.VectorType(I32, 4), lanes))
            at = builder.add(values[1], ir.Constant(values[1].type, row * LANES))
            emit_aligned(builder.store(part, emit_pointer(context, builder, array, values[0], at, _V4)), 4)
        return context.get_dummy_value()

    return types.void(array, types.intp, columns), codegen


@intrinsic
def store_pair(typingctx, array, index, even, odd):
    """Write two registers as a pair line, see `pack.py`."""
    narrow = array.dtype == types.uint16

    def codegen(context, builder, signature, values):
        if narrow:
            halves = [emit_narrow(builder, value) for value in values[2:]]
            order = [lane // 2 + LANES * (lane % 2) for lane in range(2 * LANES)]
            mask = ir.Constant(ir.VectorType(I32, 2 * LANES), order)
            line = builder.shuffle_vector(halves[0], halves[1], mask)
            pointer = emit_pointer(context, builder, array, values[0], values[1], ir.VectorType(I16, 2 * LANES))
            emit_aligned(builder.store(line, pointer), 2)
        else:
            for number, value in enumerate(values[2:]):
                at = builder.add(values[1], ir.Constant(values[1].type, LANES * number))
                emit_aligned(builder.store(value, emit_pointer(context, builder, array, values[0], at, V)), 4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vector, vector), codegen
