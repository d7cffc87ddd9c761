"""What every kind of device must be able to say and do about its memory.

One file a kind implements this (_memory/cuda.py, _memory/host.py, _memory/accelerator.py, _memory/simulated.py) and all
pass the same contract tests (tests/memory/test_base.py). A backend never touches a model and never catches an
out-of-memory error.
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
        device: Where tensors are put.
        name: A person's name for the device, such as "NVIDIA H200" or "host memory".
        fails_cleanly: Whether an allocation that fails always raises. Where native code may die of it, what is not
            known to fit is asked for beforehand (`ensure`) or approached from below.
        is_host: Whether its memory is that of the host.
    """

    fails_cleanly: bool = True
    is_host: bool = False

    device: torch.device
    name: str

    @abstractmethod
    def reading(self) -> MemoryReading:
        """What there is now; cheap enough for once a window, not for once a micro-batch."""

    def check_limit(self, limit_bytes: int) -> None:  # noqa: B027 - most devices take any limit
        """Refuse a limit that `limited` would refuse, before anything is changed.

        Raises:
            InvalidInputError: It cannot be held to.
        """

    @abstractmethod
    def limited(self, limit_bytes: int | None) -> AbstractContextManager[None]:
        """Hold this process to `limit_bytes` on entry and put back what was before on exit.

        Allocations beyond the limit raise an exception that `is_oom` recognises. None sets no limit, but prepares the
        device all the same. Contexts of one backend do not nest.

        Raises:
            InvalidInputError: On entry: the limit is not positive, is below what the process already holds, or cannot
                be enforced on this system.
        """

    @abstractmethod
    def lifted(self) -> AbstractContextManager[None]:
        """Suspend the limit for what is not the step's: files, loaders, callbacks, and the processes that they start.

        A process inherits the limit that holds when it is started. Does nothing where a limit is not inherited, or
        none is in force.
        """

    def elsewhere(self) -> AbstractContextManager[None]:
        """Make tensors on the CPU that are none of the device's: only a simulated one would count them."""
        return nullcontext()

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin to count the peak anew."""

    @abstractmethod
    def peak_bytes(self) -> int | None:
        """Highest use since `reset_peak`, in the limit's terms; None where the system does not count it."""

    @abstractmethod
    def release(self) -> None:
        """Give what was freed back to the device, so that the next attempt meets the memory of a fresh process.

        To be called after the handler of an out-of-memory error has ended: inside it the traceback still pins the
        activations.
        """

    def trim(self) -> None:  # noqa: B027 - nothing to do where what was freed is free at once
        """Give back what is free without looking for cycles, so that the next peak shows what its step took."""

    @abstractmethod
    def ensure(self, extra_bytes: int) -> None:
        """Raise `torch.OutOfMemoryError` now if `extra_bytes` more could not be had, else do nothing.

        Where the allocator itself fails cleanly (CUDA) this does nothing. On the host, native code can crash when an
        allocation fails inside it, so the question is asked before it starts.
        """

    def reserve(self, extra_bytes: int) -> None:
        """Make sure that `extra_bytes` can be had by what runs next, or raise `torch.OutOfMemoryError`.

        For work that must not fail once it has begun. Where an allocator keeps what was freed, this process has them
        from then on; elsewhere it is the question of `ensure`.
        """
        self.ensure(extra_bytes)

    def neighbours(self) -> Sequence[Neighbour]:
        """The other processes that hold memory of the device, those that hold most first, as far as they are told."""
        return ()

    def alloc_retries(self) -> int:
        """How often the allocator had to give back its cache to go on: when this rises, memory is about to run out.

        0 where the device does not count it.
        """
        return 0

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done all that was submitted."""

    @abstractmethod
    def total_for_fraction(self) -> int:
        """The bytes of which a `memory_limit` between 0 and 1 is a fraction."""
