"""Refuses a call on a model that another call is at work with: both would move the same gradients and modes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import nn

# Of a thread, which may come back to a model from within a call: a callback of `fit` may evaluate it.
_threads: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
_registering = threading.Lock()


class AtWork:
    """While it is entered, other threads' calls on the same model are refused.

    Args:
        name: The call, such as "backward".
        model: The model.
        nests: Whether the call may be made within itself.
    """

    def __init__(self, name: str, model: nn.Module, *, nests: bool = False) -> None:
        self._name = name
        with _registering:
            self._thread = _threads.setdefault(model, threading.RLock())
        self._call = threading.RLock() if nests else threading.Lock()

    def __enter__(self) -> None:
        if self._thread.acquire(blocking=False):
            if self._call.acquire(blocking=False):
                return
            self._thread.release()
        name = self._name
        raise InvalidInputError(
            f"{name} was called within {name} (by a hook, a closure or a callback), or by a second thread on the same "
            "model; give each thread a model of its own, or wait for one call before the next"
        )

    def __exit__(self, *_: object) -> None:
        self._call.release()
        self._thread.release()
