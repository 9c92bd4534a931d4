"""Powers of two of 16 lanes, for softmax and SiLU."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from pdactors.kernels import cpu
from pdactors.kernels.simd import F32, I16, I32, VI, V, emit_call, emit_splat, vector

# 2^f on [0, 1), highest power first, fitted for the least relative error with f(0) = 1: so integers give exact powers.
_EXP2 = (0.000216128385, 0.00124678664, 0.00967544966, 0.0554852814, 0.240229305, 0.693147044, 1.0)  # 2e-09
_EXP2_COARSE = (0.077065021, 0.227647199, 0.69511629, 1.0)  # 9e-05


def _emit_exp2(builder: ir.IRBuilder, value: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
    def constant(number: float) -> ir.Value:
        return emit_splat(builder, ir.Constant(F32, number), V)

    all_lanes, rounding = ir.Constant(I16, 0xFFFF), ir.Constant(I32, 4)
    if cpu.HAS_AVX512:
        downwards = ir.Constant(I32, 9)
        part = emit_call(
            builder, "llvm.x86.avx512.mask.reduce.ps.512", V, [value, downwards, value, all_lanes, rounding]
        )
    else:
        low = constant(-127.0)
        value = builder.select(builder.fcmp_ordered(">", value, low), value, low)
        whole = emit_call(builder, "llvm.floor.v16f32", V, [value])
        part = builder.fsub(value, whole)
    result = constant(coefficients[0])
    for coefficient in coefficients[1:]:
        result = emit_call(builder, "llvm.fma.v16f32", V, [result, part, constant(coefficient)])
    if cpu.HAS_AVX512:
        arguments = [result, value, value, all_lanes, rounding]
        return emit_call(builder, "llvm.x86.avx512.mask.scalef.ps.512", V, arguments)
    exponent = builder.add(builder.fptosi(whole, VI), emit_splat(builder, ir.Constant(I32, 127), VI))
    scale = builder.bitcast(builder.shl(exponent, emit_splat(builder, ir.Constant(I32, 23), VI)), V)
    return builder.fmul(result, scale)


@intrinsic
def exp2(typingctx, value):
    """Return 2 to the power of each lane, for finite arguments up to 127; 0 far down. Relative error below 3e-7."""

    def codegen(context, builder, signature, values):
        return _emit_exp2(builder, values[0], _EXP2)

    return vector(vector), codegen


@intrinsic
def exp2_coarse(typingctx, value):
    """Return 2 to the power of each lane, like `exp2`, with a relative error below 2e-4: bfloat16 rounds to 4e-3."""

    def codegen(context, builder, signature, values):
        return _emit_exp2(builder, values[0], _EXP2_COARSE)

    return vector(vector), codegen


def exp2_for(array: Any, value: Any) -> Any:
    """Return two to the power of each lane, as exactly as the dtype of `array` deserves."""
    raise NotImplementedError("only inside compiled code")


@overload(exp2_for)
def _exp2_for(array, value):
    if array.dtype == types.uint16:
        return lambda array, value: exp2_coarse(value)
    return lambda array, value: exp2(value)
