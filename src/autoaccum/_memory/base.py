"""The interface of every memory backend.

`_memory/cuda.py`, `host.py`, `accelerator.py` and `simulated.py` implement it, and all pass the same contract tests
(tests/memory/test_base.py). A backend never touches a model and never catches an out-of-memory error.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    import torch

    from autoaccum._records import MemoryReading, Neighbour


class MemoryBackend(ABC):
    """Memory of one device, as this process sees it.

    "Used" always means: in the terms in which the limit counts. On a card that is what this process's allocator holds
    of the whole device; on the host, what the process took beyond what it held when the limit began.

    Attributes:
        device: Where tensors are allocated.
        name: A readable name, such as "NVIDIA H200" or "host memory".
        fails_cleanly: Whether a failing allocation always raises. Where native code may crash instead, sizes that are
            not known to fit are checked first (`ensure`) or approached from below.
        is_host: Whether its memory is that of the host.
    """

    fails_cleanly: bool = True
    is_host: bool = False

    device: torch.device
    name: str

    @abstractmethod
    def reading(self) -> MemoryReading:
        """Return what there is now; cheap enough for once a window, not for once a micro-batch."""

    def check_limit(self, limit_bytes: int) -> None:  # noqa: B027 - most devices take any limit
        """Refuse a limit that `limited` would refuse, before anything is changed.

        Raises:
            InvalidInputError: The limit cannot be enforced.
        """

    @abstractmethod
    def limited(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        """Hold this process to `limit_bytes` on entry and restore the previous state on exit.

        Allocations beyond the limit raise an exception that `is_oom` recognises. None sets no limit, but prepares the
        device all the same. Contexts of one backend do not nest.

        Raises:
            InvalidInputError: On entry: the limit is not positive, is below what the process already holds, or cannot
                be enforced on this system.
        """

    @abstractmethod
    def lifted(self) -> AbstractContextManager[None]:
        """Suspend the limit for work outside the step: files, loaders, callbacks, and the processes that they start.

        A process inherits the limit that holds when it is started. Does nothing where a limit is not inherited, or
        none is in force.
        """

    def elsewhere(self) -> AbstractContextManager[None]:
        """Exempt CPU tensors that are not the device's; only a simulated device would count them."""
        return nullcontext()

    @abstractmethod
    def reset_peak(self) -> None:
        """Restart the peak from what is held now."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Return the highest use since `reset_peak`, in the limit's terms; None where the system does not count it."""

    @abstractmethod
    def release(self) -> None:
        """Give freed memory back to the device, so that the next attempt finds the memory of a fresh process.

        Call it after the handler of an out-of-memory error has ended: inside, the traceback still pins the activations.
        """

    def trim(self) -> None:  # noqa: B027 - nothing to do where what was freed is free at once
        """Give freed memory back without collecting cycles, so that the next peak is that of its step."""

    @abstractmethod
    def ensure(self, extra_bytes: int) -> None:
        """Raise `torch.OutOfMemoryError` now if `extra_bytes` more are not available; else do nothing.

        Where the allocator itself fails cleanly (CUDA) this does nothing. On the host, native code can crash when an
        allocation fails inside it, so it is asked first.
        """

    def reserve(self, extra_bytes: int) -> None:
        """Make sure that `extra_bytes` are available to what runs next, or raise `torch.OutOfMemoryError`.

        For work that must not fail once it has begun. An allocator with a cache then holds them for this process;
        elsewhere this is `ensure`.
        """
        self.ensure(extra_bytes)

    def neighbours(self) -> Sequence[Neighbour]:
        """Return the other processes that hold memory of the device, as far as known, those that hold most first."""
        return ()

    def alloc_retries(self) -> int:
        """Return how often the allocator had to flush its cache to go on; 0 where the device does not count it.

        When this rises, memory is about to run out.
        """
        return 0

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was submitted."""

    @abstractmethod
    def total_for_fraction(self) -> int:
        """Return the bytes of which a `memory_limit` between 0 and 1 is a fraction."""
