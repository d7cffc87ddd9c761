"""Calls all callbacks of a training, and notes whether one has asked to stop by `StopTraining`."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from autoaccum._callbacks import Callback, StopTraining
from autoaccum.errors import AutoaccumError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._memory.base import MemoryBackend


class Observers(Callback):
    """Passes every event on to all callbacks, in order, with the memory limit lifted meanwhile.

    A request to stop is no failure: the other callbacks are notified too, and a window in progress is completed.

    Args:
        callbacks: The callbacks.
        memory: The memory backend.

    Attributes:
        reason: Why to stop, as the first callback that asked has put it; None if none has asked.
    """

    def __init__(self, callbacks: Sequence[Callback], memory: MemoryBackend) -> None:
        self.reason: str | None = None
        self._callbacks = callbacks
        self._memory = memory
        self._process = os.getpid()

    def each(self, event: str, *arguments: Any) -> list[Callable[[], None]]:
        """Return the calls of an event, for a caller who makes all of them even if one raises."""
        return [partial(self._call, callback, event, *arguments) for callback in self._callbacks]

    def _call(self, callback: Callback, event: str, *arguments: Any, **keywords: Any) -> None:
        self._refuse_forks()
        try:
            with self._memory.lifted():
                getattr(callback, event)(*arguments, **keywords)
        except StopTraining as asked:
            self.reason = self.reason or asked.reason
        self._refuse_forks()

    def _refuse_forks(self) -> None:
        """Raise in a process that was forked meanwhile, which would write to the same logs and go on training."""
        if os.getpid() != self._process:
            raise AutoaccumError(
                f"this process was forked from process {self._process} while that trained, and has come back to fit; "
                "end a forked process with os._exit() where it was forked"
            )


def _passing(event: str) -> Callable[..., None]:
    def passing(self: Observers, *arguments: Any, **keywords: Any) -> None:
        for callback in self._callbacks:
            self._call(callback, event, *arguments, **keywords)

    return passing


for _event in [name for name in vars(Callback) if name.startswith("on_")]:
    setattr(Observers, _event, _passing(_event))
