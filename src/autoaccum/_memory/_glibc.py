"""Settings of glibc's allocator while a process limit is in force.

By default glibc keeps freed memory and raises the size from which it maps blocks directly, which fragments a heap that
the limit counts in full: one failed step can leave the whole limit occupied. After `settle`, every large block is its
own mapping, which is returned to the kernel when freed. Without glibc these functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import sys

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# 128 KiB is glibc's own starting value. Setting it fixes it: blocks from this size on are mapped one by one, and
# freeing one no longer raises the threshold (up to 32 MiB). benchmarks/host_limit.py measures the effect.
_SETTLED_BYTES = 128 * 1024
# The values that glibc's own adjustment reaches in a process that frees tensors of 32 MiB and more.
_GROWN_MMAP_BYTES = 32 * 1024 * 1024
_GROWN_TRIM_BYTES = 64 * 1024 * 1024


def settle() -> None:
    """Return freed blocks of 128 KiB and more to the kernel at once."""
    _set_thresholds(_SETTLED_BYTES, _SETTLED_BYTES)


def unsettle() -> None:
    """Undo `settle`.

    The thresholds cannot be read, so they are set to the values that glibc itself reaches in a training process; it
    does not adjust them any more.
    """
    _set_thresholds(_GROWN_MMAP_BYTES, _GROWN_TRIM_BYTES)


def trim() -> None:
    """Return free pages inside the heap to the kernel."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


def _set_thresholds(mmap_bytes: int, trim_bytes: int) -> None:
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, mmap_bytes)
        libc.mallopt(_M_TRIM_THRESHOLD, trim_bytes)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    # musl has neither function.
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
