"""Tracks the storages that PyTorch allocates and frees on any device.

A dispatch mode sees every operator. A storage counts from the operator that returns it until it is freed; views add
nothing. Memory that a kernel allocates and frees within one operator is not visible.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

# torch.tensor allocates where no mode can see it and passes the result through one of these, so their results count
# although they share the storage of their argument.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
# The CUDA caching allocator rounds sizes up to this.
_ROUNDING_BYTES = 512
_SEQUENCES = (tuple, list)


class StorageMode(TorchDispatchMode):
    """Keeps a number for each live storage on one type of device. Subclasses handle operators and choose the numbers.

    Args:
        device_type: The type of device whose storages are tracked.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device_type = device_type
        self._record_by_key: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def _track(self, key: int, storage: torch.UntypedStorage, record: int) -> None:
        """Set the record of a storage, which is passed to `freed` later."""
        if key not in self._record_by_key:
            self._watched[key] = weakref.ref(storage, functools.partial(self._forget, key))
        self._record_by_key[key] = record

    def _forget(self, key: int, _reference: weakref.ref[torch.UntypedStorage]) -> None:
        del self._watched[key]
        self.freed(key, self._record_by_key.pop(key))

    def freed(self, key: int, record: int) -> None:
        """Handle a freed storage, whose key may be reused."""


def strided(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors with storages that make up a tensor."""
    if tensor.layout is torch.strided:
        yield tensor
    elif tensor.layout is torch.sparse_coo:
        yield tensor._indices()
        yield tensor._values()


def gradient_bytes(parameters: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the gradients of some parameters, which may be sparse."""
    gradients = (parameter.grad for parameter in parameters if parameter.grad is not None)
    return sum(part.nbytes for gradient in gradients for part in strided(gradient))


def key_of(storage: torch.UntypedStorage) -> int:
    """Return a key that identifies a storage while it is alive.

    It is the address of PyTorch's own record, by which its weak references distinguish storages. Another storage can
    get it only after this one was freed, and so removed here.
    """
    return int(storage._cdata)


class StorageWatch(StorageMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of storages allocated while it is active; earlier ones do not count.

    Attributes:
        live_bytes: Bytes alive now.
        peak_bytes: The most bytes alive at once.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self.live_bytes = 0
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Taken before the operator runs: a result in one of these storages is a view or an in-place update.
        inputs = (args, tuple(kwargs.values()))
        given = set() if func in _LIFTS else set(map(key_of, self._storages(inputs)))
        result = func(*args, **kwargs)
        counted = {}
        for storage in self._storages((result,)):
            key = key_of(storage)
            # An in-place update may have resized a storage that is already counted.
            if key not in given or key in self._record_by_key:
                counted[key] = storage
        if counted:
            self._count(counted)
        return result

    def check(self, extra_bytes: int) -> None:
        """Raise an error to refuse `extra_bytes` more."""

    def came(self, key: int, extra_bytes: int) -> None:
        """Handle a storage that is new or has grown by `extra_bytes`."""

    def freed(self, key: int, record: int) -> None:  # noqa: ARG002 - for subclasses
        """Subtract its bytes."""
        self.live_bytes -= record

    def _count(self, storages: Mapping[int, torch.UntypedStorage]) -> None:
        grown = {key: storage.nbytes() - self._record_by_key.get(key, 0) for key, storage in storages.items()}
        total = sum(grown.values())
        if total > 0:
            # If this raises, the operator's results are freed with the frames above.
            self.check(total)
        for key, storage in storages.items():
            self._track(key, storage, storage.nbytes())
            self.came(key, grown[key])
        self.live_bytes += total
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _storages(self, values: Sequence[Any]) -> list[torch.UntypedStorage]:
        # Runs twice for each operator, so without generators.
        found = []
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.layout is torch.strided and value.device.type == self._device_type:
                    found.append(value.untyped_storage())
            elif isinstance(value, _SEQUENCES):
                found += self._storages(value)
        return found


class Transients(StorageWatch):  # type: ignore[no-untyped-call]
    """Separates memory that an operation frees again from memory that it leaves allocated."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self._alive: dict[int, list[int]] = {}  # by key: by how much a storage grew, each time
        self._events: list[tuple[list[int], int]] = []  # a storage's list of these, and by how much it grew or shrank

    def came(self, key: int, extra_bytes: int) -> None:
        """Record the growth, rounded up as an allocator does."""
        rounded = -(-extra_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES
        grown = self._alive.setdefault(key, [])
        grown.append(rounded)
        self._events.append((grown, rounded))

    def freed(self, key: int, record: int) -> None:
        """Record the release."""
        super().freed(key, record)
        grown = self._alive.pop(key)
        self._events.append((grown, -sum(grown)))

    def transient_bytes(self) -> int:
        """Return the peak of the storages that have been freed since."""
        left = set(map(id, self._alive.values()))
        live = peak = 0
        for grown, size in self._events:
            if id(grown) not in left:
                live += size
                peak = max(peak, live)
        return peak
