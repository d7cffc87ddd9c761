"""Settings of glibc's allocator while a process limit is in force.

By default glibc keeps what was freed, raises the size from which it asks the kernel directly, and so fragments a heap
that the limit counts in full: one failed step can leave the whole limit stuck. Settled, every large block is a mapping
of its own that goes back to the kernel when it is freed. Without glibc nothing here does anything.
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
# Where glibc's own adjusting ends in a process that frees tensors of 32 MiB and more.
_GROWN_MMAP_BYTES = 32 * 1024 * 1024
_GROWN_TRIM_BYTES = 64 * 1024 * 1024


def settle() -> None:
    """Make freed blocks of 128 KiB and more go back to the kernel at once."""
    _set_thresholds(_SETTLED_BYTES, _SETTLED_BYTES)


def unsettle() -> None:
    """Undo `settle`.

    The thresholds cannot be read, so they get the values that glibc itself arrives at in a training process; it does
    not adjust them again.
    """
    _set_thresholds(_GROWN_MMAP_BYTES, _GROWN_TRIM_BYTES)


def trim() -> None:
    """Give the free pages inside the heap back to the kernel."""
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
