"""A CUDA (or ROCm) card: PyTorch's own allocator counts and limits, NVML tells what other processes hold.

The allocator takes segments from the driver ("reserved") and hands out pieces of them ("allocated"). Its
limit counts what is reserved, cached segments included, so used and peak mean reserved here: a peak of pieces
could lie under a limit that the segments had passed long ago. Reserved memory does not shrink by itself, so
whoever compares the peaks of two steps calls `release` before each. The CUDA context, some hundred MiB, is
counted by nobody.
"""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING

import psutil
import torch

from autoaccum._memory.base import MemoryBackend
from autoaccum._memory.limits import format_bytes
from autoaccum._records import MemoryReading, Neighbour
from autoaccum.errors import InvalidInputError

try:
    import pynvml
except ImportError:  # it only tells what others hold: nobody should need it to train
    pynvml = None

if TYPE_CHECKING:
    from collections.abc import Iterator


class Cuda(MemoryBackend):
    """The memory of one card.

    Args:
        device: The card; without an index the current one.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device(device.type, index)
        properties = torch.cuda.get_device_properties(index)
        self.name = str(properties.name)
        self._total_bytes = int(properties.total_memory)
        self._uuid = str(getattr(properties, "uuid", ""))
        self._entered = False
        self._limit_bytes: int | None = None
        self._settled_bytes = 0

    def reading(self) -> MemoryReading:
        """Return what the driver has free, or what the limit leaves where that is less.

        Cached segments count as used, so `release` first where the question is what a step could have.
        """
        free, _ = torch.cuda.mem_get_info(self.device)
        reserved = torch.cuda.memory_reserved(self.device)
        room = free if self._limit_bytes is None else min(free, self._limit_bytes - reserved)
        return MemoryReading(
            total_bytes=self._total_bytes,
            free_bytes=max(0, room),
            used_bytes=reserved,
            others_bytes=_others_bytes(self._uuid, reserved),
            limit_bytes=self._limit_bytes,
        )

    @contextlib.contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[None]:
        """Hold this process's share of the card to `limit_bytes`, what it holds already included.

        Args:
            limit_bytes: The limit; from the card's whole memory on it changes nothing.

        Raises:
            InvalidInputError: The limit is not positive, or below what this process holds and cannot give back;
                or another context of this backend is still open.
        """
        if self._entered:
            raise InvalidInputError(f"{self.name} is already limited; leave that context first")
        self._settled_bytes = 0
        self.release()
        if limit_bytes is not None:
            self._refuse(limit_bytes)
        self._entered = True
        try:
            with contextlib.nullcontext() if limit_bytes is None else self._enforced(limit_bytes):
                yield
        finally:
            self._entered = False

    def lifted(self) -> contextlib.AbstractContextManager[None]:
        """Do nothing: the limit lives in this process's allocator and is not inherited."""
        return contextlib.nullcontext()

    def reset_peak(self) -> None:
        """Begin to count the peak anew, from what is reserved now."""
        torch.cuda.reset_peak_memory_stats(self.device)

    def peak_bytes(self) -> int | None:
        """Return the most that was reserved since `reset_peak`."""
        return torch.cuda.max_memory_reserved(self.device)

    def release(self) -> None:
        """Give cached segments back to the driver; collect cycles first if more is alive than last time."""
        if torch.cuda.memory_allocated(self.device) > self._settled_bytes:
            # A collection takes up to a second in a large process, so only where a cycle may pin something.
            gc.collect()
        self.trim()
        self._settled_bytes = torch.cuda.memory_allocated(self.device)

    def trim(self) -> None:
        """Give cached segments back to the driver."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def ensure(self, extra_bytes: int) -> None:
        """Do nothing: the allocator fails cleanly.

        Args:
            extra_bytes: Memory about to be needed at once.
        """

    def reserve(self, extra_bytes: int) -> None:
        """Have the allocator hold `extra_bytes` in its cache, or raise `torch.OutOfMemoryError`.

        Args:
            extra_bytes: Memory about to be needed; freed at once, it stays with the allocator.
        """
        if extra_bytes > 0:
            torch.empty(extra_bytes, dtype=torch.uint8, device=self.device)

    def neighbours(self) -> list[Neighbour]:
        """Return the other processes on the card, by NVML."""
        told = _ask_nvml(self._uuid)
        shares = {} if told is None else told[1]
        others = [Neighbour(pid, _name_of(pid), used) for pid, used in shares.items() if pid != os.getpid()]
        return sorted(others, key=lambda other: -(other.used_bytes or 0))

    def alloc_retries(self) -> int:
        """Return how often an allocation succeeded only after the cache had been given back."""
        return int(torch.cuda.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0))

    def synchronize(self) -> None:
        """Wait until the card has done all that was submitted."""
        torch.cuda.synchronize(self.device)

    def total_for_fraction(self) -> int:
        """Return the memory of the whole card."""
        return self._total_bytes

    def _refuse(self, limit_bytes: int) -> None:
        if limit_bytes < 1:
            raise InvalidInputError(f"a limit of {limit_bytes} bytes on {self.name} leaves no memory")
        reserved = torch.cuda.memory_reserved(self.device)
        if limit_bytes < reserved:
            raise InvalidInputError(
                f"a limit of {format_bytes(limit_bytes)} on {self.name} is below the "
                f"{format_bytes(reserved)} that this process already holds there; raise memory_limit (it "
                "counts the model too), or free tensors"
            )

    @contextlib.contextmanager
    def _enforced(self, limit_bytes: int) -> Iterator[None]:
        before = torch.cuda.get_per_process_memory_fraction(self.device)
        fraction = min(before, limit_bytes / self._total_bytes)
        torch.cuda.set_per_process_memory_fraction(fraction, self.device)
        self._limit_bytes = int(fraction * self._total_bytes)
        try:
            yield
        finally:
            self._limit_bytes = None
            torch.cuda.set_per_process_memory_fraction(before, self.device)


def _others_bytes(uuid: str, own_reserved_bytes: int) -> int | None:
    """Return what other processes hold on the card, by NVML; None where that cannot be told.

    Where NVML does not show this process (another PID namespace, as in containers), what the allocator
    reserved is taken for its share, and its context is counted among the others.
    """
    told = _ask_nvml(uuid)
    if told is None:
        return None
    used, shares = told
    return max(0, used - int(shares.get(os.getpid()) or own_reserved_bytes))


def _ask_nvml(uuid: str) -> tuple[int, dict[int, int | None]] | None:
    """Return the bytes in use on a card, and those of each process by its number; None where NVML does not tell."""
    if pynvml is None or not uuid:
        return None
    try:
        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
            used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
            running = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
        finally:
            pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return None
    return used, {process.pid: process.usedGpuMemory for process in running}


def _name_of(pid: int) -> str:
    try:
        return psutil.Process(pid).name()
    except psutil.Error:  # it has ended, or lives where this process cannot see
        return "?"
