"""AMX tiles by number, for numba: constants 0 to 7 in the source. Offsets and strides count elements, unchecked."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from pdactors.kernels.simd import I8, I64, emit_call, emit_pointer


def _tile(signature: Any, position: int) -> ir.Constant:
    """Return the number of a tile, which must be a constant in the source."""
    return ir.Constant(I8, signature.args[position].literal_value)


@intrinsic
def tile_config(typingctx, array):
    """Set the shapes of the thread's tiles from 64 bytes, see `cpu.py`."""

    def codegen(context, builder, signature, values):
        pointer = emit_pointer(context, builder, array, values[0], ir.Constant(I64, 0), I8)
        emit_call(builder, "llvm.x86.ldtilecfg", ir.VoidType(), [pointer])
        return context.get_dummy_value()

    return types.void(array), codegen


@intrinsic
def tile_release(typingctx):
    """Let go of the thread's tiles."""

    def codegen(context, builder, signature, values):
        emit_call(builder, "llvm.x86.tilerelease", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic(prefer_literal=True)
def tile_zero(typingctx, tile):
    """Clear a tile."""

    def codegen(context, builder, signature, values):
        emit_call(builder, "llvm.x86.tilezero", ir.VoidType(), [_tile(signature, 0)])
        return context.get_dummy_value()

    return types.void(tile), codegen


@intrinsic(prefer_literal=True)
def tile_load(typingctx, tile, array, index, stride):
    """Load a tile whose rows begin `stride` elements apart."""
    size = array.dtype.bitwidth // 8

    def codegen(context, builder, signature, values):
        pointer = emit_pointer(context, builder, array, values[1], values[2], I8)
        stride = builder.mul(values[3], ir.Constant(I64, size))
        emit_call(builder, "llvm.x86.tileloadd64", ir.VoidType(), [_tile(signature, 0), pointer, stride])
        return context.get_dummy_value()

    return types.void(tile, array, types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def tile_store(typingctx, tile, array, index, stride):
    """Write a tile to rows that begin `stride` elements apart."""
    size = array.dtype.bitwidth // 8

    def codegen(context, builder, signature, values):
        pointer = emit_pointer(context, builder, array, values[1], values[2], I8)
        stride = builder.mul(values[3], ir.Constant(I64, size))
        emit_call(builder, "llvm.x86.tilestored64", ir.VoidType(), [_tile(signature, 0), pointer, stride])
        return context.get_dummy_value()

    return types.void(tile, array, types.intp, types.intp), codegen


@intrinsic(prefer_literal=True)
def tile_multiply(typingctx, c, a, b):
    """Add the product of bfloat16 tiles a (rows) and b (pair lines) to the float32 tile c."""

    def codegen(context, builder, signature, values):
        emit_call(builder, "llvm.x86.tdpbf16ps", ir.VoidType(), [_tile(signature, i) for i in range(3)])
        return context.get_dummy_value()

    return types.void(c, a, b), codegen
