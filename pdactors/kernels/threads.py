"""What threads of one step need of each other: an atomic counter, patience, and a clock."""

from __future__ import annotations

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from pdactors.kernels.simd import I64, emit_address, emit_call

_PATIENCE = 1024  # rounds of waiting before the core is offered to others: more threads than cores may be at work


@intrinsic
def add_atomically(typingctx, array, index, value):
    """Add to an int64 that other threads add to, and return what it was."""

    def codegen(context, builder, signature, values):
        pointer = emit_address(context, builder, array, values[0], values[1])
        return builder.atomic_rmw("add", pointer, values[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Let the other thread of the core go first for a moment."""

    def codegen(context, builder, signature, values):
        emit_call(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def give_way(typingctx):
    """Let another thread have this core, if one waits for it."""

    def codegen(context, builder, signature, values):
        emit_call(builder, "sched_yield", ir.IntType(32), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def cycles(typingctx):
    """Return the CPU's time-stamp counter."""

    def codegen(context, builder, signature, values):
        return emit_call(builder, "llvm.readcyclecounter", I64, [])

    return types.int64(), codegen


@njit(nogil=True)
def meet(barrier, threads):
    """Wait until all threads are here; `barrier` counts arrivals for ever."""
    if threads > 1:
        ticket = add_atomically(barrier, 0, 1)
        goal = (ticket // threads + 1) * threads
        rounds = 0
        while add_atomically(barrier, 0, 0) < goal:
            pause()
            rounds += 1
            if rounds % _PATIENCE == 0:
                give_way()


@njit(nogil=True)
def share(count, thread, threads):
    """Return the part `begin, end` of `count` things that a thread does."""
    return count * thread // threads, count * (thread + 1) // threads
