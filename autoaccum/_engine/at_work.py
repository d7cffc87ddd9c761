"""Refuses a call on a model that another call is at work with: both would move the same gradients and modes."""

from __future__ import annotations

import threading
from contextlib import suppress
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
        self._call = None if nests else threading.Lock()

    def __enter__(self) -> None:
        has_thread = has_call = False
        try:
            has_thread = self._thread.acquire(blocking=False)
            has_call = has_thread and (self._call is None or self._call.acquire(blocking=False))
            if not has_call:
                raise _refused(self._name)  # noqa: TRY301 - it has to release, too
        except BaseException:  # also an interrupt
            if has_call and self._call is not None:
                self._call.release()
            if has_thread:
                self._thread.release()
            raise

    def __exit__(self, *_: object) -> None:
        try:
            self._release()
        except BaseException:  # an interrupt before all was released
            with suppress(RuntimeError):
                self._release()
            raise

    def _release(self) -> None:
        if self._call is not None and self._call.locked():
            self._call.release()
        self._thread.release()


def _refused(name: str) -> InvalidInputError:
    return InvalidInputError(
        f"{name} was called within {name} (by a hook, a closure or a callback), or by a second thread on the same "
        "model; give each thread a model of its own, or wait for one call before the next"
    )
