"""The memory of any accelerator that PyTorch supports (XPU, MPS and others); `Cuda` builds on it.

PyTorch's device modules differ in which functions they have and how these are named. A value that cannot be measured is
None, a limit that cannot be enforced is refused, and everything else works.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil
import torch

from autoaccum._memory.base import MemoryBackend
from autoaccum._memory.limits import format_bytes
from autoaccum._records import MemoryReading
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# torch.mps has no getter; 1.7 times the recommended size is its documented default.
_DEFAULT_FRACTION = {"mps": 1.7}


class Accelerator(MemoryBackend):
    """The memory of an accelerator, limited by PyTorch's own allocator.

    Args:
        device: The accelerator; without an index, the current one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.name = f"{device.type.upper()} device"
        self._module: Any = torch.get_device_module(device)
        # torch.mps has one device and its functions take none.
        self._where: tuple[torch.device, ...] = () if device.type == "mps" else (device,)
        self._limit_bytes: int | None = None

    def reading(self) -> MemoryReading:
        """Return the memory that the device has free, or that the limit leaves if that is less.

        Cached segments count as used: call `release` first to learn what a step could have. A device that does not
        report its memory is taken to share the host's.
        """
        used = self._used()
        free, total = self._free_and_total(used)
        room = free if self._limit_bytes is None else min(free, self._limit_bytes - used)
        return MemoryReading(total_bytes=total, free_bytes=max(0, room), used_bytes=used, limit_bytes=self._limit_bytes)

    @contextmanager
    def counted(self, limit_bytes: int | None) -> Iterator[None]:
        """Check a limit on this process's share of the device.

        Args:
            limit_bytes: The limit, including what the process already holds; has no effect if it is at least the
                device's memory.

        Raises:
            InvalidInputError: The limit is not positive, is below what the process holds and cannot release, or cannot
                be enforced on this device.
        """
        gc.collect()  # a release does so on CUDA only if more is alive than after the last one
        self.release()
        if limit_bytes is not None:
            self._check_that_it_can_be_set(limit_bytes)
        yield

    def reset_peak(self) -> None:
        """Reset the peak to the current use, if the device counts it."""
        reset = self._function("reset_peak_memory_stats")
        if reset is not None:
            reset(*self._where)

    def peak_bytes(self) -> int | None:
        """Return the highest use since `reset_peak`; None if the device does not count it."""
        return self._peak("max_memory_reserved", "max_memory_allocated")

    def peak_in_use_bytes(self) -> int | None:
        """Return the highest use by tensors alone."""
        return self._peak("max_memory_allocated")

    def _peak(self, *names: str) -> int | None:
        peak = self._function(*names)
        return None if peak is None or self._function("reset_peak_memory_stats") is None else int(peak(*self._where))

    def release(self) -> None:
        """Collect cycles and return cached memory to the device."""
        gc.collect()
        self.trim()

    def trim(self) -> None:
        """Return the allocator's cached memory to the device, if its module supports that."""
        empty = self._function("empty_cache")
        if empty is not None:
            empty()

    def reserve(self, extra_bytes: int) -> None:
        """Have the allocator hold `extra_bytes` in its cache, or raise an error that `is_oom` recognises."""
        if extra_bytes > 0:  # freed at once, but the block stays with the allocator
            torch.empty(extra_bytes, dtype=torch.uint8, device=self.device)

    def secure(self, extra_bytes: int) -> None:
        """Have the allocator hold `extra_bytes` beside what is in use, or raise an error that `is_oom` recognises."""
        in_use = self._function("memory_allocated")
        if in_use is not None and self._used() - int(in_use(*self._where)) >= extra_bytes:
            return
        # Asked for beside the cache, the rest could come from the cache, or be got by giving the cache up.
        self.trim()
        self.reserve(extra_bytes)

    def synchronize(self) -> None:
        """Wait until the device has completed all submitted work."""
        torch.accelerator.synchronize(self.device)

    def total_for_fraction(self) -> int:
        """Return the device's total memory."""
        return self._free_and_total(self._used())[1]

    def _check_that_it_can_be_set(self, limit_bytes: int) -> None:
        used = self._used()
        if self._function("set_per_process_memory_fraction") is None:
            raise InvalidInputError(
                f"a limit of {format_bytes(limit_bytes)} cannot be enforced on {self.name} with PyTorch "
                f"{torch.__version__}; leave memory_limit out, and choose the micro-batch size yourself"
            )
        if limit_bytes < 1:
            raise InvalidInputError(f"a limit of {limit_bytes} bytes on {self.name} leaves no memory")
        if limit_bytes < used:
            raise InvalidInputError(
                f"a limit of {format_bytes(limit_bytes)} on {self.name} is below the {format_bytes(used)} that this "
                "process already holds there; raise memory_limit (it counts the model too), or free tensors"
            )

    @contextmanager
    def _in_force(self, limit_bytes: int | None) -> Iterator[None]:
        limit = self._function("set_per_process_memory_fraction")
        if limit_bytes is None or limit is None:
            yield
            return
        total = self.total_for_fraction()
        asked = self._function("get_per_process_memory_fraction")
        before = float(asked(*self._where)) if asked is not None else _DEFAULT_FRACTION.get(self.device.type, 1.0)
        fraction = min(before, limit_bytes / total)
        limit(fraction, *self._where)
        self._limit_bytes = int(fraction * total)
        try:
            yield
        finally:
            self._limit_bytes = None
            limit(before, *self._where)

    def _used(self) -> int:
        held = self._function("memory_reserved", "driver_allocated_memory", "memory_allocated")
        return 0 if held is None else int(held(*self._where))

    def _free_and_total(self, used: int) -> tuple[int, int]:
        ask = self._function("mem_get_info", "get_memory_info")
        if ask is not None:
            free, total = ask(*self._where)
            return int(free), int(total)
        recommended = self._function("recommended_max_memory")
        if recommended is not None:
            return int(recommended()) - used, int(recommended())
        machine = psutil.virtual_memory()
        return machine.available, machine.total

    def _function(self, *names: str) -> Callable[..., Any] | None:
        """Return the first of these functions that the device's module or torch.accelerator has."""
        for name in names:
            for module in (self._module, *(() if self.device.type == "mps" else (torch.accelerator,))):
                if hasattr(module, name):
                    return getattr(module, name)  # type: ignore[no-any-return]
        return None
