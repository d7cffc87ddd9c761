"""The host's memory, with a real limit on this process.

Linux overcommits memory and kills a process that uses too much. To make memory run out with an exception instead,
RLIMIT_DATA is set to the current VmData plus the limit. It counts private writable address space (tensors, the heap,
the stacks of new threads), whether touched or not. Peaks are of resident memory, the only high-water mark that the
kernel keeps and resets; the two differ by memory that was allocated but never touched.

Native code can crash when an allocation fails inside it. The limit is therefore only a safety net, and `ensure`, called
before each step, keeps the process from reaching it.
"""

from __future__ import annotations

import functools
import gc
import mmap
import os
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import torch

from autoaccum._memory import _glibc, _linux, _mkl
from autoaccum._memory._process import owner
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
    from collections.abc import Iterator

# How long a reading of the machine's free memory is reused: one takes 0.2 ms, which matters for short micro-steps.
_FREE_BELIEVED_S = 0.1
# Several times the memory needed for checking oneDNN.
_CONVOLUTION_ROOM_BYTES = 16 * 1024 * 1024
# Kernels allocate scratch memory of their own and crash without it: seen under 700 KiB, not from 800 KiB on
# (examples/document002.py).
_LEAST_LIMIT_BYTES = 4 * 1024 * 1024
_ONEDNN_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


