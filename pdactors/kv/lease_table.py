"""`LeaseTable`: the lease records at the head of the arena, and who writes what. `leases.py` has the protocol."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pdactors.messages import Lease

GRACE_S = 0.1  # between the lessor's mark and the end of a lease: a holder may be half way through accept or renew
MARGIN_S = 1.0  # a holder stops using a lease so long before its lessor may end it
REQUEST_BYTES = 32

_LINE = 64
_HEAD_BYTES = 3 * _LINE

# A record; every field has one writer. `generation` is written last when a lease is published and 0 when it ends.
#
#   0    lessor   u64 generation, u64 revoked, u64 closing, u64 incarnation, f64 deadline, u32 slot, u32 num_blocks
#   64            32 bytes request, u32 attempt
#   128  holder   u64 accepted, u64 released, f64 renewed_until, u64 incarnation, u32 slot
#   192  lessor   u32 blocks[max_lease_blocks], padded to a multiple of 64
#
# `revoked`, `closing`, `accepted` and `released` hold the generation that they speak of. The two sides meet without
# a lock: the lessor writes `revoked` or `closing`, lets GRACE_S pass, then looks at the holder's line; the holder
# writes its line, then looks at `revoked` and `closing`. So one of them always sees the other. Stores and loads are
# aligned words, in program order on x86-64 but for a store that is still in the store buffer, which the grace covers.
# An ended lease leaves its generation in `revoked`, so that generations never repeat, not even over restarts.
_FIELDS: tuple[tuple[str, str, int], ...] = (
    ("generation", "<u8", 0),
    ("revoked", "<u8", 8),
    ("closing", "<u8", 16),
    ("lessor_incarnation", "<u8", 24),
    ("deadline", "<f8", 32),
    ("lessor_slot", "<u4", 40),
    ("num_blocks", "<u4", 44),
    ("request", f"S{REQUEST_BYTES}", _LINE),
    ("attempt", "<u4", _LINE + REQUEST_BYTES),
    ("accepted", "<u8", 2 * _LINE),
    ("released", "<u8", 2 * _LINE + 8),
    ("renewed_until", "<f8", 2 * _LINE + 16),
    ("holder_incarnation", "<u8", 2 * _LINE + 24),
    ("holder_slot", "<u4", 2 * _LINE + 32),
)


def record_dtype(max_lease_blocks: int) -> np.dtype[np.void]:
    """Return the dtype of a record that names up to `max_lease_blocks` blocks."""
    fields = (*_FIELDS, ("blocks", f"({max_lease_blocks},)<u4", _HEAD_BYTES))
    names, formats, offsets = zip(*fields, strict=True)
    itemsize = _HEAD_BYTES + -(-4 * max_lease_blocks // _LINE) * _LINE
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": itemsize})


class LeaseTable:
    """Views of the fields of all records of a node. Each slot lends through `leases_per_slot` records of its own."""

    def __init__(self, records: NDArray[np.void], leases_per_slot: int) -> None:
        self.num_records = len(records)
        self.leases_per_slot = leases_per_slot
        self.num_slots = self.num_records // leases_per_slot
        self.generation: NDArray[np.uint64] = records["generation"]
        self.revoked: NDArray[np.uint64] = records["revoked"]
        self.closing: NDArray[np.uint64] = records["closing"]
        self.lessor_incarnation: NDArray[np.uint64] = records["lessor_incarnation"]
        self.deadline: NDArray[np.float64] = records["deadline"]
        self.lessor_slot: NDArray[np.uint32] = records["lessor_slot"]
        self.num_blocks: NDArray[np.uint32] = records["num_blocks"]
        self.request: NDArray[np.bytes_] = records["request"]
        self.attempt: NDArray[np.uint32] = records["attempt"]
        self.accepted: NDArray[np.uint64] = records["accepted"]
        self.released: NDArray[np.uint64] = records["released"]
        self.renewed_until: NDArray[np.float64] = records["renewed_until"]
        self.holder_incarnation: NDArray[np.uint64] = records["holder_incarnation"]
        self.holder_slot: NDArray[np.uint32] = records["holder_slot"]
        self.blocks: NDArray[np.uint32] = records["blocks"]
        if not (self.generation.flags.aligned and self.accepted.flags.aligned):
            raise ValueError("lease records must be aligned, or their stores are not atomic")

    def records_of(self, slot: int) -> range:
        """Return the records that `slot` lends through."""
        if not 0 <= slot < self.num_slots:
            raise ValueError(f"slot must be in 0..{self.num_slots - 1}, got {slot}")
        return range(slot * self.leases_per_slot, (slot + 1) * self.leases_per_slot)

    def blocks_named(self, index: int) -> tuple[int, ...]:
        """Return the blocks that a published record names."""
        return tuple(self.blocks[index, : self.num_blocks[index]].tolist())

    def stands(self, lease: Lease) -> bool:
        """Whether a lease is held and has not ended: its blocks hold what they held when it was accepted."""
        index, generation = lease.index, lease.generation
        if not 0 <= index < self.num_records:
            return False
        is_held = self.generation[index] == generation == self.accepted[index]
        return bool(is_held and self.released[index] != generation and self.closing[index] != generation)

    def expiry(self, index: int, generation: int) -> float:
        """Return when the lease ends by itself: the deadline, or later if its holder renewed it."""
        deadline = float(self.deadline[index])
        if self.accepted[index] == generation:
            return max(deadline, float(self.renewed_until[index]))
        return deadline
