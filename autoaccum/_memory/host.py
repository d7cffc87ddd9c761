"""The host's memory: a soft limit that is measured, and a hard one on this process above it.

Linux overcommits memory and kills a process that uses too much. Native code can crash when an allocation fails inside
it. So a limit is soft: trials and some windows are measured, what was above the limit is kept, and the next is smaller.
Far above it, RLIMIT_DATA makes an allocation fail instead of the process being killed. It counts private writable
address space (tensors, the heap, the stacks of new threads), whether touched or not.

The limit counts memory in use. glibc keeps freed blocks, so resident memory can be twice that; without them, each block
would be mapped and cleared anew. So blocks are given back at once only while something is measured, and resident memory
is then what is in use (docs/dev/architecture.md has the numbers).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import mmap
import os
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from autoaccum._memory import _linux
from autoaccum._memory.base import MemoryBackend
from autoaccum._memory.limits import format_bytes
from autoaccum._oom import first_line, is_oom
from autoaccum._records import MemoryReading
from autoaccum._system import signals
from autoaccum.errors import DeviceLostError, InvalidInputError

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Callable, Iterator

# How long a reading of the machine's free memory is reused: one takes 0.2 ms, which matters for short micro-batches.
_FREE_BELIEVED_S = 0.1
# Several times the memory needed for checking oneDNN. Not more: it keeps its kernels, megabytes for each size that was
# tried, so little is left where it matters.
_CONVOLUTION_ROOM_BYTES = 2 * 1024 * 1024
# Widths of images to check it with: of one that it knows it has the kernel already.
_PIXELS = itertools.cycle(range(33, 161))
# With less, there is nothing to train: a first convolution alone takes a megabyte.
_LEAST_LIMIT_BYTES = 4 * 1024 * 1024
# A heap that keeps freed blocks takes at most so many times the memory in use (2.7 were seen), or so many bytes more.
# The hard limit is twice that: where oneDNN cannot allocate a kernel, it may end the process with a null pointer.
# One part in `_RESERVE` of what the machine and its control groups leave stays free; without a limit, as much may lie
# free at the heap's end.
_KEPT = 4
_LEAST_BEYOND_BYTES = 256 * 1024 * 1024
_RESERVE = 20
# A measured peak may be above the limit by one part in so many: two windows of the same sizes differ by less.
_TOLERANCE = 32
# The names of glibc's options (malloc.h), the values that glibc begins with and reaches by itself, and the largest.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_FIRST_THRESHOLD_BYTES, _LAST_THRESHOLD_BYTES, _NEVER_BYTES = 128 * 1024, 32 * 1024 * 1024, 2**31 - 1
# Up to which size glibc keeps freed blocks for a thread, and more than it keeps of each (7 by default).
_LAST_CACHED_BYTES, _CACHED_BLOCKS = 1040, 16
# The limit over the largest block that may stay with the heap while something is measured. Larger ones are mappings,
# of which the kernel allows 65,530 to a process.
_BLOCKS_OF_LIMIT = 4096
# A limit that would do is a peak and one part in so many: peaks of a step differ by what the heap keeps.
_ABOVE = 5


class HardLimit:
    """RLIMIT_DATA of the process, lowered within `at` and as before outside it, and for what the process starts."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while a limit is in force
        self._bound: int | None = None
        self._block: object = None  # stands for the block of `at`
        self._is_lifted = False
        self._before = 0
        self._thread = 0, ""
        self._follows_forks = False

    @contextmanager
    def at(self, bound: int, what: str) -> Iterator[None]:
        """Let the process hold at most `bound` bytes of data; a tighter limit that holds anyway stays.

        Args:
            bound: In bytes, as VmData counts.
            what: Names the limit in the message.

        Raises:
            InvalidInputError: Another limit is in force in this process.
        """
        if not self._lock.acquire(blocking=False):
            raise InvalidInputError(
                f"{what} cannot be set: RLIMIT_DATA applies to the whole process, and the thread {self._thread[1]!r} "
                "already has a limit; run one after the other, or each in a process of its own"
            )
        try:
            if not self._follows_forks:
                os.register_at_fork(after_in_child=self._forget)
                self._follows_forks = True
            self._thread, self._is_lifted = (threading.get_ident(), threading.current_thread().name), False
            self._before = resource.getrlimit(resource.RLIMIT_DATA)[0]
            self._bound, self._block = bound, object()
            _set_soft(bound, self._before)
            yield
        finally:
            with signals.deferred():
                self._block = None
                if self._bound is not None:
                    self._bound = None
                    _set_soft(self._before)
                self._lock.release()

    def raise_to(self, bound: int) -> None:
        """Let the process hold `bound` bytes, if this thread has a limit below that."""
        if self._bound is not None and self._bound < bound and self._thread[0] == threading.get_ident():
            self._bound = bound
            _set_soft(bound, self._before)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Suspend the limit, if this thread has one."""
        block = self._block
        if self._bound is None or self._is_lifted or self._thread[0] != threading.get_ident():
            yield
            return
        try:
            self._is_lifted = True
            _set_soft(self._before)
            yield
        finally:
            # An interrupt at its very exit makes this run only when the generator is freed, long after the limit's end.
            if self._block is block and self._bound is not None:
                self._is_lifted = False
                _set_soft(self._bound, self._before)

    def _forget(self) -> None:
        """Give a forked child, which does not train, what its parent had before."""
        if self._bound is not None:
            self._bound, self._block = None, None
            _set_soft(self._before)
        # The thread that holds it may not exist in the child.
        self._lock = threading.Lock()


def _set_soft(*bounds: int) -> None:
    """Set the soft limit to the least of these and the hard one, which stays: a user may have lowered it meanwhile."""
    now, hard = resource.getrlimit(resource.RLIMIT_DATA)
    finite = [bound for bound in (*bounds, hard) if bound != resource.RLIM_INFINITY]
    soft = min(finite, default=resource.RLIM_INFINITY)
    if soft != now:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


_hard_limit = HardLimit()


class Host(MemoryBackend):
    """The memory of the machine that this process may use.

    Use is counted from when `counted` was last entered, or else from when the backend was created: a limit of 2 GiB
    means 2 GiB in addition to what the process held then.
    """

    fails_cleanly = False
    is_host = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "host memory"
        self._machine_free_bytes = 0
        self._machine_asked_s = -1.0
        self._peak_counted = False
        self._gives_back: bool | None = None  # whether freed blocks leave the process at once; None: as glibc has it
        self._may_keep = True  # whether they need not while nothing is measured
        self._room_bytes: int | None = None  # that limits of the process have left, if no other is asked for
        self._highest_bytes = 0  # of all peaks that were read
        self._hard_bytes = 0
        self._granted_bytes = 0  # that were there for the optimizer's step once the heap had given back what is free
        self._held_then = _anonymous()
        self._data_then: int | None = None  # that batches of the loader took in the first window
        self._data_bytes = 0  # that they take beyond it now

    @property
    def has_own_limit(self) -> bool:  # type: ignore[override]
        """Whether the process has a limit, which counts what the heap keeps."""
        return next(process_limits(), None) is not None

    def reading(self) -> MemoryReading:
        """Return the memory free within the tightest limit of machine, control groups and process.

        What the heap keeps for the next step counts as used: call `trim` first to learn what a step could have.
        """
        machine = psutil.virtual_memory()
        used = max(0, _anonymous() - self._held_then - self._data_bytes)
        groups = [(group.limit_bytes, group.used_bytes) for group in _linux.group_limits()]
        frees = [machine.available, *(limit - taken for limit, taken in groups)]
        frees += [limit - held for _, limit, held in process_limits()]
        if self.limit_bytes is not None:
            frees.append(self.limit_bytes - used)
        return MemoryReading(
            total_bytes=min([machine.total, *(limit for limit, _ in groups)]),
            free_bytes=max(0, min(frees)),
            used_bytes=used,
            limit_bytes=self.limit_bytes,
        )

    def others_bytes(self) -> int:
        """Return the memory that other processes hold."""
        machine = psutil.virtual_memory()
        return max(0, int(machine.total - machine.available - psutil.Process().memory_info().rss))

    @contextmanager
    def counted(self, limit_bytes: int | None) -> Iterator[None]:
        """Count a limit from the process's current use.

        Args:
            limit_bytes: The limit, in addition to the current use.

        Raises:
            InvalidInputError: The limit is too small, the process has already reached another one, or the system cannot
                enforce limits.

        glibc's thresholds change for the whole process, also without a limit. Afterwards they are the largest that
        glibc reaches by itself.
        """
        if self.has_own_limit:
            _keep_to_one_arena()
        if limit_bytes is not None:
            self.check_limit(limit_bytes)
            for _, bound, held in process_limits():
                # Checked before the warm-up, which would itself run out of memory.
                if held >= bound:
                    raise self._no_room(limit_bytes, held, bound)
            with signals.deferred():
                _warm_up()
        self.release()
        self._held_then, self._granted_bytes, self._data_then, self._data_bytes = _anonymous(), 0, None, 0
        self._highest_bytes = 0
        self.reset_peak()
        rooms = [max(0, bound - held) for _, bound, held in process_limits()]
        if limit_bytes is not None:
            free = _machine_free()
            room = free - free // _RESERVE
            self._hard_bytes = _data_bytes() + min(2 * _heap_of(limit_bytes), room)
            self._may_keep = _heap_of(limit_bytes) <= min([room, *rooms])
        elif rooms:
            self._room_bytes = min(rooms)
            self._give_back(True, self._room_bytes)
        else:
            # A convolutional net takes 1.6 times as long if the heap's end is given back in each micro-batch.
            self._gives_back = False
            _set_thresholds(_LAST_THRESHOLD_BYTES, min(_NEVER_BYTES, _machine_free() // _RESERVE))
        try:
            yield
        finally:
            self._room_bytes, self._may_keep = None, True
            if self._gives_back is not None:
                self._gives_back = None
                _set_thresholds(_LAST_THRESHOLD_BYTES, 2 * _LAST_THRESHOLD_BYTES)
                self.trim()

    @contextmanager
    def _in_force(self, limit_bytes: int | None) -> Iterator[None]:
        if limit_bytes is None:
            yield
            return
        others = [bound for name, bound, _ in process_limits() if name == "RLIMIT_DATA"]
        with _hard_limit.at(self._hard_bytes, f"a limit of {format_bytes(limit_bytes)} on the {self.name}"):
            self.limit_bytes = min([limit_bytes, *(max(0, bound - _data_bytes()) for bound in others)])
            self.is_soft = True
            if not self._may_keep:
                self._give_back(True, limit_bytes)
            try:
                yield
            finally:
                self.is_soft = False
                if self._gives_back:
                    self._give_back(False, limit_bytes)

    def lifted(self) -> contextlib.AbstractContextManager[None]:
        """Suspend the hard limit of this thread, including that of another backend."""
        return _hard_limit.lifted()

    def reset_peak(self) -> None:
        """Reset the kernel's high-water mark; under a limit, measure exactly until `stop_measuring`."""
        if self.is_soft and self.limit_bytes is not None:
            self._give_back(True, self.limit_bytes)
        self.trim()  # in free blocks that the heap has kept, nothing would be measured
        self._peak_counted = _linux.reset_high_water()

    def stop_measuring(self) -> None:
        """Let the heap keep freed blocks, if the machine and limits of the process have room for them."""
        if self._room_bytes is not None:
            if self._gives_back and self._may_keep:
                self._may_keep = self._highest_bytes > 0 and _heap_of(self._highest_bytes) <= self._room_bytes
                self._give_back(not self._may_keep, self._room_bytes)
        elif self.is_soft:
            self._peak_counted = False
            if self._may_keep and self._gives_back and self.limit_bytes is not None:
                self._give_back(False, self.limit_bytes)

    def peak_bytes(self) -> int | None:
        """Return the highest use since `reset_peak`; None if nothing is measured or the kernel resets no mark.

        File pages are excluded: a first convolution loads megabytes of code.
        """
        counted = _linux.status_bytes("VmHWM", "RssFile", "RssShmem") if self._peak_counted else None
        if counted is None:
            return None
        high, of_files, shared = counted
        peak = max(0, high - of_files - shared - self._held_then - self._data_bytes)
        self._highest_bytes = max(self._highest_bytes, peak)
        return peak

    def exclude_loader_batches(self, data_bytes: int) -> None:
        """Count no batch of the loader beyond those of the first window, which was drawn before `counted`."""
        self._data_then = data_bytes if self._data_then is None else self._data_then
        self._data_bytes = max(0, data_bytes - self._data_then)
        if self._data_bytes:
            free = _machine_free()
            room = _data_bytes() + free - free // _RESERVE
            _hard_limit.raise_to(min(self._hard_bytes + self._data_bytes, room))

    def describe_overrun(self, peak_bytes: int | None) -> str | None:
        """Return in words by how much a peak is above the limit in force, and which limit would do."""
        if not self.is_soft or peak_bytes is None or self.limit_bytes is None:
            return None
        if peak_bytes <= self.limit_bytes + self.limit_bytes // _TOLERANCE:
            return None
        would_do = format_bytes(peak_bytes + peak_bytes // _ABOVE)
        return f"it took {format_bytes(peak_bytes)} of {format_bytes(self.limit_bytes)}; {would_do} would do"

    def release(self) -> None:
        """Collect cycles and return free pages of the heap to the kernel.

        Under a limit it also checks that oneDNN still works. oneDNN generates its kernels with Xbyak, which keeps a
        thread's first error in a variable that is never cleared: after one failed mapping, all such kernels fail in
        this thread, however much memory is free. Unchecked, it would look as if no size of the model fitted.

        Raises:
            DeviceLostError: oneDNN no longer works in this thread.
        """
        gc.collect()
        if self._room_bytes is not None:
            self._may_keep &= self._gives_back is not False  # what is kept has left too little
            self._give_back(True, self._room_bytes)
        if self.has_own_limit:
            _empty_thread_cache()
        self.trim()
        if next(process_limits(), None) is not None and _can_map(_CONVOLUTION_ROOM_BYTES):
            self._check_onednn()

    def trim(self) -> None:
        """Return free pages of the heap to the kernel, and under a limit of the process what MKL keeps."""
        if self._room_bytes is not None:
            _free_mkl_buffers()()
        libc = _libc()
        if libc is not None:
            libc.malloc_trim(0)

    def ensure(self, extra_bytes: int) -> None:
        """Raise `torch.OutOfMemoryError` if the machine or a hard limit does not have `extra_bytes` more.

        The address space is mapped and unmapped untouched, which is exact for limits of the process and takes
        microseconds. The free memory of the machine and the control groups is read at most ten times a second. The soft
        limit is not asked: what the heap keeps counts as used, and is there for the next step.
        """
        if extra_bytes <= 0:
            return
        if not _can_map(extra_bytes):
            raise self._out_of_memory(extra_bytes, self.reading().free_bytes)
        now_s = time.monotonic()
        if extra_bytes > self._machine_free_bytes or now_s - self._machine_asked_s > _FREE_BELIEVED_S:
            # An old reading may admit a step but never rejects one, nor does one before the heap has given back.
            self._machine_free_bytes, self._machine_asked_s = _machine_free(), now_s
            if extra_bytes > self._machine_free_bytes:
                self.trim()
                self._machine_free_bytes = _machine_free()
                if extra_bytes > self._machine_free_bytes:
                    raise self._out_of_memory(extra_bytes, self._machine_free_bytes)

    def reserve(self, extra_bytes: int) -> None:
        """Ensure that `extra_bytes` are there also within the soft limit, for work that nothing makes smaller."""
        self.ensure(extra_bytes)
        if self.is_soft and extra_bytes > self._granted_bytes:
            self.trim()
            free = self.reading().free_bytes
            if extra_bytes > free:
                raise self._out_of_memory(extra_bytes, free)
            self._granted_bytes = extra_bytes

    def total_for_fraction(self) -> int:
        """Return the memory of the machine, or the tightest limit of its control groups."""
        return self.reading().total_bytes

    def _give_back(self, gives_back: bool, limit_bytes: int) -> None:
        """Let freed blocks leave the process at once, or let the heap keep them all, however many are at its end.

        A step that gets them anew has the kernel clear them: 160 MiB in each of the tutorial's.
        """
        if gives_back is self._gives_back:
            return
        self._gives_back = gives_back
        if gives_back:
            threshold = max(limit_bytes // _BLOCKS_OF_LIMIT, _FIRST_THRESHOLD_BYTES)
            threshold = min(threshold, _LAST_THRESHOLD_BYTES)
            _set_thresholds(threshold, 2 * threshold)
        else:
            _set_thresholds(_LAST_THRESHOLD_BYTES, _NEVER_BYTES)

    def _check_onednn(self) -> None:
        try:
            with _plain_mode(), torch.no_grad():
                _convolved(8, next(_PIXELS))
        except RuntimeError as error:
            if not is_oom(error):
                raise
            raise DeviceLostError(
                f"oneDNN can no longer compute in this thread ({first_line(error)!r} although memory is free), because "
                "it hit the limit of the process; continue in a new process (or thread), "
                "and start there with smaller micro-batches"
            ) from error

    def check_limit(self, limit_bytes: int) -> None:
        """Reject a limit that is too small for native code or that this system cannot enforce."""
        if limit_bytes < _LEAST_LIMIT_BYTES:
            raise InvalidInputError(
                f"memory_limit: a limit of {format_bytes(limit_bytes)} on the {self.name} leaves no memory to train "
                f"in, since native code needs scratch memory; give at least {format_bytes(_LEAST_LIMIT_BYTES)}"
            )
        if resource is None or _linux.status_bytes("VmData") is None:
            raise InvalidInputError(
                f"memory_limit: a limit of {format_bytes(limit_bytes)} cannot be enforced here: host memory limits "
                "require Linux (RLIMIT_DATA, /proc/self/status); leave memory_limit out, and choose the micro-batch "
                "size yourself"
            )

    def _no_room(self, limit_bytes: int, held: int, bound: int) -> InvalidInputError:
        return InvalidInputError(
            f"memory_limit: a limit of {format_bytes(limit_bytes)} on the {self.name} leaves no memory: this process "
            f"already holds {format_bytes(held)} of the {format_bytes(bound)} that its resource limits allow; "
            "raise them (ulimit -d, ulimit -v)"
        )

    def _out_of_memory(self, wanted: int, free: int) -> torch.OutOfMemoryError:
        allowed = "" if self.limit_bytes is None else f" of the limit of {format_bytes(self.limit_bytes)}"
        return torch.OutOfMemoryError(
            f"{self.name} would run out: {format_bytes(wanted)} are needed and {format_bytes(free)}{allowed} are free."
        )


def _heap_of(used_bytes: int) -> int:
    """Return how much the heap may take for memory in use if it keeps freed blocks."""
    return max(_KEPT * used_bytes, used_bytes + _LEAST_BEYOND_BYTES)


def _set_thresholds(mapped_bytes: int, trimmed_bytes: int) -> None:
    """Set from which size on a block is a mapping of its own, and how much may be free at the heap's end."""
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_MMAP_THRESHOLD, mapped_bytes)
        libc.mallopt(_M_TRIM_THRESHOLD, trimmed_bytes)


def _keep_to_one_arena() -> None:
    """Keep malloc to the first arena until the process ends, since glibc does not take it back.

    Where an allocation fails, glibc moves the thread to another arena. Memory that is freed there still counts towards
    limits of the process, so each failure would leave less room.
    """
    libc = _libc()
    if libc is not None:
        libc.mallopt(_M_ARENA_MAX, 1)


def _empty_thread_cache() -> None:
    """Have glibc free the small blocks that it keeps for this thread, of which each counts as used.

    One of them at the heap's end, where the last allocations before a failure lie, keeps all that is free below it. So
    all are taken, with as many more, which fill the cache in their place when they are freed first. Those lie lower,
    in what is free. Other threads keep theirs.
    """
    libc = _libc()
    if libc is None:
        return
    for size in range(24, _LAST_CACHED_BYTES, 16):
        blocks = [libc.malloc(size) for _ in range(2 * _CACHED_BLOCKS)]
        for block in reversed(blocks):
            libc.free(ctypes.c_void_p(block))


def _anonymous() -> int:
    """Return the resident memory without file pages, or all of it if the system does not tell them apart."""
    anonymous = _linux.status_bytes("RssAnon")
    return int(psutil.Process().memory_info().rss) if anonymous is None else anonymous[0]


def _data_bytes() -> int:
    """Return what RLIMIT_DATA counts; 0 if the system does not report it."""
    data = _linux.status_bytes("VmData")
    return 0 if data is None else data[0]


def process_limits() -> Iterator[tuple[str, int, int]]:
    """Yield the name, the limit and the use of every resource limit in force on this process."""
    sizes = _linux.status_bytes("VmData", "VmSize")
    if resource is None or sizes is None:
        return
    for name, held in zip(("RLIMIT_DATA", "RLIMIT_AS"), sizes, strict=True):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            yield name, soft, held


def _machine_free() -> int:
    """Return the free memory of the machine and the control groups of this process."""
    groups = (group.limit_bytes - group.used_bytes for group in _linux.group_limits())
    return max(0, min([int(psutil.virtual_memory().available), *groups]))


def _can_map(n_bytes: int) -> bool:
    if resource is None:
        return True
    try:
        mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, OverflowError):
        return False
    return True


