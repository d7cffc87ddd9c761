"""The hard limit of this process, RLIMIT_DATA: at most one at a time, and none for what it starts.

Python code and native code alike then meet an allocation that fails, instead of a kernel that kills the process.
"""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autoaccum._system import signals
from autoaccum.errors import InvalidInputError

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator


class HardLimit:
    """RLIMIT_DATA of the process, lowered within `at` and as before outside it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held while a limit is in force
        self._bound: int | None = None
        self._before = 0
        self._thread = 0, ""
        self._follows_forks = False

    @contextmanager
    def at(self, bound: int, what: str) -> Iterator[None]:
        """Let the process hold at most `bound` bytes of data; a tighter limit that holds anyway stays.

        Args:
            bound: In bytes, as VmData counts.
            what: Names the limit in the message.

        Raises:
            InvalidInputError: Another limit is in force in this process.
        """
        if not self._lock.acquire(blocking=False):
            raise InvalidInputError(
                f"{what} cannot be set: RLIMIT_DATA applies to the whole process, and the thread {self._thread[1]!r} "
                "already has a limit; run one after the other, or each in a process of its own"
            )
        try:
            if not self._follows_forks:
                os.register_at_fork(after_in_child=self._forget)
                self._follows_forks = True
            self._thread = threading.get_ident(), threading.current_thread().name
            self._before = resource.getrlimit(resource.RLIMIT_DATA)[0]
            self._bound = bound
            _set_soft(bound, self._before)
            yield
        finally:
            with signals.held():
                if self._bound is not None:
                    self._bound = None
                    _set_soft(self._before)
                self._lock.release()

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Suspend the limit, if this thread has one."""
        bound = self._bound
        if bound is None or self._thread[0] != threading.get_ident():
            yield
            return
        try:
            _set_soft(self._before)
            yield
        finally:
            _set_soft(bound, self._before)

    def _forget(self) -> None:
        """Give a forked child, which does not train, what its parent had before."""
        if self._bound is not None:
            self._bound = None
            _set_soft(self._before)
        # The thread that holds it may not exist in the child.
        self._lock = threading.Lock()


def _set_soft(*bounds: int) -> None:
    """Set the soft limit to the least of these and the hard one, which stays: a user may have lowered it meanwhile."""
    now, hard = resource.getrlimit(resource.RLIMIT_DATA)
    finite = [bound for bound in (*bounds, hard) if bound != resource.RLIM_INFINITY]
    soft = min(finite, default=resource.RLIM_INFINITY)
    if soft != now:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


of_process = HardLimit()
