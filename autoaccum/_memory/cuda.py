"""The memory of a CUDA (or ROCm) GPU: PyTorch's allocator counts and limits it, NVML reports other processes' use.

The allocator takes segments from the driver ("reserved") and hands out pieces of them ("allocated"). Its limit counts
reserved bytes, including cached segments, so used and peak mean reserved here: a peak of allocated bytes could stay
below a limit that the segments have long exceeded. Reserved memory does not shrink by itself, so call `release` before
each of two steps whose peaks are compared. The CUDA context, some hundred MiB, is not included in these numbers.
"""

from __future__ import annotations

import gc
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from autoaccum._memory import nvml
from autoaccum._memory.accelerator import Accelerator

if TYPE_CHECKING:
    from autoaccum._records import MemoryReading, Neighbour


class Cuda(Accelerator):
    """The memory of one GPU.

    Args:
        device: The GPU; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        super().__init__(torch.device(device.type, index))
        properties = torch.cuda.get_device_properties(index)
        self.name = str(properties.name)
        self._total_bytes = int(properties.total_memory)
        self._uuid = str(getattr(properties, "uuid", ""))
        self._settled_bytes = 0

    def reading(self) -> MemoryReading:
        """Return the memory that the driver has free, or that the limit leaves if that is less."""
        return replace(super().reading(), total_bytes=self._total_bytes)

    def others_bytes(self) -> int | None:
        """Return the memory that other processes hold, by NVML; None without it."""
        usage = nvml.usage_of(self._uuid)
        if usage is None:
            return None
        # NVML may not list this process (another PID namespace, as in containers). Then its share is taken to be what
        # the allocator reserved, and its context counts towards the others.
        used, shares = usage
        return max(0, used - int(shares.get(os.getpid()) or self._used()))

    def release(self) -> None:
        """Return cached segments to the driver; collect cycles first if more is alive than last time."""
        if torch.cuda.memory_allocated(self.device) > self._settled_bytes:
            # A collection takes up to a second in a large process, so it runs only if a cycle may pin something.
            gc.collect()
        self.trim()
        self._settled_bytes = torch.cuda.memory_allocated(self.device)

    def trim(self) -> None:
        """Return cached segments to the driver."""
        with torch.cuda.device(self.device):
            torch.cuda.empty_cache()

    def neighbours(self) -> tuple[Neighbour, ...]:
        """Return the other processes on the GPU, according to NVML."""
        usage = nvml.usage_of(self._uuid)
        shares = {} if usage is None else usage[1]
        return nvml.neighbours({pid: used for pid, used in shares.items() if pid != os.getpid()})

    def alloc_retries(self) -> int:
        """Return how often an allocation succeeded only after the cache was flushed."""
        return int(torch.cuda.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0))

    def synchronize(self) -> None:
        """Wait until the GPU has completed all submitted work."""
        torch.cuda.synchronize(self.device)

    def total_for_fraction(self) -> int:
        """Return the GPU's total memory."""
        return self._total_bytes
