"""`Arena`: the shared memory of one node, a sealed memfd with lease records at its head and KV blocks behind them.

It owns the mapping and where things lie in it; who may use a block is decided in `blocks.py` and `leases.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
from dataclasses import astuple, dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pdactors.errors import PDError, Refused
from pdactors.kv.layout import KVLayout
from pdactors.kv.lease_table import LeaseTable, record_dtype

# 0                     header         _HEADER, see _Geometry
# 4 KiB                 extent table   u32[num_extents]: 0 free, slot + 1 its owner; the migrator alone writes it
# next 4 KiB boundary   lease records  [num_slots * leases_per_slot], see lease_table.py
# next 2 MiB boundary   payload        [num_blocks, block_bytes]
_MAGIC = b"pdarena\0"
_VERSION = 1
_HEADER = struct.Struct("<8sI16s5Q")
_PAGE = 4096
_HUGE_PAGE = 2 << 20
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


@dataclass(frozen=True, slots=True)
class _Geometry:
    num_blocks: int
    extent_blocks: int
    num_slots: int
    leases_per_slot: int
    max_lease_blocks: int

    @property
    def num_extents(self) -> int:
        return -(-self.num_blocks // self.extent_blocks)

    @property
    def num_records(self) -> int:
        return self.num_slots * self.leases_per_slot

    @property
    def records_offset(self) -> int:
        return _align(_PAGE + 4 * self.num_extents, _PAGE)

    @property
    def payload_offset(self) -> int:
        return _align(self.records_offset + self.num_records * record_dtype(self.max_lease_blocks).itemsize, _HUGE_PAGE)

    def size_bytes(self, layout: KVLayout) -> int:
        return _align(self.payload_offset + self.num_blocks * layout.block_bytes, _PAGE)


class Arena:
    """A mapping of the node's KV memory. Use `create` once per node and `attach` in every other process."""

    def __init__(self, fd: int, layout: KVLayout, geometry: _Geometry) -> None:
        """Map `fd`, which the arena owns from now on; for `create` and `attach`."""
        self.layout = layout
        self.num_blocks = geometry.num_blocks
        self.extent_blocks = geometry.extent_blocks
        self.num_extents = geometry.num_extents
        self.num_slots = geometry.num_slots
        self.payload_offset = geometry.payload_offset
        self._fd = fd
        self._map: mmap.mmap | None = mmap.mmap(fd, geometry.size_bytes(layout))
        self._is_advised = False
        payload_bytes = self.num_blocks * layout.block_bytes
        flat = np.frombuffer(self._map, np.uint8, payload_bytes, self.payload_offset)
        self._payload: NDArray[np.uint8] = flat.reshape(self.num_blocks, layout.block_bytes)
        self._extents: NDArray[np.uint32] = np.frombuffer(self._map, np.uint32, self.num_extents, _PAGE)
        dtype = record_dtype(geometry.max_lease_blocks)
        records = np.frombuffer(self._map, dtype, geometry.num_records, geometry.records_offset)
        self._leases = LeaseTable(records, geometry.leases_per_slot)

    @classmethod
    def create(
        cls,
        layout: KVLayout,
        num_blocks: int,
        *,
        extent_blocks: int,
        num_slots: int,
        leases_per_slot: int,
        max_lease_blocks: int,
    ) -> Self:
        """Make an arena of `num_blocks` blocks; its memory is taken as it is touched.

        Raises:
            ValueError: a count is below 1.
        """
        geometry = _Geometry(num_blocks, extent_blocks, num_slots, leases_per_slot, max_lease_blocks)
        if min(astuple(geometry)) < 1:
            raise ValueError(f"every count must be at least 1, got {geometry}")
        fd = os.memfd_create("pdactors-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, geometry.size_bytes(layout))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
            header = _HEADER.pack(_MAGIC, _VERSION, layout.fingerprint.encode(), *astuple(geometry))
            os.pwrite(fd, header, 0)
            return cls(fd, layout, geometry)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, layout: KVLayout) -> Self:
        """Map an arena that another process made; `fd` stays the caller's.

        Raises:
            Refused: it is no arena, or one of another version, layout or size; the message names both values.
        """
        geometry = _read_geometry(fd, layout)
        own = os.dup(fd)
        try:
            return cls(own, layout, geometry)
        except BaseException:
            os.close(own)
            raise

    def fileno(self) -> int:
        """Return the descriptor to pass on to a child; it is not inheritable by itself."""
        return self._fd

    def payload(self) -> NDArray[np.uint8]:
        """Return the blocks as bytes, `[num_blocks, block_bytes]`, writable and shared."""
        return self._payload

    def leases(self) -> LeaseTable:
        """Return the lease records of the node."""
        return self._leases

    def extent_owner(self, extent: int) -> int | None:
        """Return the slot that owns the extent, None if it is free."""
        owner = int(self._extents[self._checked(extent)])
        return owner - 1 if owner else None

    def set_extent_owner(self, extent: int, slot: int | None) -> None:
        """Give the extent to a slot, or take it back; for the migrator alone."""
        if slot is not None and not 0 <= slot < self.num_slots:
            raise ValueError(f"slot must be in 0..{self.num_slots - 1}, got {slot}")
        self._extents[self._checked(extent)] = 0 if slot is None else slot + 1

    def extents_of(self, slot: int) -> list[int]:
        """Return the extents that a slot owns."""
        return np.flatnonzero(self._extents == slot + 1).tolist()

    def free_extents(self) -> list[int]:
        """Return the extents that nobody owns."""
        return np.flatnonzero(self._extents == 0).tolist()

    def extents_of_others(self, slot: int) -> list[int]:
        """Return the extents that slots other than this one own."""
        return np.flatnonzero((self._extents != 0) & (self._extents != slot + 1)).tolist()

    def blocks_of_extent(self, extent: int) -> range:
        """Return the blocks of an extent; the last extent may be short."""
        first = self._checked(extent) * self.extent_blocks
        return range(first, min(first + self.extent_blocks, self.num_blocks))

    def populate(self, extent: int) -> None:
        """Have the kernel back the extent with memory now, huge pages where it can; other threads run meanwhile.

        Raises:
            PDError: the kernel has no memory for it.
        """
        code = self._advise(extent, _MADV_POPULATE_WRITE)
        if code not in (0, errno.EINVAL):  # a kernel that does not know it backs pages at their first use
            raise PDError(f"no memory for extent {extent}: {os.strerror(code)}")

    def map_ahead(self, extent: int) -> None:
        """Enter another's extent into this process's page table, so that reading it does not fault. Only advice."""
        self._advise(extent, _MADV_POPULATE_READ)

    def copy_block(self, src: int, dst: int) -> None:
        """Copy a block, whatever of it is filled: one run of bytes is copied faster than parts of it.

        Raises:
            ValueError: a block is out of range.
        """
        if not (0 <= src < self.num_blocks and 0 <= dst < self.num_blocks):
            raise ValueError(f"blocks must be in 0..{self.num_blocks - 1}, got {src} and {dst}")
        self._payload[dst] = self._payload[src]

    def close(self) -> None:
        """Let go of the descriptor, and of the mapping once the last view of it is gone. Idempotent."""
        if self._map is None:
            return
        mapping, self._map = self._map, None
        del self._payload, self._extents, self._leases
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(BufferError):  # somebody still has a view: the last of them unmaps
            mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _advise(self, extent: int, advice: int) -> int:
        """Advise the kernel about the pages of an extent; return its errno, 0 if it did as it was asked."""
        address = self._payload.ctypes.data
        if not self._is_advised:
            self._is_advised = True
            _libc.madvise(address, self._payload.nbytes, mmap.MADV_HUGEPAGE)  # may be refused
        blocks = self.blocks_of_extent(extent)
        start = address + blocks.start * self.layout.block_bytes // _PAGE * _PAGE
        end = _align(address + blocks.stop * self.layout.block_bytes, _PAGE)
        return 0 if _libc.madvise(start, end - start, advice) == 0 else ctypes.get_errno()

    def _checked(self, extent: int) -> int:
        if not 0 <= extent < self.num_extents:
            raise ValueError(f"extent must be in 0..{self.num_extents - 1}, got {extent}")
        return extent


def _read_geometry(fd: int, layout: KVLayout) -> _Geometry:
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        header = os.pread(fd, _HEADER.size, 0)
    except OSError as error:
        raise Refused(f"descriptor {fd} is no arena: {error}") from error
    if len(header) < _HEADER.size:
        raise Refused(f"the arena's header has {_HEADER.size} bytes, descriptor {fd} holds {len(header)}")
    magic, version, fingerprint, *counts = _HEADER.unpack(header)
    _same("magic", magic, _MAGIC)
    _same("version", version, _VERSION)
    _same("layout", fingerprint.decode("ascii", "replace"), layout.fingerprint)
    geometry = _Geometry(*counts)
    if min(counts) < 1:
        raise Refused(f"every count of an arena must be at least 1, got {geometry}")
    _same("size", os.fstat(fd).st_size, geometry.size_bytes(layout))
    _same("seals", seals & _SEALS, _SEALS)
    return geometry


def _same(what: str, theirs: object, ours: object) -> None:
    if theirs != ours:
        raise Refused(f"arena {what} is {theirs!r}, expected {ours!r}")


def _align(value: int, step: int) -> int:
    return -(-value // step) * step
