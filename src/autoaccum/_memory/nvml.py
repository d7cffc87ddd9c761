"""The NVIDIA cards that a process started now would see, asked of NVML: no CUDA context is made, no memory taken.

For a process that waits beside others, such as a wrapper: `Cuda` would hold hundreds of MiB of the card all the while.
Where NVML is missing, or does not answer, there are no cards.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from autoaccum._records import Neighbour

try:
    import pynvml
except ImportError:  # it only tells: nobody should need it
    pynvml = None


@dataclass(frozen=True, slots=True)
class CardReading:
    """A card at one moment.

    Attributes:
        name: Its name.
        total_bytes: Its memory.
        free_bytes: What nobody holds.
        neighbours: Who holds some, those that hold most first, as far as it is told.
    """

    name: str
    total_bytes: int
    free_bytes: int
    neighbours: tuple[Neighbour, ...]


def read_cards() -> tuple[CardReading, ...]:
    """Return the cards that CUDA_VISIBLE_DEVICES leaves visible, in the order of NVML."""
    if pynvml is None:
        return ()
    try:
        pynvml.nvmlInit()
        try:
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
            return tuple(_reading(handle) for index, handle in enumerate(handles) if _is_seen(index, handle, wanted))
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ()


def _is_seen(index: int, handle: object, wanted: str | None) -> bool:
    if wanted is None:
        return True
    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    names = [name.strip() for name in wanted.split(",")]
    return any(name == str(index) or (name.startswith("GPU-") and uuid.startswith(name)) for name in names)


def _reading(handle: object) -> CardReading:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:  # not told in some containers
        running = []
    others = [Neighbour(process.pid, _name_of(process.pid), process.usedGpuMemory) for process in running]
    return CardReading(
        str(pynvml.nvmlDeviceGetName(handle)),
        int(memory.total),
        int(memory.free),
        tuple(sorted(others, key=lambda other: -(other.used_bytes or 0))),
    )


def _name_of(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # it has ended, or lives where this process cannot see
        return "?"
