"""Keeps an interrupt from landing inside the optimizer, where it would leave half an update."""

from __future__ import annotations

import signal
import threading
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_HELD = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def held() -> Iterator[None]:
    """Hold back SIGINT and SIGTERM until the block has ended, then deliver them to whoever was to have them.

    Python runs signal handlers in the main thread only, so elsewhere there is nothing to hold. A signal whose handler
    is not Python's (the default action, which ends the process) cannot be held and is left alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []

    def keep(number: int, _frame: FrameType | None) -> None:
        arrived.append(number)

    # A handler that ends the process outright, or none of Python's, has nothing to be put back to.
    handlers = {number: handler for number in _HELD if callable(handler := signal.getsignal(number))}
    # Whatever one handler raises (KeyboardInterrupt), the other signal still arrives.
    with ExitStack() as delivered:
        try:
            for number in handlers:
                signal.signal(number, keep)
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for late in reversed(arrived):  # the last one pushed is called first
                delivered.callback(signal.raise_signal, late)
