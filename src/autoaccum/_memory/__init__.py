"""The memory of a device: what there is, a limit that really holds, and peaks; one file a kind of device."""

from __future__ import annotations

import torch

from autoaccum._memory.accelerator import Accelerator
from autoaccum._memory.base import MemoryBackend
from autoaccum._memory.cuda import Cuda
from autoaccum._memory.host import Host
from autoaccum._memory.limits import format_bytes, parse_limit
from autoaccum._memory.simulated import Simulated
from autoaccum.errors import InvalidInputError

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
    """Return the backend for the memory of a device.

    Args:
        device: A CPU, a CUDA (or ROCm) device, or the accelerator that this PyTorch was built for.

    Raises:
        InvalidInputError: There is no such device here.
    """
    if device.type == "cpu":
        return Host()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    count = torch.accelerator.device_count()
    if accelerator is None or accelerator.type != device.type or (device.index or 0) >= count:
        found = "none" if accelerator is None else f"{count} of type {accelerator.type}, counted from 0"
        raise InvalidInputError(
            f"device={str(device)!r} does not exist here; accelerators found: {found}; 'cpu' always is there"
        )
    return Cuda(device) if device.type == "cuda" else Accelerator(device)
