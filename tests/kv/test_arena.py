from __future__ import annotations

import ctypes
import dataclasses
import fcntl
import gc
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from pdactors.errors import PDError, Refused
from pdactors.kv import arena as arena_module
from pdactors.kv.arena import Arena
from pdactors.kv.layout import KVLayout

LAYOUT = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4, block_tokens=8, dtype="float32")


def make(num_blocks: int = 10, extent_blocks: int = 4) -> Arena:
    return Arena.create(
        LAYOUT, num_blocks, extent_blocks=extent_blocks, num_slots=3, leases_per_slot=4, max_lease_blocks=5
    )


@pytest.fixture
def arena() -> Iterator[Arena]:
    gc.collect()  # what earlier tests left
    before = len(os.listdir("/proc/self/fd"))
    with make() as made:
        yield made
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def tokens_of(arena: Arena, block: int) -> np.ndarray:
    """`[layers, 2, kv_heads, block_tokens, head_dim]`"""
    return arena.payload()[block].view(np.float32).reshape(LAYOUT.shape)


def test_the_payload_is_one_run_of_bytes_per_block(arena: Arena) -> None:
    payload = arena.payload()
    assert payload.shape == (10, LAYOUT.block_bytes)
    assert payload.flags.c_contiguous
    assert arena.payload_offset % (2 << 20) == 0
    assert not payload.any()


def test_an_attached_arena_sees_the_same_memory(arena: Arena) -> None:
    with Arena.attach(arena.fileno(), LAYOUT) as other:
        arena.payload()[3, 7] = 42
        other.set_extent_owner(1, 2)
        other.leases().accepted[11] = 99
        assert other.payload()[3, 7] == 42
        assert arena.extent_owner(1) == 2
        assert arena.leases().accepted[11] == 99
        assert (other.num_blocks, other.num_extents, other.num_slots) == (10, 3, 3)


def test_head_and_payload_do_not_overlap(arena: Arena) -> None:
    table = arena.leases()
    arena.payload()[:] = 255
    for extent in range(3):
        arena.set_extent_owner(extent, 2)
    assert not table.generation.any()
    assert not table.blocks.any()
    table.blocks[:] = 2**32 - 1
    assert table.num_records == 12
    assert [arena.extent_owner(e) for e in range(3)] == [2, 2, 2]
    assert (arena.payload() == 255).all()
    Arena.attach(arena.fileno(), LAYOUT).close()