class Host(MemoryBackend):
    """The memory of the machine that this process may use.

    Use counts from when `counted` was last entered, or else from when the backend was created: a limit of 2 GiB means 2
    GiB in addition to what the process held then.

    While a limit is in force or counted for, glibc's allocator returns freed memory to the kernel. Every step then has
    to request its pages again, and takes longer (benchmarks/host_limit.py: 1.5 to 1.8 times on two busy cores, less for
    larger steps). On exit the limit is restored, but not everything else: glibc's thresholds, which cannot be read, get
    the values that they usually reach; oneDNN's primitive cache stays at one entry for the life of the process if no
    primitive had run before; threads that were started remain.
    """

    fails_cleanly = False
    is_host = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "host memory"
        self._limit_bytes: int | None = None
        self._is_counted = False
        self._machine_free_bytes = 0
        self._machine_asked_s = -1.0
        self._peak_counted = False
        self._data_then, _ = _held()
        self._anonymous_then = _anonymous()

    def reading(self) -> MemoryReading:
        """Return the memory free within the tightest limit of machine, control groups and process."""
        machine = psutil.virtual_memory()
        data, resident = _held()
        groups = [(group.limit_bytes, group.used_bytes) for group in _linux.group_limits()]
        frees = [machine.available, *(limit - used for limit, used in groups)]
        frees += [limit - held for _, limit, held in process_limits()]
        return MemoryReading(
            total_bytes=min([machine.total, *(limit for limit, _ in groups)]),
            free_bytes=max(0, min(frees)),
            used_bytes=max(0, data - self._data_then),
            others_bytes=max(0, machine.total - machine.available - resident),
            limit_bytes=self._limit_bytes,
        )

    def prepare_limit(self, limit_bytes: int | None) -> None:
        """Have oneDNN read the setting of its cache before a model does, if there will be a limit."""
        if limit_bytes is not None:
            with signals.held(), _one_primitive_cached():
                _convolve()

    @contextmanager
    def counted(self, limit_bytes: int | None) -> Iterator[None]:
        """Prepare for a limit of the process's current use plus `limit_bytes`.

        Args:
            limit_bytes: The limit, in addition to the current use; a tighter one already in force stays.

        Raises:
            InvalidInputError: The limit is not positive, the process has already reached another one, the system cannot
                enforce limits, another thread is limited, or another context of this backend is still open.
        """
        if self._is_counted:
            raise InvalidInputError(f"the {self.name} is already limited; exit that context first")
        if limit_bytes is not None:
            self.check_limit(limit_bytes)
        self._is_counted = True
        try:
            if limit_bytes is None:
                _warm_up_once()
                self._begin()
                yield
                return
            # Without this, room in the heap that an earlier training left would be used in addition to the limit.
            holes = _glibc.Holes()
            settled: _glibc.Settled | None = None
            try:
                settled = self._prepare(limit_bytes, holes)
                yield
            finally:
                if settled is not None:
                    settled.end()
                holes.free()
        finally:
            self._is_counted = False

    def lifted(self) -> contextlib.AbstractContextManager[None]:
        """Suspend all limits of this thread, including those of other backends."""
        return owner.lifted()

    def reset_peak(self) -> None:
        """Reset the kernel's high-water mark."""
        self._peak_counted = _linux.reset_high_water()

    def peak_bytes(self) -> int | None:
        """Return the highest resident memory since `reset_peak`, minus that at the beginning.

        File pages are excluded: a first convolution loads megabytes of code, which no limit counts. None if the kernel
        does not let a process reset its high-water mark.
        """
        counted = _linux.status_bytes("VmHWM", "RssFile", "RssShmem") if self._peak_counted else None
        if counted is None:
            return None
        high, of_files, shared = counted
        taken = max(0, high - of_files - shared - self._anonymous_then)
        # The buffers of matrix products, which were taken before the limit, may become resident under it.
        return taken if self._limit_bytes is None else min(taken, self._limit_bytes)

    def release(self) -> None:
        """Collect cycles and return free pages of the heap to the kernel.

        Under a limit it also checks, with the limit lifted, that oneDNN still works. oneDNN generates its kernels with
        Xbyak, which keeps a thread's first error in a variable that is never cleared: after one failed mapping, all
        such kernels fail in this thread, however much memory is free. Unchecked, it would look as if no size of the
        model fitted. Steps admitted by `ensure` never caused it; benchmarks/host_limit.py counts how often others do.

        Raises:
            DeviceLostError: oneDNN no longer works in this thread.
        """
        gc.collect()
        self.trim()
        if self._limit_bytes is not None:
            with self.lifted():
                if _can_map(_CONVOLUTION_ROOM_BYTES):  # external limits may remain
                    self._check_onednn()

    def trim(self) -> None:
        """Return free pages of the heap and, without a limit, the buffers of matrix products.

        Under a limit those buffers are allocated in advance and kept: a product that could not get one would have other
        bits.
        """
        if not _is_bounded():
            _mkl.free_buffers()
        _glibc.trim()

    def ensure(self, extra_bytes: int) -> None:
        """Raise `torch.OutOfMemoryError` if `extra_bytes` more are not available.

        The address space is mapped and unmapped untouched, which is exact for limits of the process and takes
        microseconds. The free memory of the machine and the control groups is read at most ten times a second.
        """
        if extra_bytes <= 0:
            return
        if not _can_map(extra_bytes):
            reading = self.reading()
            raise self._out_of_memory(extra_bytes, reading.free_bytes, reading.limit_bytes)
        now_s = time.monotonic()
        if extra_bytes > self._machine_free_bytes or now_s - self._machine_asked_s > _FREE_BELIEVED_S:
            # An old reading may admit a step but never rejects one.
            self._machine_free_bytes, self._machine_asked_s = _machine_free(), now_s
            if extra_bytes > self._machine_free_bytes:
                raise self._out_of_memory(extra_bytes, self._machine_free_bytes, None)

    def synchronize(self) -> None:
        """Do nothing: operations are complete when they return."""

    def total_for_fraction(self) -> int:
        """Return the memory of the machine, or the tightest limit of its control groups."""
        return self.reading().total_bytes

    def _prepare(self, limit_bytes: int, holes: _glibc.Holes) -> _glibc.Settled:
        """Take what a training needs beyond the limit, and check that the limit can be set.

        Returns:
            What keeps the allocator settled between the steps of a loop of the user's own, too: what its optimizer
            keeps and frees in the heap would fragment it, and count in full.
        """
        hold = owner.hold(f"a limit of {format_bytes(limit_bytes)} on the {self.name}")
        try:
            for _, bound, held in process_limits():
                # Checked before the warm-up, which would itself run out of memory.
                if held >= bound:
                    raise self._no_room(limit_bytes, held, bound)
            with signals.held(), _one_primitive_cached():
                _warm_up()
            self._begin(holes)
            bound = self._bound(limit_bytes)
            if bound <= self._data_then:
                raise self._no_room(limit_bytes, self._data_then, bound)
            return _glibc.Settled()
        finally:
            hold.release()

    @contextmanager
    def _in_force(self, limit_bytes: int | None) -> Iterator[None]:
        if limit_bytes is None:
            yield
            return
        hold = owner.hold(f"a limit of {format_bytes(limit_bytes)} on the {self.name}")
        try:
            bound = self._bound(limit_bytes)
            hold.lower(bound)
            self._limit_bytes = bound - self._data_then
            yield
        finally:
            self._limit_bytes = None
            hold.release()

    def _bound(self, limit_bytes: int) -> int:
        """Return the most data that the process may hold under a limit, and any tighter one in force."""
        tightest = owner.tightest()
        bound = self._data_then + limit_bytes
        return bound if tightest is None else min(bound, tightest)

    def _check_onednn(self) -> None:
        try:
            _convolve()
        except RuntimeError as error:
            if not is_oom(error):
                raise
            raise DeviceLostError(
                f"oneDNN can no longer compute in this thread ({first_line(error)!r} although memory is free), because "
                f"it hit the limit of {format_bytes(self._limit_bytes or 0)}; continue in a new process (or thread), "
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
            "raise them (ulimit -d, ulimit -v), or the memory_limit of the call around this one"
        )

    def _begin(self, holes: _glibc.Holes | None = None) -> None:
        # Free pages inside the heap would be used first, without counting towards the limit or the peak.
        if _is_bounded():
            _mkl.hold_buffers()
        self.release()
        if holes is not None:
            with signals.held():  # a block that is not noted yet would never be freed
                holes.take()
        self._data_then, _ = _held()
        self._anonymous_then = _anonymous()
        self.reset_peak()

    def _out_of_memory(self, wanted: int, free: int, limit: int | None) -> torch.OutOfMemoryError:
        allowed = "" if limit is None else f" of the limit of {format_bytes(limit)}"
        return torch.OutOfMemoryError(
            f"{self.name} would run out: {format_bytes(wanted)} are needed and {format_bytes(free)}{allowed} are free."
        )


