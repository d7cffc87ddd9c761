"""Measures and limits the memory of a device, with one backend for each kind of device.

`backend_for(device)` returns the `MemoryBackend`; `parse_limit` converts a user's `memory_limit` to bytes. Backends
provide readings (`MemoryReading`), peaks, exact counts of storages (`_storages`), and raise `torch.OutOfMemoryError`
for anything that would not fit. They never touch a model or catch such an error. May import `_system`, `_oom`,
`_records`, `_arguments` and `errors`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._memory.accelerator import Accelerator
from autoaccum._memory.available_devices import existing
from autoaccum._memory.base import MemoryBackend
from autoaccum._memory.cuda import Cuda
from autoaccum._memory.host import Host
from autoaccum._memory.limits import format_bytes, parse_limit
from autoaccum._memory.simulated import Simulated

if TYPE_CHECKING:
    import torch

__all__ = [
    "Accelerator",
    "Cuda",
    "Host",
    "MemoryBackend",
    "Simulated",
    "backend_for",
    "format_bytes",
    "parse_limit",
]


def backend_for(device: torch.device) -> MemoryBackend:
    """Return the backend for the memory of a CPU, a CUDA (or ROCm) device or another accelerator of this machine.

    Raises:
        DeviceMissingError: This machine does not have the device.
    """
    if device.type == "cpu":
        return Host()
    existing(device)
    return Cuda(device) if device.type == "cuda" else Accelerator(device)
