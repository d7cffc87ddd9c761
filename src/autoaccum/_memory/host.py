"""The host's memory: a real limit on this process, and what there is without one.

On a CPU the kernel promises more memory than it has and kills the process that takes the promise at its word.
So that memory runs out as an exception, the limit is the process's own: RLIMIT_DATA, set to what VmData is
today plus the limit. It counts address space that is private and writable (tensors, the heap, the stacks of
new threads), whether touched or not. Peaks are resident memory, because that is the only high-water mark that
the kernel keeps and resets; the two differ by what was taken and never touched.

Native code can die when an allocation fails inside it. So the limit is a net, and `ensure`, asked before each
step, is what keeps the process off it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import time
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
    from collections.abc import Iterator

# How long what the machine has free is believed: asking takes 0.2 ms, which a short micro-step would notice.
_FREE_BELIEVED_S = 0.1
# Several times what the question whether oneDNN works takes.
_CONVOLUTION_ROOM_BYTES = 16 * 1024 * 1024
# Kernels take scratch memory of their own and die where they do not get it: seen under 700 KiB, not from 800 KiB on
# (examples/document002.py).
_LEAST_LIMIT_BYTES = 4 * 1024 * 1024
_ONEDNN_CACHE = "ONEDNN_PRIMITIVE_CACHE_CAPACITY"


class Host(MemoryBackend):
    """The memory of the machine, as this process may use it.

    Use counts from when `limited` was last entered, and before that from when the backend was made: a limit
    of 2 GiB is 2 GiB beyond what the process held then.

    While a limit is in force glibc's allocator is settled so that what is freed leaves the process; every
    step then asks the kernel for its pages anew, and takes longer by what benchmarks/host_limit.py measures
    (there 1.5 to 1.8 times, on two busy cores; less for larger steps). Put back on exit: the limit itself.
    Not as it was: glibc's thresholds, which cannot be read, get the values that they usually reach; oneDNN's
    cache of primitives stays at one entry for the life of the process, if no primitive had run before the
    limit began; threads that were started stay.
    """

    fails_cleanly = False
    is_host = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.name = "host memory"
        self._limit_bytes: int | None = None
        self._entered = False
        self._machine_free_bytes = 0
        self._machine_asked_s = -1.0
        self._peak_counted = False
        self._data_then, _ = _held()
        self._anonymous_then = _anonymous()

    def reading(self) -> MemoryReading:
        """Return what is free by the tightest of: machine, control groups, limits of the process."""
        machine = psutil.virtual_memory()
        data, resident = _held()
        groups = [(group.limit_bytes, group.used_bytes) for group in _linux.group_limits()]
        frees = [machine.available, *(limit - used for limit, used in [*groups, *_process_limits()])]
        return MemoryReading(
            total_bytes=min([machine.total, *(limit for limit, _ in groups)]),
            free_bytes=max(0, min(frees)),
            used_bytes=max(0, data - self._data_then),
            others_bytes=max(0, machine.total - machine.available - resident),
            limit_bytes=self._limit_bytes,
        )

    @contextlib.contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[None]:
        """Hold the process to what it holds now plus `limit_bytes`.

        Args:
            limit_bytes: The limit, beyond what is held now; a tighter one that holds anyway stays in force.

        Raises:
            InvalidInputError: The limit is not positive, the process already reached one that holds anyway, the system
                cannot enforce one, another thread is limited, or another context of this backend is still open.
        """
        if self._entered:
            raise InvalidInputError(f"the {self.name} is already limited; leave that context first")
        if limit_bytes is not None:
            self.check_limit(limit_bytes)
        self._entered = True
        try:
            with self._enforced(limit_bytes):
                yield
        finally:
            self._entered = False

    def lifted(self) -> contextlib.AbstractContextManager[None]:
        """Suspend the limits of this thread, those of other backends included, for what is not to be held to them."""
        return owner.lifted()

    def reset_peak(self) -> None:
        """Let the kernel count the peak anew."""
        self._peak_counted = _linux.reset_high_water()

    def peak_bytes(self) -> int | None:
        """Return the highest resident memory since `reset_peak`, beyond that at the beginning.

        Pages of files are left out: a first convolution reads megabytes of code, which no limit counts. None
        where the kernel does not let a process reset its high-water mark.
        """
        counted = _linux.status_bytes("VmHWM", "RssFile", "RssShmem") if self._peak_counted else None
        if counted is None:
            return None
        high, of_files, shared = counted
        return max(0, high - of_files - shared - self._anonymous_then)

    def release(self) -> None:
        """Collect cycles and give the free pages of the heap back to the kernel.

        Under a limit it also asks whether oneDNN survived, beyond that limit. oneDNN makes code for the kernels of each
        shape by Xbyak, which keeps the first error of a thread for good, in a variable that nobody clears: one mapping
        for code that failed, and every such kernel is refused in this thread from then on, however much is free.
        Without the question that would look like a model of which no size fits. Steps that `ensure` let through did
        not meet this; how often others do: benchmarks/host_limit.py.

        Raises:
            DeviceLostError: oneDNN no longer works in this thread.
        """
        gc.collect()
        self.trim()
        if self._limit_bytes is not None:
            with self.lifted():
                if _can_map(_CONVOLUTION_ROOM_BYTES):  # there may be limits that are not this package's
                    self._check_onednn()

    def trim(self) -> None:
        """Give back the free pages of the heap and, without a limit, what matrix products keep for the next one.

        Under a limit those buffers are held from before it began: a product that could not have one would have other
        bits.
        """
        if not _is_bounded():
            _mkl.free_buffers()
        _glibc.trim()

    def ensure(self, extra_bytes: int) -> None:
        """Raise `torch.OutOfMemoryError` if `extra_bytes` more could not be had.

        Under a limit that much address space is mapped and let go again untouched, which is exact and takes
        some microseconds. What the machine and the control groups have free is asked at most ten times a
        second.

        Args:
            extra_bytes: Memory about to be needed at once.

        Raises:
            torch.OutOfMemoryError: It could not be had.
        """
        if extra_bytes <= 0:
            return
        if not _can_map(extra_bytes):
            reading = self.reading()
            raise self._out_of_memory(extra_bytes, reading.free_bytes, reading.limit_bytes)
        now_s = time.monotonic()
        if extra_bytes > self._machine_free_bytes or now_s - self._machine_asked_s > _FREE_BELIEVED_S:
            # An old answer may let a step through but never refuses one.
            self._machine_free_bytes, self._machine_asked_s = _machine_free(), now_s
            if extra_bytes > self._machine_free_bytes:
                raise self._out_of_memory(extra_bytes, self._machine_free_bytes, None)

    def synchronize(self) -> None:
        """Do nothing: operations are done when they return."""

    def total_for_fraction(self) -> int:
        """Return the memory of the machine, or of the tightest control group below it."""
        return self.reading().total_bytes

    @contextlib.contextmanager
    def _enforced(self, limit_bytes: int | None) -> Iterator[None]:
        if limit_bytes is None:
            _warm_up()
            self._begin()
            yield
            return
        hold = owner.hold(f"a limit of {format_bytes(limit_bytes)} on the {self.name}")
        try:
            for bound, held in _process_limits():
                # Asked before the warm-up, which would run out of memory itself.
                if held >= bound:
                    raise self._no_room(limit_bytes, held, bound)
            with signals.held(), _one_primitive_cached():
                _warm_up()
            self._begin()
            held_anyway = owner.tightest()
            bound = self._data_then + limit_bytes
            if held_anyway is not None:
                bound = min(bound, held_anyway)
            if bound <= self._data_then:
                raise self._no_room(limit_bytes, self._data_then, bound)
            hold.lower(bound)
            self._limit_bytes = bound - self._data_then
            yield
        finally:
            self._limit_bytes = None
            hold.release()

    def _check_onednn(self) -> None:
        try:
            _convolve()
        except RuntimeError as error:
            if not is_oom(error):
                raise
            raise DeviceLostError(
                f"oneDNN can no longer compute in this thread ({first_line(error)!r} although memory is free), because "
                f"the limit of {format_bytes(self._limit_bytes or 0)} was met inside it; go on in a new process (or "
                "thread), and start there with a smaller micro_batch"
            ) from error

    def check_limit(self, limit_bytes: int) -> None:
        """Refuse a limit that leaves native code no room, that is reached already or cannot be enforced here."""
        if limit_bytes < _LEAST_LIMIT_BYTES:
            raise InvalidInputError(
                f"memory_limit: a limit of {format_bytes(limit_bytes)} on the {self.name} leaves no memory to train "
                f"in: native code needs room for itself; give at least {format_bytes(_LEAST_LIMIT_BYTES)}"
            )
        if resource is None or _linux.status_bytes("VmData") is None:
            raise InvalidInputError(
                f"memory_limit: a limit of {format_bytes(limit_bytes)} on the {self.name} cannot be enforced here: "
                "that takes Linux (RLIMIT_DATA, /proc/self/status); leave memory_limit out, or set micro_batch"
            )

    def _no_room(self, limit_bytes: int, held: int, bound: int) -> InvalidInputError:
        return InvalidInputError(
            f"memory_limit: a limit of {format_bytes(limit_bytes)} on the {self.name} leaves no memory: this process "
            f"already holds {format_bytes(held)} of the {format_bytes(bound)} that its resource limits allow; "
            "raise them (ulimit -d, ulimit -v), or the memory_limit of the call around this one"
        )

    def _begin(self) -> None:
        # Free pages inside the heap would be used first and seen by neither the limit nor the peak.
        if _is_bounded():
            _mkl.hold_buffers()
        self.release()
        self._data_then, _ = _held()
        self._anonymous_then = _anonymous()
        self.reset_peak()

    def _out_of_memory(self, wanted: int, free: int, limit: int | None) -> torch.OutOfMemoryError:
        allowed = "" if limit is None else f" of the limit of {format_bytes(limit)}"
        return torch.OutOfMemoryError(
            f"{self.name} would run out: {format_bytes(wanted)} are needed and {format_bytes(free)}{allowed} are free."
        )


def _held() -> tuple[int, int]:
    """Return what the limit counts and what is resident; the same number where only that is told."""
    held = _linux.status_bytes("VmData", "VmRSS")
    if held is None:
        resident = psutil.Process().memory_info().rss
        return resident, resident
    return held[0], held[1]


def _anonymous() -> int:
    """Return the resident memory that is no file's; 0 where it is not told, and then no peak is either."""
    told = _linux.status_bytes("RssAnon")
    return 0 if told is None else told[0]