def _warm_up() -> None:
    """Start all threads and load all libraries that a training step uses, without drawing random numbers.

    Each thread's stack counts towards the limit, and libgomp ends the process if it cannot start a thread.
    """
    with _plain_mode():
        square = torch.ones(512, 512, dtype=torch.float32, device="cpu", requires_grad=True)
        torch.autograd.backward(_convolved(32, 32).exp().sum() + (square @ square).sum())


@contextmanager
def _plain_mode() -> Iterator[None]:
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        yield


def _convolved(rows: int, columns: int) -> torch.Tensor:
    """Return a convolution of images of a size; takes some milliseconds, forward 0.5 MiB for a oneDNN kernel."""
    ones = functools.partial(torch.ones, dtype=torch.float32, device="cpu", requires_grad=True)
    images, kernels = ones(2 * torch.get_num_threads(), 8, rows, columns), ones(16, 8, 3, 3)
    return torch.nn.functional.conv2d(images, kernels)


@functools.cache
def _free_mkl_buffers() -> Callable[[], object]:
    """Return what frees MKL's unused buffers, which stay with each thread, and grow with each failure if it has two."""
    try:
        return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).mkl_serv_free_buffers
    except (OSError, AttributeError):  # a torch without MKL
        return int


@functools.cache
def _libc() -> ctypes.CDLL | None:
    """Return glibc; None where the C library is another."""
    library = ctypes.CDLL(None) if resource is not None else None
    if library is None or not hasattr(library, "malloc_trim"):
        return None
    library.malloc.restype = ctypes.c_void_p
    return library
