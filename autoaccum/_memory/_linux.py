"""Reads this process's memory use and limits on Linux, and who was killed, from /proc and its control groups.

Changes nothing except the kernel's high-water mark. Functions return None or nothing if the system does not provide a
value.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PROC = Path("/proc/self")
# Version 1 writes "no limit" as the largest number of whole pages that fits 63 bits.
_NO_LIMIT_BYTES = 1 << 60


@dataclass(frozen=True, slots=True)
class GroupLimit:
    """A control group that limits this process.

    Attributes:
        limit_bytes: The most that all processes in the group may use together.
        used_bytes: What they use, excluding page cache that can be dropped.
    """

    limit_bytes: int
    used_bytes: int


def status_bytes(*fields: str) -> tuple[int, ...] | None:
    """Return fields of /proc/self/status with the unit kB, such as VmData, in bytes; None if any is missing."""
    try:
        lines = (_PROC / "status").read_text().splitlines()
    except OSError:
        return None
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    try:
        return tuple(int(values[field].split()[0]) * 1024 for field in fields)
    except (KeyError, ValueError):
        return None


def reset_high_water() -> bool:
    """Reset the kernel's peak of resident memory; return whether that is permitted."""
    try:
        (_PROC / "clear_refs").write_text("5")
    except OSError:
        return False
    return True


def group_limits(proc: Path = _PROC) -> Iterator[GroupLimit]:
    """Yield every control group (version 1 and 2) above this process, whose folder is `proc`, that limits memory."""
    for version, folder in group_folders(proc):
        limit = _read_group(folder, version)
        if limit is not None:
            yield limit


def group_folders(proc: Path = _PROC) -> Iterator[tuple[int, Path]]:
    """Yield the version and folder of every control group of this process that counts memory, the innermost first."""
    mounts = _mounts(proc)
    for version, relative in _memberships(proc):
        if version not in mounts:
            continue
        root, mounted_part = mounts[version]
        # Inside a container the mount shows only a part of the hierarchy, and the path may lie outside of it.
        inside = relative.relative_to(mounted_part) if relative.is_relative_to(mounted_part) else Path("/")
        folder = root / str(inside).lstrip("/")
        while folder.is_relative_to(root):
            yield version, folder
            folder = folder.parent


def counter(path: Path, name: str) -> int | None:
    """Return the number with this name from a file of lines "name number"; None if there is none."""
    for line in _lines(path):
        found, _, value = line.partition(" ")
        if found == name and value.strip().isdigit():
            return int(value)
    return None


def read_kills(proc: Path = _PROC.parent) -> dict[str, int]:
    """Return counters of out-of-memory kills, by the file that each was read from; empty if there are none.

    Each is the counter of the nearest control group that has one, since a group further up also counts the kills of
    others. (In version 2 a group includes those below it.) Without such a group it is that of the whole machine.

    Args:
        proc: The proc file system; another folder in tests.
    """
    counters: dict[str, int] = {}
    counted: set[int] = set()
    for version, folder in group_folders(proc / "self"):
        if version in counted:
            continue
        path = folder / ("memory.events" if version == 2 else "memory.oom_control")  # noqa: PLR2004 - of cgroups
        count = counter(path, "oom_kill")
        if count is not None:
            counters[str(path)] = count
            counted.add(version)
    if not counters:
        count = counter(proc / "vmstat", "oom_kill")
        if count is not None:
            counters[str(proc / "vmstat")] = count
    return counters


def risen(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the counters that have risen, and by how much."""
    return {name: count - before[name] for name, count in after.items() if count > before.get(name, count)}


def _memberships(proc: Path) -> Iterator[tuple[int, Path]]:
    for line in _lines(proc / "cgroup"):
        hierarchy, controllers, path = line.split(":", 2)
        if hierarchy == "0" and not controllers:
            yield 2, Path(path)
        elif "memory" in controllers.split(","):
            yield 1, Path(path)


def _mounts(proc: Path) -> dict[int, tuple[Path, Path]]:
    """Return where each version's hierarchy is mounted, and which part of it is visible there."""
    found: dict[int, tuple[Path, Path]] = {}
    for line in _lines(proc / "mountinfo"):
        left, _, right = line.partition(" - ")
        part, where = left.split()[3:5]
        kind, _, options = right.split()[:3]
        if kind == "cgroup2":
            found.setdefault(2, (Path(where), Path(part)))
        elif kind == "cgroup" and "memory" in options.split(","):
            found.setdefault(1, (Path(where), Path(part)))
    return found


def _read_group(folder: Path, version: int) -> GroupLimit | None:
    if version == 1:
        limits, usage, cache = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_inactive_file"
    else:
        limits, usage, cache = ["memory.max", "memory.high"], "memory.current", "inactive_file"
    found = [value for name in limits if (value := _number(folder / name)) is not None]
    used = _number(folder / usage)
    if not found or used is None or min(found) >= _NO_LIMIT_BYTES:
        return None
    # The kernel drops clean, inactive page cache before it kills anybody.
    stat = dict(line.split(maxsplit=1) for line in _lines(folder / "memory.stat") if " " in line)
    return GroupLimit(min(found), max(0, used - int(stat.get(cache, 0))))


def _number(path: Path) -> int | None:
    text = next(iter(_lines(path)), "")
    return int(text) if text.strip().isdigit() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
