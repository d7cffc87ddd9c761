"""Owns the process-wide settings of a host memory limit: RLIMIT_DATA and the allocator's settings.

Each limit in force is a hold. The tightest applies to the process, and releasing the last hold restores everything.
Holds nest within one thread. Other threads are rejected: `ensure` checks for memory that is used afterwards, so two
trainings that check at the same time would both count on the same bytes.
"""

from __future__ import annotations

import itertools
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

from autoaccum._memory import _glibc
from autoaccum._system import signals
from autoaccum.errors import InvalidInputError

try:
    import resource
except ImportError:  # Windows has no such limit
    resource = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator

# Stands for a bound: all limits entered earlier are suspended.
_LIFTED = -2


class Hold:
    """One limit among those of the process.

    It ends with `release`, or at the latest when it is garbage-collected: an interrupt before any handler is set up
    must not leave the process limited.
    """

    __slots__ = ("_key", "_owner")

    def __init__(self, owner: Owner, key: int) -> None:
        self._owner = owner
        self._key = key

    def lower(self, bound: int) -> None:
        """Limit the process to `bound` bytes of data, unless a tighter limit applies."""
        self._owner._set(self._key, bound)

    def release(self) -> None:
        """End the hold; a second call does nothing."""
        with signals.held():
            self._owner._release(self._key)

    def __del__(self) -> None:
        if hasattr(self, "_key"):  # else an interrupt came before it was set
            self.release()


class Owner:
    """Sets the limit of the process from all holds, and restores the state before the first."""

    def __init__(self) -> None:
        # A hold may be garbage-collected, and so released, while its own thread holds the lock.
        self._lock = threading.RLock()
        self._keys = itertools.count()
        self._thread: tuple[int, str] | None = None
        self._entered: dict[int, int | None] = {}  # in order of entry: a bound, _LIFTED, or no bound yet
        self._before: int | None = None
        self._settled: _glibc.Settled | None = None
        self._follows_forks = False

    def hold(self, what: str) -> Hold:
        """Settle the allocator and return a hold for `what`, which names the limit in the message.

        Raises:
            InvalidInputError: Another thread has limited the process.
        """
        with self._lock:
            me = threading.get_ident()
            if self._entered and self._thread is not None and self._thread[0] != me:
                raise InvalidInputError(
                    f"{what} cannot be set in this thread: RLIMIT_DATA applies to the whole process, and the "
                    f"thread {self._thread[1]!r} already has a limit; run one after the other, or each in a process of "
                    "its own"
                )
            if not self._follows_forks:
                os.register_at_fork(after_in_child=self._forget)
                self._follows_forks = True
            hold = Hold(self, next(self._keys))
            self._thread = me, threading.current_thread().name
            self._entered[hold._key] = None
            if self._settled is None:
                self._settled = _glibc.Settled()
            return hold

    @property
    def has_holds(self) -> bool:
        """Whether there is any hold, even while the limit is suspended."""
        return bool(self._entered)

    def tightest(self) -> int | None:
        """Return the lowest bound on the process, by its resource limits and all holds; None if there is none."""
        bounds = [*resource.getrlimit(resource.RLIMIT_DATA), *self._bounds()]
        return min((bound for bound in bounds if bound != resource.RLIM_INFINITY), default=None)

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Suspend the limit of the current thread, if it has one; a limit entered inside applies again."""
        if not self._entered or self._thread is None or self._thread[0] != threading.get_ident():
            yield
            return
        lift = Hold(self, next(self._keys))
        try:
            self._set(lift._key, _LIFTED)
            yield
        finally:
            self._release(lift._key)

    def _set(self, key: int, bound: int) -> None:
        with self._lock:
            if self._before is None:
                self._before = resource.getrlimit(resource.RLIMIT_DATA)[0]
            self._entered[key] = bound
            self._apply(self._entered)

    def _release(self, key: int) -> None:
        with self._lock:
            if key not in self._entered:
                return
            # The key is deleted last: if an interrupt stops this part-way, collecting the hold repeats it.
            left = {other: bound for other, bound in self._entered.items() if other != key}
            self._apply(left)
            if not left:
                if self._settled is not None:
                    self._settled.end()
                    self._settled = None
                self._before = None
            del self._entered[key]

    def _bounds(self) -> list[int]:
        return [bound for bound in self._entered.values() if bound is not None and bound != _LIFTED]

    def _apply(self, entered: dict[int, int | None]) -> None:
        """Set the soft limit; the hard one stays, which a user may have lowered."""
        if self._before is None:
            return
        bounds = [bound for bound in entered.values() if bound is not None]
        is_free = not bounds or bounds[-1] == _LIFTED
        soft = self._before if is_free else min(bound for bound in bounds if bound != _LIFTED)
        now, hard = resource.getrlimit(resource.RLIMIT_DATA)
        within = [bound for bound in (soft, hard) if bound != resource.RLIM_INFINITY]
        soft = min(within, default=resource.RLIM_INFINITY)
        if soft != now:
            resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

    def _forget(self) -> None:
        """Lift the limit in a forked child, which does not train: it gets its parent's original limit."""
        # Another thread of the parent may have held the lock, and does not exist in the child to release it.
        self._lock = threading.RLock()
        self._apply({})
        self._entered, self._thread, self._before, self._settled = {}, None, None, None
        _glibc.Settled.forget()


owner = Owner()
