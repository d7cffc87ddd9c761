"""What limits the memory of this process: control groups, the process's own limits, and the Slurm job around it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from autoaccum._doctor.findings import Fact, Finding, Problem, fact
from autoaccum._doctor.machine import usable_cores
from autoaccum._memory import _linux
from autoaccum._memory.host import Host, process_limits
from autoaccum._memory.limits import format_bytes
from autoaccum._report.durations import left_by_slurm

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_SELF = Path("/proc/self")
_MEBIBYTE = 2**20
# A training that has less than this to begin with cannot even load a small model and its batches.
_LITTLE_BYTES = 2**29
# A control group of a Slurm job may allow a little more than the job asked for (AllowedRAMSpace).
_TOLERATED = 1.1


def of_limits(environment: Mapping[str, str], *, proc: Path = _SELF) -> Iterator[Finding]:
    """Yield what limits the memory of this process.

    Args:
        environment: The variables of this process.
        proc: Where the kernel tells of this process.
    """
    groups = list(_linux.group_limits(proc))
    for number, group in enumerate(groups):
        name = "control group" if number == 0 else f"control group {number + 1}"
        used = f"{format_bytes(group.used_bytes)} of {format_bytes(group.limit_bytes)} used"
        yield Fact(name, used, group.limit_bytes)
    if not groups:
        yield fact("control group", None)
    own = list(process_limits())
    for kind, limit, held in own:
        yield Fact(kind, f"{format_bytes(held)} of {format_bytes(limit)} used", limit)
    if not own:
        yield fact("process", None)
    reading = Host().reading()
    yield Fact("free for training", format_bytes(reading.free_bytes), reading.free_bytes)
    if reading.free_bytes < _LITTLE_BYTES:
        yield Problem(
            f"this process may take {format_bytes(reading.free_bytes)} of host memory more, which hardly holds a model "
            "and its batches; raise the limit above (ulimit, the container's memory, --mem of Slurm), or end what uses "
            "the memory"
        )
    yield from _of_slurm(environment, [group.limit_bytes for group in groups])


def _of_slurm(environment: Mapping[str, str], group_limits: list[int]) -> Iterator[Finding]:
    job = environment.get("SLURM_JOB_ID")
    yield fact("Slurm job", job)
    if job is None:
        return
    if (left := left_by_slurm(environment)) is not None:
        yield Fact("time left", f"{left / 3600:.1f} hours", round(left))
    cores = _number(environment, "SLURM_CPUS_PER_TASK") or _number(environment, "SLURM_CPUS_ON_NODE")
    if cores is not None and torch.get_num_threads() > cores <= usable_cores():
        yield Problem(
            f"the Slurm job has {cores} cores for this process, and PyTorch uses {torch.get_num_threads()} threads; "
            f"set OMP_NUM_THREADS={cores}, or ask for more by --cpus-per-task"
        )
    memory = _memory_asked(environment)
    if memory is None:
        return
    yield Fact("memory of the job", format_bytes(memory), memory)
    if not any(limit <= memory * _TOLERATED for limit in group_limits):
        yield Problem(
            f"the Slurm job has {format_bytes(memory)} on this node, and no control group enforces that: Slurm may "
            "kill what takes more, without an error that can be caught; pass "
            f"memory_limit='{memory // _MEBIBYTE}MiB' for a training on the CPU"
        )


def _memory_asked(environment: Mapping[str, str]) -> int | None:
    """Return the bytes that the job may take on this node; None if Slurm does not say."""
    per_node = _number(environment, "SLURM_MEM_PER_NODE")
    if per_node:
        return per_node * _MEBIBYTE
    per_core, cores = _number(environment, "SLURM_MEM_PER_CPU"), _number(environment, "SLURM_CPUS_ON_NODE")
    return None if not per_core or not cores else per_core * cores * _MEBIBYTE


def _number(environment: Mapping[str, str], name: str) -> int | None:
    text = environment.get(name, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 18 else None  # noqa: PLR2004 - 64 bits
