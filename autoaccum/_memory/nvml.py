"""Reads the state of NVIDIA GPUs and the processes on them from NVML, without a CUDA context or device memory.

It is therefore suitable for a process that only waits for others, such as a wrapper, for which `Cuda` would occupy
hundreds of MiB of the GPU. If NVML is missing or fails, no GPUs and no values are returned.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from autoaccum._records import Neighbour

try:
    import pynvml
except ImportError:  # not needed for training
    pynvml = None

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


@dataclass(frozen=True, slots=True)
class GPUReading:
    """A GPU at one moment.

    Attributes:
        name: Its name.
        total_bytes: Its memory.
        free_bytes: Memory that no process uses.
        neighbours: The processes on it that NVML lists, the largest first.
    """

    name: str
    total_bytes: int
    free_bytes: int
    neighbours: tuple[Neighbour, ...]


@dataclass(frozen=True, slots=True)
class Driver:
    """The NVIDIA driver of this machine.

    Attributes:
        version: Its version, such as "580.65.06".
        cuda: The newest version of CUDA that it supports, such as (13, 0); None if it does not say.
    """

    version: str
    cuda: tuple[int, int] | None

    @property
    def text(self) -> str:
        """Its versions in words."""
        return self.version if self.cuda is None else f"{self.version}, for CUDA up to {self.cuda[0]}.{self.cuda[1]}"


def read_driver() -> Driver | None:
    """Return the driver; None if there is none, or NVML is missing."""
    if pynvml is None:
        return None
    try:
        with _initialised():
            number = int(pynvml.nvmlSystemGetCudaDriverVersion_v2())  # 13000 is 13.0
            return Driver(str(pynvml.nvmlSystemGetDriverVersion()), (number // 1000, number % 1000 // 10))
    except pynvml.NVMLError:
        return None


def gpus_of(wanted: str | None) -> tuple[GPUReading, ...]:
    """Return the GPUs that a value of CUDA_VISIBLE_DEVICES makes visible, in NVML's order; all for None."""
    if pynvml is None:
        return ()
    try:
        with _initialised():
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return tuple(_reading(handle) for index, handle in enumerate(handles) if _is_seen(index, handle, wanted))
    except pynvml.NVMLError:
        return ()


def usage_of(uuid: str) -> tuple[int, dict[int, int | None]] | None:
    """Return the bytes in use on a GPU, and each process's share by its pid; None if NVML does not report them."""
    if pynvml is None or not uuid:
        return None
    try:
        with _initialised():
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used), _shares(handle)
    except pynvml.NVMLError:
        return None


def neighbours(shares: Mapping[int, int | None]) -> tuple[Neighbour, ...]:
    """Return processes with their names, the largest first."""
    others = (Neighbour(pid, _name_of(pid), used) for pid, used in shares.items())
    return tuple(sorted(others, key=lambda other: -(other.used_bytes or 0)))


@contextmanager
def _initialised() -> Iterator[None]:
    pynvml.nvmlInit()
    try:
        yield
    finally:
        pynvml.nvmlShutdown()


def _is_seen(index: int, handle: object, wanted: str | None) -> bool:
    if wanted is None:
        return True
    uuid = str(pynvml.nvmlDeviceGetUUID(handle))
    names = [name.strip() for name in wanted.split(",")]
    return any(name == str(index) or (name.startswith("GPU-") and uuid.startswith(name)) for name in names)


def _reading(handle: object) -> GPUReading:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        shares = _shares(handle)
    except pynvml.NVMLError:  # not permitted in some containers
        shares = {}
    name = str(pynvml.nvmlDeviceGetName(handle))
    return GPUReading(name, int(memory.total), int(memory.free), neighbours(shares))


def _shares(handle: object) -> dict[int, int | None]:
    return {process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def _name_of(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # the process has ended, or is in another namespace
        return "?"
