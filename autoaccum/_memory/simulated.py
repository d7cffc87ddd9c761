"""A device of any size, for tests and dry runs, which counts storages exactly and raises the real exception.

Peaks are exact and reproducible, and include the backward pass on the CPU (`_memory/_storages.py` defines what counts).
Memory that kernels allocate and free within one operator is not seen: the device is for experiments and does not
estimate a real one.
"""

from __future__ import annotations

import gc
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from autoaccum._memory._storages import StorageWatch
from autoaccum._memory.available_devices import existing
from autoaccum._memory.base import MemoryBackend
from autoaccum._memory.limits import format_bytes, parse_limit
from autoaccum._records import MemoryReading
from autoaccum._system.attributes import replaced
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Iterator, Mapping


class Simulated(MemoryBackend):
    """A device with a given amount of memory.

    The capacity applies within `fit`, `find_micro_batch`, `preflight` and the steps of a `Runner`, and to storages
    allocated there; those that exist before (the model's parameters, batches that the loader has made) do not count.

    Args:
        capacity: Its memory in bytes, or a size such as "600MiB".
        device: The device that the tensors are actually on. Backward passes are counted only on the CPU.

    Raises:
        InvalidInputError: The capacity cannot be parsed, is a fraction or is not positive; or there is no such device.
    """

    has_own_limit = True

    def __init__(self, capacity: int | str, device: torch.device | str = "cpu") -> None:
        # A torch.device that this machine lacks can be simulated too, for predictions; training checks for it.
        self.device = device if isinstance(device, torch.device) else existing(device)
        # A fraction of 0 is 0, so parse_limit itself rejects fractions.
        self._capacity_bytes = 0
        self._capacity_bytes = parse_limit(capacity, self, name="capacity") or 0
        if not self._capacity_bytes:
            raise InvalidInputError(f"capacity={capacity!r} is not a size; give bytes or a size such as '600MiB'")
        self.name = f"simulated device of {format_bytes(self._capacity_bytes)}"
        self._ledger: _Ledger | None = None
        self._countings = 0

    def reading(self) -> MemoryReading:
        """Return the memory free within the capacity, or the limit if that is less."""
        used = self._ledger.live_bytes if self._ledger else 0
        allowed = self._ledger.allowed_bytes if self._ledger else self._capacity_bytes
        return MemoryReading(
            total_bytes=self._capacity_bytes,
            free_bytes=max(0, allowed - used),
            used_bytes=used,
            limit_bytes=self._ledger.limit_bytes if self._ledger else None,
        )

    @contextmanager
    def counted(self, limit_bytes: int | None) -> Iterator[None]:
        """Count the storages that are allocated while a limit is in force, until they are freed.

        Args:
            limit_bytes: The limit; has no effect above the capacity. None means only the capacity applies.

        Contexts of one device may overlap, as two runners on it do: they share one count.

        Raises:
            InvalidInputError: The limit is not positive.
        """
        if limit_bytes is not None and limit_bytes < 1:
            raise InvalidInputError(f"a limit of {limit_bytes} bytes on the {self.name} leaves no memory")
        if self._ledger is None:
            self._ledger = _Ledger(self)
        self._countings += 1
        try:
            yield
        finally:
            self._countings -= 1
            if not self._countings:
                self._ledger = None

    @contextmanager
    def _in_force(self, limit_bytes: int | None) -> Iterator[None]:
        assert self._ledger is not None, "counted comes first"
        with self._ledger.limited_to(limit_bytes):
            yield

    def lifted(self) -> contextlib.AbstractContextManager[None]:
        """Reject nothing: work outside the step (a checkpoint written and read back) would not be on the device."""
        return self._with(allowed_bytes=sys.maxsize)

    def elsewhere(self) -> contextlib.AbstractContextManager[None]:
        """Exempt storages allocated inside."""
        return self._with(is_elsewhere=True)

    def _with(self, **attributes: object) -> contextlib.AbstractContextManager[None]:
        """Set attributes of the ledger, if there is one, for a block."""
        return replaced(*((self._ledger, *one) for one in attributes.items() if self._ledger is not None))

    def reset_peak(self) -> None:
        """Reset the peak to the current use."""
        if self._ledger is not None:
            self._ledger.peak_bytes = self._ledger.live_bytes

    def peak_bytes(self) -> int | None:
        """Return the highest total of live storages since `reset_peak`; None where nothing counts."""
        return self._ledger.peak_bytes if self._ledger else None

    def release(self) -> None:
        """Collect cycles; a freed storage is available at once."""
        gc.collect()

    def ensure(self, extra_bytes: int) -> None:
        """Raise `torch.OutOfMemoryError` if `extra_bytes` more would not fit."""
        if self._ledger is not None:
            self._ledger.check(extra_bytes)
        elif extra_bytes > self._capacity_bytes:
            raise _out_of_memory(self.name, extra_bytes, self._capacity_bytes, 0)

    def total_for_fraction(self) -> int:
        """Return the capacity."""
        return self._capacity_bytes


class _Ledger(StorageWatch):  # type: ignore[no-untyped-call]
    """Counts the storages allocated while it is active, and rejects those beyond the allowed total."""

    def __init__(self, backend: Simulated) -> None:
        super().__init__(backend.device.type)
        self._capacity_bytes = backend.total_for_fraction()
        self.limit_bytes: int | None = None
        self.allowed_bytes = self._capacity_bytes
        self._name = backend.name
        self.is_elsewhere = False

    @contextmanager
    def limited_to(self, limit_bytes: int | None) -> Iterator[None]:
        """Count and reject in this block; storages counted in an earlier one still count while they are alive."""
        if limit_bytes is not None:
            self.limit_bytes, self.allowed_bytes = limit_bytes, min(limit_bytes, self._capacity_bytes)
        try:
            with self:
                yield
        finally:
            self.limit_bytes, self.allowed_bytes = None, self._capacity_bytes

    def _count(self, storages: Mapping[int, torch.UntypedStorage]) -> None:
        if not self.is_elsewhere:
            super()._count(storages)

    def check(self, extra_bytes: int) -> None:
        """Raise `torch.OutOfMemoryError` if `extra_bytes` more would exceed the allowed total."""
        if self.live_bytes + extra_bytes > self.allowed_bytes:
            raise _out_of_memory(self._name, extra_bytes, self.allowed_bytes, self.live_bytes)


def _out_of_memory(name: str, wanted: int, allowed: int, live: int) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"{name} out of memory. Tried to allocate {format_bytes(wanted)}. Of the {format_bytes(allowed)} "
        f"allowed {format_bytes(live)} are in use and {format_bytes(max(0, allowed - live))} are free."
    )
