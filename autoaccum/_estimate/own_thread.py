"""Replaces functions of torch for the thread that traces a step, and for no other.

A trace needs other answers than a driver gives (`cuda_dispatch.py`, `gpu_properties.py`, `fake_backward.py`). Every
replacement asks which thread calls: all threads but the tracing one, such as one that trains, get torch's own function.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

# Held while a step is traced: one trace at a time, so that replacements begin and end in order.
ONE_AT_A_TIME = threading.RLock()


@contextmanager
def replaced(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Let this thread call `function` in place of an attribute of a module or class; yield the original."""
    original, thread, entered = getattr(owner, name), threading.get_ident(), True

    def called(*args: Any, **kwargs: Any) -> Any:
        # Who kept this function calls the original through it later.
        is_ours = entered and threading.get_ident() == thread
        return (function if is_ours else original)(*args, **kwargs)

    setattr(owner, name, called)
    try:
        yield original
    finally:
        entered = False
        setattr(owner, name, original)
