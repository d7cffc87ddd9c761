"""A device of any size, for tests and dry runs: it counts storages exactly and raises the real exception.

Peaks are exact and the same in every run, and include the backward pass on the CPU (`_memory/_storages.py` says what
counts). What kernels allocate and free within one operator is not seen: this is a device to experiment with, not an
estimate of a real one.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from typing import TYPE_CHECKING

import torch

from autoaccum._memory._storages import StorageWatch
from autoaccum._memory.available_devices import existing
from autoaccum._memory.base import MemoryBackend
from autoaccum._memory.limits import format_bytes, parse_limit
from autoaccum._records import MemoryReading
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Simulated(MemoryBackend):
    """A device with a given amount of memory.

    The capacity is in force inside `limited`, also inside `limited(None)`, and counts the storages allocated since that
    context began; earlier ones do not count.

    Args:
        capacity: Its memory: bytes, or a size such as "600MiB".
        device: Where the tensors really are. Only a CPU's backward pass runs where the count can see it.

    Raises:
        InvalidInputError: The capacity cannot be read, is a fraction or is not positive; or there is no such device.
    """

    def __init__(self, capacity: int | str, device: torch.device | str = "cpu") -> None:
        # A torch.device that this machine lacks can be simulated too, for predictions; training on it looks for it.
        self.device = device if isinstance(device, torch.device) else existing(device)
        # A fraction of nothing is nothing, so parse_limit refuses fractions by itself.
        self._capacity_bytes = 0
        self._capacity_bytes = parse_limit(capacity, self, name="capacity") or 0
        if not self._capacity_bytes:
            raise InvalidInputError(f"capacity={capacity!r} is no size; give bytes or a size such as '600MiB'")
        self.name = f"simulated device of {format_bytes(self._capacity_bytes)}"
        self._ledger: _Ledger | None = None

    def reading(self) -> MemoryReading:
        """Return what is free of the capacity, or of the limit where that is less."""
        used = self._ledger.live_bytes if self._ledger else 0
        allowed = self._ledger.allowed_bytes if self._ledger else self._capacity_bytes
        return MemoryReading(
            total_bytes=self._capacity_bytes,
            free_bytes=max(0, allowed - used),
            used_bytes=used,
            others_bytes=0,
            limit_bytes=self._ledger.limit_bytes if self._ledger else None,
        )

    @contextlib.contextmanager
    def limited(self, limit_bytes: int | None) -> Iterator[None]:
        """Count the storages allocated inside, and refuse those beyond the capacity or the limit.

        Args:
            limit_bytes: The limit; above the capacity it changes nothing. None means the capacity alone.

        Raises:
            InvalidInputError: The limit is not positive, or another context of this device is still open.
        """
        if limit_bytes is not None and limit_bytes < 1:
            raise InvalidInputError(f"a limit of {limit_bytes} bytes on the {self.name} leaves no memory")
        if self._ledger is not None:
            raise InvalidInputError(f"the {self.name} is already limited; leave that context first")
        self._ledger = _Ledger(self, limit_bytes)
        try:
            with self._ledger:
                yield
        finally:
            self._ledger = None

    def lifted(self) -> contextlib.AbstractContextManager[None]:
        """Refuse nothing: work outside the step (a checkpoint written and read back) would not be on the device."""
        return _changed(self._ledger, "allowed_bytes", sys.maxsize)

    def elsewhere(self) -> contextlib.AbstractContextManager[None]:
        """Count no storages allocated inside."""
        return _changed(self._ledger, "is_elsewhere", value=True)

    def reset_peak(self) -> None:
        """Restart the peak from what is alive now."""
        if self._ledger is not None:
            self._ledger.peak_bytes = self._ledger.live_bytes

    def peak_bytes(self) -> int | None:
        """Return the highest sum of storages alive since `reset_peak`; None outside `limited`."""
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

    def synchronize(self) -> None:
        """Do nothing: operations are done when they return."""

    def total_for_fraction(self) -> int:
        """Return the capacity."""
        return self._capacity_bytes


class _Ledger(StorageWatch):  # type: ignore[no-untyped-call]
    """Counts the storages allocated since it was entered, and refuses those beyond what is allowed."""

    def __init__(self, backend: Simulated, limit_bytes: int | None) -> None:
        super().__init__(backend.device.type)
        total = backend.total_for_fraction()
        self.limit_bytes = limit_bytes
        self.allowed_bytes = total if limit_bytes is None else min(limit_bytes, total)
        self._name = backend.name
        self.is_elsewhere = False

    def _count(self, storages: Mapping[int, torch.UntypedStorage]) -> None:
        if not self.is_elsewhere:
            super()._count(storages)

    def check(self, extra_bytes: int) -> None:
        """Raise `torch.OutOfMemoryError` if `extra_bytes` more are not allowed."""
        if self.live_bytes + extra_bytes > self.allowed_bytes:
            raise _out_of_memory(self._name, extra_bytes, self.allowed_bytes, self.live_bytes)


@contextlib.contextmanager
def _changed(ledger: _Ledger | None, name: str, value: object) -> Iterator[None]:
    """Set an attribute of the ledger, if there is one, for a while."""
    if ledger is None:
        yield
        return
    before = getattr(ledger, name)
    setattr(ledger, name, value)
    try:
        yield
    finally:
        setattr(ledger, name, before)


def _out_of_memory(name: str, wanted: int, allowed: int, live: int) -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError(
        f"{name} out of memory. Tried to allocate {format_bytes(wanted)}. Of the {format_bytes(allowed)} "
        f"allowed {format_bytes(live)} are in use and {format_bytes(max(0, allowed - live))} are free."
    )
