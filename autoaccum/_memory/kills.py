"""Reads the kernel's counters of out-of-memory kills that are visible to this process.

Comparing them before and after a process ended distinguishes an out-of-memory kill from any other.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum._memory import _linux

if TYPE_CHECKING:
    from collections.abc import Mapping

_PROC = Path("/proc")


def read_kills(proc: Path = _PROC) -> dict[str, int]:
    """Return counters of out-of-memory kills, by the file that each was read from; empty if there are none.

    Each is the counter of the nearest control group that has one, since a group further up also counts the kills of
    others. (In version 2 a group includes those below it.) Without such a group it is that of the whole machine.

    Args:
        proc: The proc file system; another folder in tests.
    """
    counters: dict[str, int] = {}
    counted: set[int] = set()
    for version, folder in _linux.group_folders(proc / "self"):
        if version in counted:
            continue
        path = folder / ("memory.events" if version == 2 else "memory.oom_control")  # noqa: PLR2004 - of cgroups
        count = _linux.counter(path, "oom_kill")
        if count is not None:
            counters[str(path)] = count
            counted.add(version)
    if not counters:
        count = _linux.counter(proc / "vmstat", "oom_kill")
        if count is not None:
            counters[str(proc / "vmstat")] = count
    return counters


def risen(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """Return the counters that have risen, and by how much."""
    return {name: count - before[name] for name, count in after.items() if count > before.get(name, count)}
