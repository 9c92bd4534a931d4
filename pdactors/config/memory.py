"""Sizes in bytes as people write them, and how much memory this process may still take."""

from __future__ import annotations

import re
from fractions import Fraction
from pathlib import Path

from pdactors.errors import ConfigError

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")
_BINARY = ("KiB", "MiB", "GiB", "TiB")
_DECIMAL = ("KB", "MB", "GB", "TB")
_UNITS = {
    "": 1,
    "b": 1,
    **{unit.lower(): 1024 ** (power + 1) for power, unit in enumerate(_BINARY)},
    **{unit.lower(): 1000 ** (power + 1) for power, unit in enumerate(_DECIMAL)},
}
MAX_SIZE_BYTES = 2**60


def parse_size(text: str | int) -> int:
    """Read "2GiB", "1.5GB", "4096" or a number of bytes; raises ConfigError that quotes the text."""
    found = _SIZE.fullmatch(str(text)) if isinstance(text, int) or len(text) <= 64 else None
    unit = _UNITS.get(found[2].lower()) if found else None
    if found is None or unit is None:
        units = ", ".join(_BINARY + _DECIMAL)
        raise ConfigError(f'"{text}" is not a size: write a number of bytes, or a number with one of {units}')
    size_bytes = int(Fraction(found[1]) * unit)
    if size_bytes > MAX_SIZE_BYTES:
        raise ConfigError(f'"{text}" is more than the largest size, {format_size(MAX_SIZE_BYTES)}')
    return size_bytes


def format_size(size_bytes: int) -> str:
    """Write a size with one decimal at most, in the largest binary unit that leaves at least 1."""
    if size_bytes < 1024:
        return f"{size_bytes}B"
    value = float(size_bytes)
    for unit in _BINARY:
        value /= 1024
        if round(value, 1) < 1024 or unit == _BINARY[-1]:
            break
    return f"{value:.1f}".removesuffix(".0") + unit


def available_bytes(*, proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this process can still take: the least of the kernel's MemAvailable and what each enclosing
    control group (version 1 or 2) still allows. Page cache that can be dropped counts as available in both."""
    groups = _memory_groups((proc / "self/cgroup").read_text()) if (proc / "self/cgroup").exists() else []
    limits = [_mem_available((proc / "meminfo").read_text())]
    for version, group in groups:
        # A v2 hierarchy lies at the root, or in `unified` beside the v1 controllers.
        roots = [cgroup / "memory"] if version == 1 else [cgroup, cgroup / "unified"]
        for root in roots:
            limits += [room for folder in _upwards(root, group) if (room := _room(folder, version)) is not None]
    return max(0, min(limits))


def _mem_available(meminfo: str) -> int:
    values = dict(re.findall(r"^(\w+):\s+([0-9]+) kB$", meminfo, re.MULTILINE))
    return int(values["MemAvailable"]) * 1024


def _memory_groups(text: str) -> list[tuple[int, str]]:
    """The (version, path) of every control group in /proc/self/cgroup that can limit memory."""
    groups = []
    for line in text.splitlines():
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            groups.append((2, path))
        elif "memory" in controllers.split(","):
            groups.append((1, path))
    return groups


def _upwards(root: Path, group: str) -> list[Path]:
    """Every folder from the group's own up to the root. In a container the path may be the host's, of which only
    the root is visible, so folders that do not exist are left to the caller to skip."""
    parts = [part for part in group.split("/") if part not in ("", "..")]
    return [root.joinpath(*parts[:count]) for count in range(len(parts), -1, -1)]


def _room(folder: Path, version: int) -> int | None:
    """Bytes left under one group's own limit; None when it sets none or is not there."""
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    cache = "inactive_file" if version == 2 else "total_inactive_file"
    try:
        limit, used = ((folder / name).read_text().strip() for name in names)
        stat = (folder / "memory.stat").read_text() if (folder / "memory.stat").exists() else ""
    except OSError:
        return None
    if limit == "max":
        return None
    droppable = re.search(rf"^{cache} ([0-9]+)$", stat, re.MULTILINE)
    return int(limit) - int(used) + (int(droppable[1]) if droppable else 0)
