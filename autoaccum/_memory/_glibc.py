"""Settings of glibc's allocator while a process limit is in force.

By default glibc keeps freed memory and raises the size from which it maps blocks directly, which fragments a heap that
the limit counts in full: one failed step can leave the whole limit occupied. While it is settled, every large block is
its own mapping, which is returned to the kernel when freed. Without glibc these functions do nothing.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Callable

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

# 128 KiB is glibc's own starting value. Setting it fixes it: blocks from this size on are mapped one by one, and
# freeing one no longer raises the threshold (up to 32 MiB). benchmarks/host_limit.py measures the effect.
_SETTLED_BYTES = 128 * 1024
# The values that glibc's own adjustment reaches in a process that frees tensors of 32 MiB and more.
_GROWN_MMAP_BYTES = 32 * 1024 * 1024
_GROWN_TRIM_BYTES = 64 * 1024 * 1024
# Below, a block is mostly resident anyway, in the pages that it shares with its neighbours.
_LEAST_HOLE_BYTES = 16 * 1024
_LARGEST_HOLE_BYTES = 16 * 2**30
# Far more than there are; where another thread sets the threshold meanwhile, there would be no end.
_MOST_HOLES = 1 << 14
# <malloc/malloc.c>: IS_MMAPPED, in the size of a block.
_IS_MAPPED = 0x2


class Settled:
    """Returns freed blocks of 128 KiB and more to the kernel at once, until `end`.

    The thresholds cannot be read, so after the last of these they are set to the values that glibc itself reaches in a
    training process; it does not adjust them any more.
    """

    _every: ClassVar[set[Settled]] = set()

    def __init__(self) -> None:
        # Looked up here, since nothing can be looked up when the interpreter ends.
        self._libc, self._others = _libc(), self._every
        self._grown = (_M_MMAP_THRESHOLD, _GROWN_MMAP_BYTES), (_M_TRIM_THRESHOLD, _GROWN_TRIM_BYTES)
        self._every.add(self)
        if self._libc is not None:
            self._libc.mallopt(_M_MMAP_THRESHOLD, _SETTLED_BYTES)
            self._libc.mallopt(_M_TRIM_THRESHOLD, _SETTLED_BYTES)

    def end(self) -> None:
        """Undo it, unless others are left; a second call does nothing."""
        if self not in self._others:
            return
        self._others.discard(self)
        if not self._others and self._libc is not None:
            for which, value in self._grown:
                self._libc.mallopt(which, value)

    @classmethod
    def forget(cls) -> None:
        """Forget those of a parent process."""
        cls._every.clear()


def trim() -> None:
    """Return free pages inside the heap to the kernel."""
    libc = _libc()
    if libc is not None:
        libc.malloc_trim(0)


class Holes:
    """The free blocks of the heap, taken so that nothing else can use them; they stay untouched, and so not resident.

    What an earlier training freed in the heap stays mapped. A block that is allocated there adds resident memory, but
    no mapping, so a limit on mappings does not see it. Only the heap of the calling thread can be taken, in which
    tensors are allocated; without glibc, `take` does nothing.
    """

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._free: Callable[[int], object] | None = None

    def take(self) -> None:
        """Take the free blocks of `_LEAST_HOLE_BYTES` and more."""
        libc = _libc()
        # By these names, since a preloaded allocator takes the place of malloc, and its blocks have other headers.
        if libc is None or not hasattr(libc, "__libc_malloc"):
            return
        # Looked up here, since nothing can be looked up when the interpreter ends.
        self._free = getattr(libc, "__libc_free")
        # From here on a block that the heap has no room for is mapped, and marked so.
        libc.mallopt(_M_MMAP_THRESHOLD, _LEAST_HOLE_BYTES)
        try:
            size = _LARGEST_HOLE_BYTES
            while size >= _LEAST_HOLE_BYTES and len(self._taken) < _MOST_HOLES:
                block = getattr(libc, "__libc_malloc")(size)
                if block is None or _is_mapped(block):
                    getattr(libc, "__libc_free")(block)
                    size //= 2
                else:
                    self._taken.append(block)
        finally:
            libc.mallopt(_M_MMAP_THRESHOLD, _SETTLED_BYTES)

    def free(self) -> None:
        """Give the blocks back to the heap."""
        while self._taken and self._free is not None:
            self._free(self._taken.pop())

    def __del__(self) -> None:
        self.free()


def _is_mapped(block: int) -> bool:
    """Whether a block is its own mapping, by the size that malloc keeps before it."""
    header = ctypes.c_size_t.from_address(block - ctypes.sizeof(ctypes.c_size_t)).value
    return bool(header & _IS_MAPPED)


@functools.cache
def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)
    if hasattr(library, "__libc_malloc"):
        library.__libc_malloc.restype, library.__libc_malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.__libc_free.restype, library.__libc_free.argtypes = None, [ctypes.c_void_p]
    # musl has neither function.
    return library if hasattr(library, "mallopt") and hasattr(library, "malloc_trim") else None
