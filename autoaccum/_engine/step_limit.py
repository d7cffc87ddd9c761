"""Enforces a memory limit within the steps of a loop of the user's own, and lifts one for loaders.

Such a loop has no end that could lift a limit, so none is in force between steps. A process that is started within a
limit would inherit it. What steps, callbacks and loaders leave allocated keeps counting.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

from autoaccum._engine import devices

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from autoaccum._memory.base import MemoryBackend


class StepLimit:
    """The limit of one runner, counted from now on, or the capacity of a simulated device."""

    def __init__(self, memory: MemoryBackend, limit_bytes: int | None) -> None:
        self._memory = memory
        self._limit_bytes = limit_bytes
        self.enforces = limit_bytes is not None or memory.has_own_limit
        if not self.enforces:
            return
        counting = ExitStack()
        weakref.finalize(self, counting.close)
        with devices.oom_explained(memory, "what training needs in addition to the model"):
            counting.enter_context(memory.counted(limit_bytes))

    def in_force(self) -> AbstractContextManager[None]:
        """Return a context in which the limit is in force; within a limit that the user has entered, that one holds.

        Raises:
            InvalidInputError: On entry: another limit is in force, and this runner has one of its own.
        """
        if not self.enforces or (self._limit_bytes is None and self._memory.is_limited):
            return nullcontext()
        return self._memory.enforced(self._limit_bytes)


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
