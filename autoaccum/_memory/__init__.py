"""Measures and limits the memory of a device, with one backend for each kind of device.

`backend_for(device)` returns the `MemoryBackend`; `parse_limit` converts a user's `memory_limit` to bytes. Backends
provide readings (`MemoryReading`), peaks, exact counts of storages (`_storages`), and raise `torch.OutOfMemoryError`
for anything that would not fit. They never touch a model or catch such an error. May import `_system`, `_oom`,
`_records`, `_arguments` and `errors`. Backends are loaded when they are first used: what only reads control groups
(`autoaccum run`) does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from autoaccum._memory.limits import format_bytes, parse_limit

if TYPE_CHECKING:
    import torch

    from autoaccum._memory.accelerator import Accelerator
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._memory.cuda import Cuda
    from autoaccum._memory.host import Host
    from autoaccum._memory.simulated import Simulated

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

_HOMES = {
    "Accelerator": "accelerator",
    "Cuda": "cuda",
    "Host": "host",
    "MemoryBackend": "base",
    "Simulated": "simulated",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def backend_for(device: torch.device) -> MemoryBackend:
    """Return the backend for the memory of a CPU, a CUDA (or ROCm) device or another accelerator of this machine.

    Raises:
        DeviceMissingError: This machine does not have the device.
    """
    from autoaccum._memory.available_devices import existing  # noqa: PLC0415 - see above

    kind = {"cpu": "Host", "cuda": "Cuda"}.get(device.type, "Accelerator")
    if kind != "Host":
        existing(device)
    backend: MemoryBackend = __getattr__(kind)() if kind == "Host" else __getattr__(kind)(device)
    return backend
