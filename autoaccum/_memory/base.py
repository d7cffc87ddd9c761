"""The interface of every memory backend.

`_memory/cuda.py`, `host.py`, `accelerator.py` and `simulated.py` implement it, and all pass the same contract tests
(tests/memory/test_base.py). A backend never touches a model and never catches an out-of-memory error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    import torch

    from autoaccum._records import MemoryReading, Neighbour


class MemoryBackend(ABC):
    """The memory of one device, as seen by this process.

    "Used" always means as counted by the limit. On a GPU that is the memory held by this process's allocator; on the
    host, what the process allocated since the limit was entered.

    Attributes:
        device: The device of tensors.
        name: A readable name, such as "NVIDIA H200" or "host memory".
        fails_cleanly: Whether a failing allocation always raises. If native code may crash instead, sizes that are not
            known to fit are checked first (`ensure`) or approached from below.
        is_host: Whether the memory is that of the host.
        has_own_limit: Whether even a limit of None enforces something: a capacity that no allocator knows of.
        is_limited: Whether a limit is in force now.
        limit_bytes: That limit; None without one.
        is_soft: Whether it is one that allocations may exceed: peaks are compared with it (`describe_overrun`), and
            `reset_peak` is called before each window that is to be measured, `stop_measuring` before each other one.
    """

    fails_cleanly: bool = True
    is_host: bool = False
    has_own_limit: bool = False
    is_limited: bool = False
    limit_bytes: int | None = None
    is_soft: bool = False

    device: torch.device
    name: str

    @abstractmethod
    def reading(self) -> MemoryReading:
        """Return current values; cheap enough for every window, not for every micro-batch."""

    def check_limit(self, limit_bytes: int) -> None:  # noqa: B027 - most devices take any limit
        """Reject a limit that `limited` would reject, before anything is changed.

        Raises:
            InvalidInputError: The limit cannot be enforced.
        """

    @contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[None]:
        """Limit this process to `limit_bytes` on entry and restore the previous state on exit.

        Allocations beyond the limit, or far beyond a soft one, raise an exception that `is_oom` recognises. None sets
        none. Contexts of one backend do not nest.

        Raises:
            InvalidInputError: On entry: the limit is not positive, is below what the process already holds, or cannot
                be enforced on this system; or another context of this backend is still open.
        """
        self._refuse_nesting()
        with self.counted(limit_bytes), self.enforced(limit_bytes):
            yield

    @abstractmethod
    def counted(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        """Prepare for a limit, and count from now on what it will apply to; reject nothing yet.

        Args:
            limit_bytes: As for `limited`.

        Raises:
            InvalidInputError: On entry, as for `limited`.
        """

    @contextmanager
    def enforced(self, limit_bytes: int | None) -> Iterator[None]:
        """Enforce a limit within `counted`; can be entered again and again, and what was counted so far stays counted.

        Args:
            limit_bytes: As for `counted`.

        Raises:
            InvalidInputError: On entry: another limit of this backend is in force.
        """
        self._refuse_nesting()
        self.is_limited, self.limit_bytes = True, limit_bytes
        try:
            with self._in_force(limit_bytes):
                yield
        finally:
            self.is_limited, self.limit_bytes = False, None

    @abstractmethod
    def _in_force(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        """Enforce a limit, as `enforced` has checked that none is in force."""

    def _refuse_nesting(self) -> None:
        if self.is_limited:
            raise InvalidInputError(f"the {self.name} is already limited; exit that context first")

    def lifted(self) -> AbstractContextManager[None]:
        """Suspend the limit for work outside the step: files, loaders, callbacks and processes that they start.

        A process inherits the limit in force when it is started. Does nothing if limits are not inherited (one of this
        process's allocator), or none is in force.
        """
        return nullcontext()

    def elsewhere(self) -> AbstractContextManager[None]:
        """Exempt CPU tensors that are not the device's, which only a simulated device would count."""
        return nullcontext()

    @abstractmethod
    def reset_peak(self) -> None:
        """Reset the peak to the current use."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Return the highest use since `reset_peak`, as counted by the limit; None if the system does not count it."""

    def peak_in_use_bytes(self) -> int | None:
        """Return the same without what an allocator has cached: of tensors alone, as work needs it again."""
        return self.peak_bytes()

    def stop_measuring(self) -> None:  # noqa: B027 - most devices count peaks at no cost
        """Do without peaks until the next `reset_peak`, if counting them costs time."""

    def exclude_loader_batches(self, data_bytes: int) -> None:  # noqa: B027 - most devices have no such limit
        """Leave what batches of the loader take beyond those of the first call of this out of a soft limit.

        A loader's batch may be larger than the limit, and a window may take from two of them.
        """

    def describe_overrun(self, peak_bytes: int | None) -> str | None:  # noqa: ARG002 - most devices have no such limit
        """Return in words by how much a peak is above a soft limit; None if it is not, or there is none."""
        return None

    @abstractmethod
    def release(self) -> None:
        """Return freed memory to the device, so that the next attempt has as much memory as a fresh process.

        Call it after the handler of an out-of-memory error has ended: inside, the traceback still pins the activations.
        """

    def trim(self) -> None:  # noqa: B027 - nothing to do if freed memory is available at once
        """Return freed memory without collecting cycles, so that the next peak is that of its step."""

    def ensure(self, extra_bytes: int) -> None:  # noqa: B027 - most allocators fail cleanly
        """Raise `torch.OutOfMemoryError` if an allocation of `extra_bytes` more would fail.

        Does nothing if the allocator itself fails cleanly (CUDA). On the host, native code can crash when an allocation
        fails inside it, so memory is checked first.
        """

    def reserve(self, extra_bytes: int) -> None:
        """Ensure that `extra_bytes` are available to the code that runs next, or raise `torch.OutOfMemoryError`.

        For work that must not fail once started. An allocator with a cache then holds them for this process; otherwise
        this is `ensure`.
        """
        self.ensure(extra_bytes)

    def secure(self, extra_bytes: int) -> None:
        """Have `extra_bytes` in any pieces for the code that runs next, or raise `torch.OutOfMemoryError`.

        As `reserve`, but what the allocator's cache holds already counts, so that repeated calls take no more.
        """
        self.ensure(extra_bytes)

    def others_bytes(self) -> int | None:
        """Return the memory of the device that other processes hold; None if unknown."""
        return None

    def neighbours(self) -> Sequence[Neighbour]:
        """Return the other processes known to use memory of the device, the largest first."""
        return ()

    def alloc_retries(self) -> int:
        """Return how often the allocator had to flush its cache to continue; 0 if the device does not count it.

        When this rises, memory is about to run out.
        """
        return 0

    def synchronize(self) -> None:  # noqa: B027 - on the host, operations are complete when they return
        """Wait until the device has done all that was submitted."""

    @abstractmethod
    def total_for_fraction(self) -> int:
        """Return the total in bytes that a `memory_limit` between 0 and 1 is a fraction of."""
