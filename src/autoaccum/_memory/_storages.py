"""Counts the storages that PyTorch makes and lets go of, exactly and on any device.

A dispatch mode sees every operation. What an operation returns in a storage of its own counts from then on; a view
counts nothing; a storage stops counting when it dies. What kernels take and give back within one operation is not seen.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

# torch.tensor takes its memory where no mode can see it and passes the result through one of these, so what
# they return counts although it shares the storage of their argument.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)
# To what the CUDA caching allocator rounds a size up.
_ROUNDING_BYTES = 512


class StorageWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees storages come and go while it is entered; what was alive before does not count.

    Args:
        device_type: Only storages there count.
    """

    def __init__(self, device_type: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.peak_bytes = 0
        self._device_type = device_type
        self._size_by_storage: dict[int, int] = {}
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        # Taken before the operation runs: what it returns in one of these is a view, or an update in place.
        inputs = (args, tuple(kwargs.values()))
        given = set() if func in _LIFTS else {_key(storage) for storage in self._storages(inputs)}
        result = func(*args, **kwargs)
        outputs = {_key(storage): storage for storage in self._storages((result,))}
        # An update in place may have resized a storage that counts already.
        counted = {key: storage for key, storage in outputs.items() if key not in given or key in self._size_by_storage}
        self._count(counted)
        return result

    def check(self, extra_bytes: int) -> None:
        """Be told that `extra_bytes` more are about to count; raise to refuse them."""

    def came(self, key: int, extra_bytes: int) -> None:
        """Be told that the storage `key` takes `extra_bytes` more, all of it where it is new."""

    def went(self, key: int) -> None:
        """Be told that the storage `key` has died; another may get the same key."""

    def _count(self, storages: Mapping[int, torch.UntypedStorage]) -> None:
        grown = {key: storage.nbytes() - self._size_by_storage.get(key, 0) for key, storage in storages.items()}
        total = sum(grown.values())
        if total > 0:
            # Refused here, the operation's results die with the frames above, as if they had never been made.
            self.check(total)
        for key, storage in storages.items():
            if key not in self._size_by_storage:
                self._watched[key] = weakref.ref(storage, functools.partial(self._forget, key))
            self._size_by_storage[key] = storage.nbytes()
            self.came(key, grown[key])
        self.live_bytes += total
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _forget(self, key: int, _reference: weakref.ref[torch.UntypedStorage]) -> None:
        del self._watched[key]
        self.live_bytes -= self._size_by_storage.pop(key)
        self.went(key)

    def _storages(self, values: Sequence[Any]) -> Iterator[torch.UntypedStorage]:
        for value in values:
            if isinstance(value, torch.Tensor):
                if value.layout is torch.strided and value.device.type == self._device_type:
                    yield value.untyped_storage()
            elif isinstance(value, tuple | list):
                yield from self._storages(value)


class Transients(StorageWatch):  # type: ignore[no-untyped-call]
    """Tells what a piece of work takes and gives back apart from what it leaves behind."""

    def __init__(self, device_type: str) -> None:
        super().__init__(device_type)
        self._events: list[tuple[int, int]] = []  # which storage, and by how much it grew or shrank
        self._alive: dict[int, tuple[int, int]] = {}  # by key: which storage, and its size
        self._storages_seen = 0

    def came(self, key: int, extra_bytes: int) -> None:
        """Note it, rounded up as an allocator does."""
        if key not in self._alive:
            self._storages_seen += 1
        number, size = self._alive.get(key, (self._storages_seen, 0))
        rounded = -(-extra_bytes // _ROUNDING_BYTES) * _ROUNDING_BYTES
        self._alive[key] = number, size + rounded
        self._events.append((number, rounded))

    def went(self, key: int) -> None:
        """Note it."""
        number, size = self._alive.pop(key)
        self._events.append((number, -size))

    def left_bytes(self) -> int:
        """What is still alive."""
        return sum(size for _, size in self._alive.values())

    def transient_bytes(self) -> int:
        """The most that was alive at once of all that has died since."""
        left = {number for number, _ in self._alive.values()}
        live = peak = 0
        for number, size in self._events:
            if number not in left:
                live += size
                peak = max(peak, live)
        return peak


def _key(storage: torch.UntypedStorage) -> int:
    # The address of PyTorch's own record, by which its own weak references tell storages apart; it is given
    # to another storage only after this one has died, and then it has been forgotten.
    return int(storage._cdata)
