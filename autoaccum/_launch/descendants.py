"""Finds, signals and reaps the descendants of this process, and no others. Linux only.

This process adopts orphans (PR_SET_CHILD_SUBREAPER), so that a daemon that has left its group and session and outlived
its parent stays a descendant.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class Descendants:
    """The descendants started within a block; earlier ones are left alone."""

    def __init__(self) -> None:
        self._before: set[psutil.Process] = set()
        self._was_subreaper = 0

    def __enter__(self) -> Self:
        self._before = set(psutil.Process().children(recursive=True))
        self._was_subreaper = _set_subreaper(1)
        return self

    def __exit__(self, *_: object) -> None:
        _set_subreaper(self._was_subreaper)

    def spare(self, pid: int) -> None:
        """Treat a child as started earlier."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._before.add(psutil.Process(pid))

    def reap_orphans(self, command: int | None = None) -> None:
        """Reap adopted processes that have ended, except the command, whose status the caller reads."""
        spared = {process.pid for process in self._before} | {command}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in spared:
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)

    def alive(self) -> list[psutil.Process]:
        """Return those that are running or stopped."""
        found = []
        for process in psutil.Process().children(recursive=True):
            if process in self._before:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def send(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to processes, except those that are gone or now belong to another user."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def send_to_group(group: int, number: int) -> None:
    """Send a signal to a process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.killpg(group, signal.SIGCONT)  # a stopped process does not handle signals


def _set_subreaper(value: int) -> int:
    """Set whether this process adopts orphans; return the previous value."""
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(value), 0, 0, 0)
    return before.value
