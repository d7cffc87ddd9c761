"""Enforces a memory limit within the steps of a loop of the user's own.

Such a loop has no end that could lift a limit, so none is in force between steps: loaders, other models and processes
that are started there run without it. What steps leave allocated keeps counting.
"""

from __future__ import annotations

import weakref
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING

from autoaccum._engine import devices

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from autoaccum._memory.base import MemoryBackend


class StepLimit:
    """The limit of one runner, counted from now on, or the capacity of a simulated device.

    Args:
        memory: The memory backend.
        limit_bytes: The limit, as the backend counts; None for none other than the device's own capacity.

    Attributes:
        enforces: Whether `in_force` does anything.

    Raises:
        InvalidInputError: The limit cannot be set.
        DoesNotFitError: Memory ran out while preparing for the limit.
    """

    def __init__(self, memory: MemoryBackend, limit_bytes: int | None) -> None:
        self._memory = memory
        self._limit_bytes = limit_bytes
        self.enforces = limit_bytes is not None or memory.has_own_limit
        if not self.enforces:
            return
        counting = ExitStack()
        # Without atexit: at the end of the process there is nothing to give back.
        weakref.finalize(self, counting.close).atexit = False
        with devices.failures_told(memory, "what training needs in addition to the model"):
            memory.prepare_limit(limit_bytes)
            counting.enter_context(memory.counted(limit_bytes))

    def in_force(self) -> AbstractContextManager[None]:
        """Return a context in which the limit is in force; within a limit that the user has entered, that one holds.

        Raises:
            InvalidInputError: On entry: another limit is in force, and this runner has one of its own.
        """
        if not self.enforces or (self._limit_bytes is None and self._memory.is_limited):
            return nullcontext()
        return self._memory.enforced(self._limit_bytes)
