"""Calls callbacks and loaders with the memory limit lifted, since the limit is for the training step.

A process that they start would inherit the limit. Memory that they hold still counts when the next step begins.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autoaccum._callbacks import Callback

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from autoaccum._memory.base import MemoryBackend


class Outside(Callback):
    """Passes every event on to a callback, with the limit lifted meanwhile.

    Args:
        callback: The callback.
        memory: The memory backend whose limit is lifted.
    """

    def __init__(self, callback: Callback, memory: MemoryBackend) -> None:
        self._callback = callback
        self._memory = memory


def _passing(event: str) -> Callable[..., object]:
    def passing(self: Outside, *arguments: Any, **keywords: Any) -> object:
        with self._memory.lifted():
            return getattr(self._callback, event)(*arguments, **keywords)

    return passing


for _event in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(Outside, _event, _passing(_event))


def drawn(loader: Iterable[Any], memory: MemoryBackend) -> Iterator[Any]:
    """Yield a loader's batches, lifting the limit while the loader works."""
    with memory.lifted():  # worker processes start here
        batches = iter(loader)
    while True:
        with memory.lifted():
            try:
                batch = next(batches)
            except StopIteration:
                return
        yield batch
        del batch
