"""The processor, its cores and the memory of this machine, as far as this process may use them."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from autoaccum._doctor.findings import Fact, Finding, Problem, fact
from autoaccum._memory.limits import format_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_PROC = Path("/proc")
_SHARED = Path("/dev/shm")  # noqa: S108 - where workers of a DataLoader pass batches on
# Below this, a few batches of images fill it; containers get 64 MiB unless asked.
_LITTLE_SHARED_BYTES = 2**30
_NEVER_OVERCOMMITS = "2"


def of_machine(environment: Mapping[str, str], *, proc: Path = _PROC, shared: Path = _SHARED) -> Iterator[Finding]:
    """Yield what the machine has.

    Args:
        environment: The variables of this process.
        proc: Where the kernel tells of itself.
        shared: The file system of shared memory.
    """
    yield fact("processor", _processor(proc))
    yield from _cores(environment)
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    text = f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available"
    yield Fact("memory", text, memory.total)
    yield Fact("swap", format_bytes(swap.total) if swap.total else "none", swap.total)
    yield from _shared_memory(shared)
    if _first_line(proc / "sys/vm/overcommit_memory") == _NEVER_OVERCOMMITS:
        yield Problem(
            "the kernel gives out no more memory than there is (vm.overcommit_memory is 2), so CUDA, which reserves "
            "addresses for all of a card, and workers, which copy this process's addresses, may fail with memory free; "
            "have it set to 0 or 1"
        )


def _processor(proc: Path) -> str:
    for line in _lines(proc / "cpuinfo"):
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cores(environment: Mapping[str, str]) -> Iterator[Finding]:
    there, usable, threads = os.cpu_count() or 1, usable_cores(), torch.get_num_threads()
    yield Fact("cores", f"{usable} of {there} usable by this process, PyTorch uses {threads} threads", usable)
    if threads > usable:
        named = "OMP_NUM_THREADS" if "OMP_NUM_THREADS" in environment else "torch.set_num_threads()"
        yield Problem(
            f"PyTorch uses {threads} threads on {usable} cores, which makes operators on the CPU slower; set {named} "
            f"to {usable}"
        )


def _shared_memory(shared: Path) -> Iterator[Finding]:
    try:
        use = psutil.disk_usage(str(shared))
    except OSError:
        return
    yield Fact("shared memory", f"{format_bytes(use.total)} in {shared}, {format_bytes(use.free)} free", use.total)
    if min(use.total, use.free) < _LITTLE_SHARED_BYTES:
        yield Problem(
            f"{shared} has {format_bytes(use.free)} free of {format_bytes(use.total)}, and a DataLoader's workers pass "
            "batches through it (a bus error is its lack); give the container more, as by docker run --shm-size=8g, or "
            "use num_workers=0"
        )


def _first_line(path: Path) -> str:
    return next(iter(_lines(path)), "").strip()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
