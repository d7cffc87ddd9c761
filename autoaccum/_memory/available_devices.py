"""Finds the devices of this machine without initialising them, and the backend for the memory of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from autoaccum._arguments import shown
from autoaccum._memory.accelerator import Accelerator
from autoaccum._memory.cuda import Cuda
from autoaccum._memory.host import Host
from autoaccum.errors import DeviceMissingError, InvalidInputError

if TYPE_CHECKING:
    from autoaccum._memory.base import MemoryBackend


def find_accelerator() -> torch.device | None:
    """Return the kind of accelerator that this machine has; None if it has none."""
    return torch.accelerator.current_accelerator(check_available=True)


def existing(device: str | torch.device) -> torch.device:
    """Return the device that a user named; without an index if none was given.

    Raises:
        InvalidInputError: torch knows no such device.
        DeviceMissingError: This machine does not have it.
    """
    try:
        asked = torch.device(str(device) if isinstance(device, bool) else device)  # True would be GPU 1
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise InvalidInputError(f"device={shown(device)} is not a device that torch knows; {there_is()}") from error
    if asked.type == "cpu" and not asked.index:
        return torch.device("cpu")
    there = find_accelerator()
    if there is None or there.type != asked.type or (asked.index or 0) >= torch.accelerator.device_count():
        raise DeviceMissingError(f"device={str(device)!r} is not available; {there_is()}")
    return asked


def there_is() -> str:
    """Return a sentence that lists the devices of this machine."""
    there = find_accelerator()
    names = ["'cpu'"]
    if there is not None:
        names += [f"'{there.type}:{index}'" for index in range(torch.accelerator.device_count())]
    return f"this machine has {', '.join(names)}"


def backend_for(device: torch.device) -> MemoryBackend:
    """Return the backend for the memory of a CPU, a CUDA (or ROCm) device or another accelerator of this machine.

    Raises:
        DeviceMissingError: This machine does not have the device.
    """
    if device.type == "cpu":
        return Host()
    existing(device)
    return Cuda(device) if device.type == "cuda" else Accelerator(device)
