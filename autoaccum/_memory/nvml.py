"""Reads the state of NVIDIA GPUs and the processes on them from NVML, without a CUDA context or device memory.

It is therefore suitable for a process that only waits for others, such as a wrapper, for which `Cuda` would occupy
hundreds of MiB of the GPU. If NVML is missing or fails, no GPUs and no values are returned.

NVML orders GPUs by their bus; CUDA orders and hides them by CUDA_DEVICE_ORDER, CUDA_VISIBLE_DEVICES and MIG. So numbers
say nothing here: a GPU is matched by its UUID, and CUDA's order is asked of the driver, which needs no context for it.
"""

from __future__ import annotations

import ctypes
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

import psutil

from autoaccum._records import Neighbour

try:
    import pynvml
except ImportError:  # not needed for training
    pynvml = None

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_CUDA_ERROR_NO_DEVICE = 100  # cuda.h; also where CUDA_VISIBLE_DEVICES hides all


@dataclass(frozen=True, slots=True)
class GPUReading:
    """A GPU, or an instance of one that MIG divides, at one moment.

    Attributes:
        name: Its name.
        total_bytes: Its memory.
        free_bytes: Memory that no process uses.
        neighbours: The processes on it that NVML lists, the largest first.
        uuid: Its UUID, without what NVML puts before it.
    """

    name: str
    total_bytes: int
    free_bytes: int
    neighbours: tuple[Neighbour, ...]
    uuid: str = ""


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


def all_gpus() -> tuple[GPUReading, ...]:
    """Return all GPUs of this machine, visible to CUDA or not, in NVML's order; of those under MIG their instances."""
    if pynvml is None:
        return ()
    try:
        with _initialised():
            gpus = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            return tuple(_reading(handle) for gpu in gpus for handle in _instances(gpu))
    except pynvml.NVMLError:
        return ()


def visible_uuids() -> tuple[str, ...] | None:
    """Return the UUIDs of the GPUs that CUDA shows to this process, by their numbers; None if the driver cannot say."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        ended = cuda.cuInit(0)
        if ended == _CUDA_ERROR_NO_DEVICE:
            return ()
        count = ctypes.c_int()
        if ended or cuda.cuDeviceGetCount(ctypes.byref(count)):
            return None
        found = []
        for number in range(count.value):
            device, content = ctypes.c_int(), (ctypes.c_ubyte * 16)()
            if cuda.cuDeviceGet(ctypes.byref(device), number) or cuda.cuDeviceGetUuid_v2(content, device):
                return None
            found.append(str(UUID(bytes=bytes(content))))
    except (OSError, AttributeError):  # no driver, or one before CUDA 11.4
        return None
    return tuple(found)


def usage_of(uuid: str) -> tuple[int, dict[int, int | None]] | None:
    """Return the bytes in use on a GPU, and each process's share by its pid; None if NVML does not report them.

    Of a GPU that MIG divides, only the use of its instances means anything to a process.
    """
    if pynvml is None or not uuid:
        return None
    for kind in ("GPU", "MIG"):
        try:
            with _initialised():
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"{kind}-{uuid}")
                if _instances(handle) == [handle]:
                    return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used), _shares(handle)
        except pynvml.NVMLError:
            continue
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


def _instances(gpu: object) -> list[object]:
    """Return the instances of a GPU that MIG divides; else the GPU."""
    try:
        if not pynvml.nvmlDeviceGetMigMode(gpu)[0]:
            return [gpu]
        most = int(pynvml.nvmlDeviceGetMaxMigDeviceCount(gpu))
    except pynvml.NVMLError:  # it has no MIG, or is an instance
        return [gpu]
    found = []
    for place in range(most):
        with suppress(pynvml.NVMLError):  # there need not be as many as there can be
            found.append(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, place))
    return found


def _reading(handle: object) -> GPUReading:
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        shares = _shares(handle)
    except pynvml.NVMLError:  # not permitted in some containers
        shares = {}
    name = str(pynvml.nvmlDeviceGetName(handle))
    own = str(pynvml.nvmlDeviceGetUUID(handle)).partition("-")[2]
    return GPUReading(name, int(memory.total), int(memory.free), neighbours(shares), own)


def _shares(handle: object) -> dict[int, int | None]:
    return {process.pid: process.usedGpuMemory for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)}


def _name_of(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # the process has ended, or is in another namespace
        return "?"