def _process_limits() -> Iterator[tuple[int, int]]:
    """Yield limit and use of every limit on this process that is in force."""
    sizes = _linux.status_bytes("VmData", "VmSize")
    if resource is None or sizes is None:
        return
    for kind, held in zip((resource.RLIMIT_DATA, resource.RLIMIT_AS), sizes, strict=True):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            yield soft, held


def _is_bounded() -> bool:
    """Return whether the process is held to a limit, or about to be."""
    return owner.has_holds or next(_process_limits(), None) is not None


def _machine_free() -> int:
    """Return what the machine and the control groups of this process have free."""
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
    """Start every thread and load every library that a training step will use.

    Each thread takes a stack out of the limit, and libgomp ends the process when it cannot start one. Nothing
    here draws random numbers.
    """
    _convolve()
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        square = torch.ones(512, 512, dtype=torch.float32, device="cpu", requires_grad=True)
        torch.autograd.backward((square @ square).sum())


def _convolve() -> None:
    """Run one convolution forward and backward that makes oneDNN take a scratchpad; some milliseconds."""
    ones = functools.partial(torch.ones, dtype=torch.float32, device="cpu", requires_grad=True)
    with torch.inference_mode(mode=False), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        images, kernels = ones(2 * torch.get_num_threads(), 8, 32, 32), ones(16, 8, 3, 3)
        torch.autograd.backward(torch.nn.functional.conv2d(images, kernels).exp().sum())


@contextlib.contextmanager
def _one_primitive_cached() -> Iterator[None]:
    """Let oneDNN keep one primitive only; it reads this at its first primitive, and never again.

    Each kept primitive holds memory, and each size of micro-batch makes new ones: some 10 to 20 MiB a size.
    """
    if _ONEDNN_CACHE in os.environ:
        yield
        return
    try:
        os.environ[_ONEDNN_CACHE] = "1"
        yield
    finally:
        os.environ.pop(_ONEDNN_CACHE, None)
