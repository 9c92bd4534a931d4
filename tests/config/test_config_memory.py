from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdactors.config.memory import MAX_SIZE_BYTES, available_bytes, format_size, parse_size
from pdactors.errors import ConfigError

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        (4096, 4096),
        ("4096", 4096),
        ("1B", 1),
        ("2GiB", 2 * 2**30),
        ("512 MiB", 512 * MIB),
        ("1.5GB", 1_500_000_000),
        ("0.1TB", 100_000_000_000),
        ("64kib", 65536),
        (" 3 kb ", 3000),
    ],
)
def test_sizes_are_read(text: str | int, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GiB", "2G", "2 gigs", "-1", -1, "1e9", "0x10", "1,5GB", ".5GB", "inf", "\u0663MiB", "1" + " " * 70]
)
def test_anything_else_is_refused_with_its_text(text: str | int) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_size(text)
    assert f'"{text}" is not a size' in str(caught.value)


def test_an_absurd_size_is_refused() -> None:
    assert parse_size(MAX_SIZE_BYTES) == MAX_SIZE_BYTES
    with pytest.raises(ConfigError, match="more than the largest size"):
        parse_size("2000000TiB")


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0B"),
        (1023, "1023B"),
        (1024, "1KiB"),
        (1536, "1.5KiB"),
        (2**30, "1GiB"),
        (2**30 - 1, "1GiB"),
        (2**51, "2048TiB"),
    ],
)
def test_sizes_are_written(size_bytes: int, text: str) -> None:
    assert format_size(size_bytes) == text


@given(st.integers(0, MAX_SIZE_BYTES))
def test_a_written_size_reads_as_nearly_the_same(size_bytes: int) -> None:
    assert abs(parse_size(format_size(size_bytes)) - size_bytes) <= size_bytes / 20


class Machine:
    """A made-up /proc and /sys/fs/cgroup."""

    def __init__(self, folder: Path, available_mib: int, groups: str) -> None:
        self.proc, self.cgroup = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        self.cgroup.mkdir()
        kib = available_mib * 1024
        (self.proc / "meminfo").write_text(f"MemTotal:    99999999 kB\nMemAvailable:   {kib} kB\nHugePages_Total:  0\n")
        (self.proc / "self/cgroup").write_text(groups)

    def v1(self, path: str, limit: int, used: int, cache: int = 0) -> None:
        folder = self.cgroup / "memory" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
        (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"cache 7\ninactive_file 1\ntotal_inactive_file {cache}\n")

    def v2(self, path: str, limit: int | str, used: int, cache: int = 0) -> None:
        folder = self.cgroup / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon 7\ninactive_file {cache}\n")

    @property
    def available_mib(self) -> float:
        return available_bytes(proc=self.proc, cgroup=self.cgroup) / MIB


def test_without_limits_the_kernels_figure_holds(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1000, "0::/\n")
    assert machine.available_mib == 1000
    (machine.proc / "self/cgroup").unlink()
    assert machine.available_mib == 1000


def test_version_2_groups_limit_from_their_own_folder_up_to_the_root(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1000, "0::/outer/inner\n")
    machine.v2("outer/inner", "max", 100 * MIB)
    assert machine.available_mib == 1000
    machine.v2("outer", 500 * MIB, 100 * MIB)
    assert machine.available_mib == 400
    machine.v2("outer/inner", 300 * MIB, 100 * MIB)
    assert machine.available_mib == 200
    machine.v2("outer/other", 10 * MIB, 0)
    assert machine.available_mib == 200


def test_version_1_groups_limit_beside_an_empty_version_2_hierarchy(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1000, "4:cpu,memory:/job/x\n1:cpu:/\n0::/\n")
    machine.v1("job/x", 2**63 - 4096, 50 * MIB)
    assert machine.available_mib == 1000
    machine.v1("job", 350 * MIB, 50 * MIB)
    assert machine.available_mib == 300


def test_a_hybrid_hierarchy_is_found_in_its_own_folder(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1000, "0::/job\n")
    machine.v2("unified/job", 90 * MIB, 0)
    assert machine.available_mib == 90


def test_a_container_that_sees_only_its_own_root_is_limited_by_it(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1000, "3:memory:/docker/0123abcd\n")
    machine.v1("", 70 * MIB, 20 * MIB)
    assert machine.available_mib == 50


def test_page_cache_that_can_be_dropped_counts_as_available(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1000, "4:memory:/a\n0::/b\n")
    machine.v1("a", 300 * MIB, 250 * MIB, cache=100 * MIB)
    assert machine.available_mib == 150
    machine.v2("b", 200 * MIB, 150 * MIB, cache=60 * MIB)
    assert machine.available_mib == 110


def test_a_group_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1000, "0::/a\n")
    machine.v2("a", 100 * MIB, 101 * MIB)
    assert machine.available_mib == 0


def test_a_path_out_of_the_hierarchy_is_not_followed(tmp_path: Path) -> None:
    machine = Machine(tmp_path, 1000, "0::/../../outside\n")
    machine.v2("outside", 10 * MIB, 0)
    machine.v2("../outside", 5 * MIB, 0)
    assert machine.available_mib == 10


def test_this_machine_has_some_memory_left() -> None:
    assert 0 < available_bytes() < 2**50