def _held() -> tuple[int, int]:
    """Return the memory counted by the limit and the resident memory; the latter for both if the former is unknown."""
    held = _linux.status_bytes("VmData", "VmRSS")
    if held is None:
        resident = psutil.Process().memory_info().rss
        return resident, resident
    return held[0], held[1]


def _anonymous() -> int:
    """Return the resident memory without file pages; 0 if the system does not report it, and peaks are None."""
    anonymous = _linux.status_bytes("RssAnon")
    return 0 if anonymous is None else anonymous[0]


def process_limits() -> Iterator[tuple[str, int, int]]:
    """Yield the name, the limit and the use of every resource limit in force on this process."""
    sizes = _linux.status_bytes("VmData", "VmSize")
    if resource is None or sizes is None:
        return
    for name, held in zip(("RLIMIT_DATA", "RLIMIT_AS"), sizes, strict=True):
        soft, _ = resource.getrlimit(getattr(resource, name))
        if soft != resource.RLIM_INFINITY:
            yield name, soft, held


def _is_bounded() -> bool:
    """Whether the process is limited, or about to be."""
    return owner.has_holds or next(process_limits(), None) is not None


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
    _convolve()
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        square = torch.ones(512, 512, dtype=torch.float32, device="cpu", requires_grad=True)
        torch.autograd.backward((square @ square).sum())


class _Warm(threading.local):
    """The process and the number of threads for which this thread was last warmed up."""

    seen = (0, 0)


_warm = _Warm()


def _warm_up_once() -> None:
    """Warm up unless this thread has been: threads stay, and a stack more or less matters only under a limit."""
    now = os.getpid(), torch.get_num_threads()
    if _warm.seen != now or _is_bounded():
        _warm_up()
        _warm.seen = now


def _convolve() -> None:
    """Run a convolution forward and backward, with a oneDNN scratchpad; takes some milliseconds."""
    ones = functools.partial(torch.ones, dtype=torch.float32, device="cpu", requires_grad=True)
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        images, kernels = ones(2 * torch.get_num_threads(), 8, 32, 32), ones(16, 8, 3, 3)
        torch.autograd.backward(torch.nn.functional.conv2d(images, kernels).exp().sum())


@contextmanager
def _one_primitive_cached() -> Iterator[None]:
    """Limit oneDNN's cache to one primitive; it reads the setting only at its first primitive.

    Each cached primitive holds memory, and each micro-batch size creates new ones: 10 to 20 MiB per size.
    """
    if _ONEDNN_CACHE in os.environ:
        yield
        return
    try:
        os.environ[_ONEDNN_CACHE] = "1"
        yield
    finally:
        os.environ.pop(_ONEDNN_CACHE, None)
