"""Delays signals while they would do harm: inside an optimizer step, or before a checkpoint is written.

`deferred` is for short blocks, `SignalGuard` for a whole training. Python runs handlers in the main thread only, so
in other threads they do nothing.
"""

from __future__ import annotations

# The functions that `signal.signal` and `signal.getsignal` wrap. The wrappers convert every handler to an enum and
# back, which costs 13 microseconds per window, as much as all other bookkeeping of a window.
import _signal
import functools
import os
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

# Signals for which people write handlers that raise. SIGCHLD is included because a DataLoader's handler raises anywhere
# when one of its workers was killed. Not every system has all of them.
_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD")
_HELD = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


def can_be_handled() -> bool:
    """Whether this thread is the one in which Python runs handlers."""
    return threading.get_ident() == threading.main_thread().ident


# The blocks that hold signals back now, and the signals that came meanwhile.
_holding: set[deferred] = set()
_arrived: list[int] = []


class _Wrapper:
    """Keeps a signal while a block holds it back; else passes it to its handler.

    One for each handler: code inside a block may put a handler of its own before one of these.
    """

    __slots__ = ("handler",)

    def __init__(self, handler: Any) -> None:
        self.handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if _holding:
            _arrived.append(number)
        else:
            self.handler(number, frame)


class deferred:  # noqa: N801 - it is used like a function: `with deferred():`
    """Hold back signals until the block has ended, then deliver them to their handlers, in order.

    A signal without a Python handler (with the default action, which ends the process) cannot be held back and is left
    alone.
    """

    __slots__ = ("_counts", "_wrappers")

    def __init__(self) -> None:
        self._wrappers: list[tuple[int, _Wrapper]] = []

    def __enter__(self) -> None:
        self._counts = can_be_handled()
        if self._counts:
            _follow_forks()
            try:
                _holding.add(self)
                self._wrap()
            except BaseException:  # the handler of one that is not deferred yet
                _holding.discard(self)
                self._unwrap()
                raise

    def __exit__(self, *_: object) -> None:
        if not self._counts:
            return
        try:
            _holding.discard(self)  # first: a handler may raise as soon as it is back
            self._unwrap()
        except BaseException:
            self._unwrap()
            raise
        finally:
            if _arrived and not _holding:
                _deliver()

    def _wrap(self) -> None:
        is_outermost = len(_holding) == 1
        for number in _HELD:
            handler = _signal.getsignal(number)
            if type(handler) is _Wrapper:
                if is_outermost:  # several interrupts at once have left it there
                    self._wrappers.append((number, handler))
            elif callable(handler):
                wrapper = _Wrapper(handler)
                self._wrappers.append((number, wrapper))
                _signal.signal(number, wrapper)

    def _unwrap(self) -> None:
        for number, wrapper in self._wrappers:
            now = _signal.signal(number, wrapper.handler)
            if now is not wrapper:  # the block has set another, which stays
                _signal.signal(number, now)


def _behind(handler: Any) -> Any:
    return handler.handler if type(handler) is _Wrapper else handler


@functools.cache
def _follow_forks() -> None:
    """Let a process that is forked in a block have its signals at once: it may never leave the block."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_forget)


def _forget() -> None:
    _holding.clear()
    _arrived.clear()


def _deliver() -> None:
    """Deliver every signal that arrived, in order, even if handlers raise (KeyboardInterrupt)."""
    if _arrived:
        try:
            signal.raise_signal(_arrived.pop(0))
        finally:
            _deliver()


class Terminated(BaseException):
    """SIGTERM as an exception, so that work can be saved before it takes effect."""


class SignalGuard:
    """Handles SIGTERM and SIGUSR1 for the duration of a block, so that work can be saved before they take effect.

    SIGTERM raises `Terminated`. It only sets `is_ending` where it waits for others, or may be survived: if there was a
    handler before, which may return. Further ones are ignored, so as not to disturb the handling of the first. SIGUSR1
    sets `is_save_requested`. Ignored signals stay ignored. When the block ends, the former handlers are restored, and a
    SIGTERM that has had no effect yet is delivered to them.

    Args:
        waits: Whether SIGTERM waits, so that other processes can be consulted first.

    Attributes:
        is_active: Whether SIGTERM is handled so; otherwise it has its former effect.
        is_save_requested: Whether SIGUSR1 has arrived.
        is_ending: Whether a SIGTERM waits for `end`.
    """

    def __init__(self, *, waits: bool = False) -> None:
        self.is_active = self.is_save_requested = self.is_ending = False
        self._waits = waits
        self._terminated = False
        self._former: dict[int, Any] = {}
        self._process = os.getpid()

    @contextmanager
    def handling(self) -> Iterator[Self]:
        """Handle the signals in a block. If an interrupt comes at its exit, it ends when the generator is freed."""
        try:
            if can_be_handled():
                self._install(signal.SIGTERM, self._on_terminate)
                if hasattr(signal, "SIGUSR1"):
                    self._install(signal.SIGUSR1, self._on_save_request)
            yield self
        finally:
            with deferred():
                for number, former in self._former.items():
                    if _behind(signal.getsignal(number)) in (self._on_terminate, self._on_save_request):
                        signal.signal(number, former)
            if (self._terminated or self.is_ending) and os.getpid() == self._process:
                signal.raise_signal(signal.SIGTERM)

    def raise_if_terminated(self) -> None:
        """Raise `Terminated` if it was lost: Python drops exceptions of handlers while an object is finalized."""
        if self._terminated:
            raise Terminated

    def end(self) -> None:
        """Pass a SIGTERM that waits to the former handler, which may return; if there is none, raise `Terminated`."""
        self.is_ending = False
        if callable(self._former[signal.SIGTERM]):
            self._pass_on(signal.SIGTERM)
        else:
            self._terminated = True
            raise Terminated

    def note_saved(self) -> None:
        """Record that the request was fulfilled, and pass SIGUSR1 to the former handler, if there is one."""
        self.is_save_requested = False
        if callable(self._former[signal.SIGUSR1]):
            self._pass_on(signal.SIGUSR1)

    def _install(self, number: int, handler: Any) -> None:
        former = signal.getsignal(number)
        if former not in (signal.SIG_IGN, None):  # None: not set by Python, so it could not be restored
            self._former[number] = former
            signal.signal(number, handler)

    def _on_terminate(self, number: int, _frame: FrameType | None) -> None:
        if self._terminated:
            return
        # Forked processes (a loader's workers) have this handler too, but nothing to save.
        if not self.is_active or os.getpid() != self._process:
            self._pass_on(number)
        elif self._waits or callable(self._former[number]):
            self.is_ending = True
        else:
            self._terminated = True
            raise Terminated

    def _on_save_request(self, _number: int, _frame: FrameType | None) -> None:
        self.is_save_requested = True

    def _pass_on(self, number: int) -> None:
        """Deliver a signal to the former handler; the default one of SIGTERM does not return."""
        own = signal.signal(number, self._former[number])
        try:
            signal.raise_signal(number)
        finally:
            signal.signal(number, own)
