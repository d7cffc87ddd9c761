"""Measures and limits the memory of a device, with one backend for each kind of device.

`available_devices.backend_for(device)` returns the `MemoryBackend` (`base.py`); `limits.parse_limit` converts a user's
`memory_limit` to bytes. Backends provide readings (`MemoryReading`), peaks, exact counts of storages (`_storages`), and
raise `torch.OutOfMemoryError` for anything that would not fit. They never touch a model or catch such an error. May
import `_system`, `_oom`, `_records`, `_arguments` and `errors`. Who only reads control groups (`autoaccum run`)
imports `_linux.py` alone, and not torch.
"""