def test_the_descriptor_is_sealed_nameless_and_not_inheritable(arena: Arena) -> None:
    assert not os.get_inheritable(arena.fileno())
    for size in (0, 1 << 30):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fileno(), size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(arena.fileno(), fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_child_process_writes_into_the_arena(arena: Arena) -> None:
    code = (
        "import sys\nfrom pdactors.kv.arena import Arena\nfrom pdactors.kv.layout import KVLayout\n"
        "with Arena.attach(int(sys.argv[1]), KVLayout(2, 2, 4, 8, 'float32')) as a: a.payload()[9, -1] = 77\n"
    )
    fd = arena.fileno()
    subprocess.run([sys.executable, "-c", code, str(fd)], pass_fds=[fd], check=True, timeout=60)
    assert arena.payload()[9, -1] == 77


def test_extents_have_owners_and_the_last_may_be_short(arena: Arena) -> None:
    assert arena.num_extents == 3
    assert [arena.blocks_of_extent(e) for e in range(3)] == [range(0, 4), range(4, 8), range(8, 10)]
    assert arena.extent_owner(0) is None
    arena.set_extent_owner(0, 0)
    arena.set_extent_owner(2, 0)
    arena.set_extent_owner(1, 1)
    assert arena.extents_of(0) == [0, 2]
    assert [arena.extents_of_others(slot) for slot in range(3)] == [[1], [0, 2], [0, 1, 2]]
    arena.set_extent_owner(0, None)
    assert arena.extents_of(0) == [2]
    assert arena.extents_of(1) == [1]
    assert arena.extents_of_others(1) == [2]


def test_indices_out_of_range_are_refused(arena: Arena) -> None:
    for extent in (-1, 3):
        with pytest.raises(ValueError, match=r"extent must be in 0\.\.2"):
            arena.extent_owner(extent)
        with pytest.raises(ValueError, match=r"extent must be in 0\.\.2"):
            arena.populate(extent)
        with pytest.raises(ValueError, match=r"extent must be in 0\.\.2"):
            arena.map_ahead(extent)
    with pytest.raises(ValueError, match=r"slot must be in 0\.\.2, got 3"):
        arena.set_extent_owner(0, 3)
    for src, dst in ((-1, 0), (0, 10)):
        with pytest.raises(ValueError, match="must be in"):
            arena.copy_block(src, dst)


def test_copy_block_copies_all_of_a_block_and_nothing_else(arena: Arena) -> None:
    arena.payload()[2] = np.arange(LAYOUT.block_bytes) % 251
    arena.payload()[6] = 255
    arena.copy_block(2, 6)
    assert (arena.payload()[6] == arena.payload()[2]).all()
    assert not arena.payload()[[5, 7]].any()


def resident_bytes(arena: Arena) -> int:
    return os.fstat(arena.fileno()).st_blocks * 512


def test_populate_backs_an_extent_with_memory_and_keeps_its_content() -> None:
    layout = dataclasses.replace(LAYOUT, head_dim=1024)
    blocks = {"extent_blocks": 16, "num_slots": 1, "leases_per_slot": 1, "max_lease_blocks": 1}
    with Arena.create(layout, 48, **blocks) as arena:
        arena.payload()[16, 0] = 9
        before = resident_bytes(arena)
        arena.populate(1)
        extent_bytes = 16 * layout.block_bytes
        assert extent_bytes - (2 << 20) <= resident_bytes(arena) - before <= extent_bytes + (4 << 20)
        assert arena.payload()[16, 0] == 9


def test_populate_tolerates_a_kernel_without_it_and_reports_no_memory(
    arena: Arena, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Libc:
        code = 22

        def madvise(self, address: int, size: int, advice: int) -> int:
            ctypes.set_errno(self.code)
            return -1

    libc = Libc()
    monkeypatch.setattr(arena_module, "_libc", libc)
    arena.populate(0)
    libc.code = 12
    with pytest.raises(PDError, match="no memory for extent 2"):
        arena.populate(2)
    arena.map_ahead(2)


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_what_is_mapped_ahead_is_read_without_a_page_fault() -> None:
    layout = dataclasses.replace(LAYOUT, head_dim=1024)  # blocks of 1 MiB
    counts = {"extent_blocks": 16, "num_slots": 1, "leases_per_slot": 1, "max_lease_blocks": 1}
    with Arena.create(layout, 48, **counts) as owner, Arena.attach(owner.fileno(), layout) as reader:
        owner.payload()[:32] = 5
        reader.map_ahead(1)
        before = num_faults()
        assert (reader.payload()[16:32, ::4096] == 5).all()
        mapped = num_faults() - before
        assert (reader.payload()[0:16, ::4096] == 5).all()
        assert mapped < 4 <= num_faults() - before - mapped


def test_another_layout_is_refused_with_both_fingerprints(arena: Arena) -> None:
    other = dataclasses.replace(LAYOUT, block_tokens=16)
    with pytest.raises(Refused, match=f"{LAYOUT.fingerprint}.*{other.fingerprint}"):
        Arena.attach(arena.fileno(), other)


def test_another_version_and_a_wrong_count_are_refused(arena: Arena) -> None:
    os.pwrite(arena.fileno(), (7).to_bytes(4, "little"), 8)
    with pytest.raises(Refused, match="version is 7, expected 1"):
        Arena.attach(arena.fileno(), LAYOUT)
    os.pwrite(arena.fileno(), (1).to_bytes(4, "little"), 8)
    os.pwrite(arena.fileno(), (10_000).to_bytes(8, "little"), 28)
    with pytest.raises(Refused, match=r"size is \d+, expected \d+"):
        Arena.attach(arena.fileno(), LAYOUT)
    os.pwrite(arena.fileno(), bytes(8), 36)
    with pytest.raises(Refused, match="extent_blocks=0"):
        Arena.attach(arena.fileno(), LAYOUT)


def test_what_is_no_arena_is_refused() -> None:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    try:
        with pytest.raises(Refused, match="holds 0"):
            Arena.attach(fd, LAYOUT)
        os.write(fd, bytes(8192))
        with pytest.raises(Refused, match="magic"):
            Arena.attach(fd, LAYOUT)
    finally:
        os.close(fd)
    with pytest.raises(Refused, match="is no arena"):
        Arena.attach(fd, LAYOUT)


def test_an_unsealed_copy_is_refused(arena: Arena) -> None:
    fd = os.memfd_create("copy", os.MFD_ALLOW_SEALING)
    try:
        os.write(fd, os.pread(arena.fileno(), 4096, 0))
        os.ftruncate(fd, os.fstat(arena.fileno()).st_size)
        with pytest.raises(Refused, match="seals is 0"):
            Arena.attach(fd, LAYOUT)
    finally:
        os.close(fd)


def test_counts_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="num_blocks=0"):
        make(num_blocks=0)


def test_close_is_idempotent_and_a_view_outlives_it() -> None:
    arena = make()
    view = arena.payload()
    arena.close()
    arena.close()
    view[0, 0] = 1
    assert view[0, 0] == 1
