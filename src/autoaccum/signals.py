"""Keeps an interrupt from landing inside the optimizer, where it would leave half an update."""

from __future__ import annotations

# What `signal.signal` and `signal.getsignal` wrap. They turn every handler into an enum and back, which costs 13
# microseconds a window, as much as all else that a window's bookkeeping needs.
import _signal
import signal
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

_HELD = (signal.SIGINT, signal.SIGTERM)


class held:  # noqa: N801 - it is used like a function: `with held():`
    """Hold back SIGINT and SIGTERM until the block has ended, then deliver them to whoever was to have them.

    Python runs signal handlers in the main thread only, so elsewhere there is nothing to hold. A signal whose handler
    is not Python's (the default action, which ends the process) cannot be held and is left alone.
    """

    __slots__ = ("_arrived", "_handlers")

    def __init__(self) -> None:
        self._handlers: list[tuple[int, Any]] = []
        self._arrived: list[int] = []

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _HELD:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers.append((number, handler))
                _signal.signal(number, self._keep)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers:
            _signal.signal(number, handler)
        self._deliver()

    def _deliver(self) -> None:
        """Raise every signal that arrived, in order, whatever their handlers raise (KeyboardInterrupt)."""
        if self._arrived:
            try:
                signal.raise_signal(self._arrived.pop(0))
            finally:
                self._deliver()

    def _keep(self, number: int, _frame: FrameType | None) -> None:
        self._arrived.append(number)
