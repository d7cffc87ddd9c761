"""A CUDA (or ROCm) card: PyTorch's own allocator counts and limits, NVML reports what other processes hold.

The allocator takes segments from the driver ("reserved") and hands out pieces of them ("allocated"). Its limit counts
reserved bytes, cached segments included, so used and peak mean reserved here: a peak of allocated bytes could stay
below a limit that the segments passed long ago. Reserved memory does not shrink by itself, so call `release` before
each of two steps whose peaks are compared. The CUDA context, some hundred MiB, is in none of these numbers.
"""

from __future__ import annotations

import contextlib
import gc
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from autoaccum._memory import nvml
from autoaccum._memory.accelerator import Accelerator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum._records import MemoryReading, Neighbour


class Cuda(Accelerator):
    """The memory of one card.

    Args:
        device: The card; without an index the current one.
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
        """Return what the driver has free, or what the limit leaves; and what NVML says others hold."""
        reading = super().reading()
        return replace(
            reading, total_bytes=self._total_bytes, others_bytes=_others_bytes(self._uuid, reading.used_bytes)
        )

    @contextlib.contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[None]:
        """Hold this process's share of the card to `limit_bytes`, as `Accelerator.limited` does."""
        self._settled_bytes = 0
        with super().limited(limit_bytes):
            yield

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

    def neighbours(self) -> tuple[Neighbour, ...]:
        """Return the other processes on the card, by NVML."""
        usage = nvml.usage_of(self._uuid)
        shares = {} if usage is None else usage[1]
        return nvml.neighbours({pid: used for pid, used in shares.items() if pid != os.getpid()})

    def alloc_retries(self) -> int:
        """Return how often an allocation succeeded only after the cache had been given back."""
        return int(torch.cuda.memory_stats_as_nested_dict(self.device).get("num_alloc_retries", 0))

    def synchronize(self) -> None:
        """Wait until the card has done all that was submitted."""
        torch.cuda.synchronize(self.device)

    def total_for_fraction(self) -> int:
        """Return the memory of the whole card."""
        return self._total_bytes


def _others_bytes(uuid: str, own_reserved_bytes: int) -> int | None:
    """Return what other processes hold on the card, by NVML; None where it does not say.

    Where NVML does not list this process (another PID namespace, as in containers), its share is taken to be what the
    allocator reserved, and its context counts among the others.
    """
    usage = nvml.usage_of(uuid)
    if usage is None:
        return None
    used, shares = usage
    return max(0, used - int(shares.get(os.getpid()) or own_reserved_bytes))
