"""What a process has started, directly or not: found, signalled, reaped; nothing else is ever touched.

On Linux this process becomes the one to which orphans go (PR_SET_CHILD_SUBREAPER), so that also a daemon, which has
left its group and its session and outlived its parent, stays a descendant. Elsewhere those are lost sight of.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import TYPE_CHECKING, Self

import psutil

if TYPE_CHECKING:
    from collections.abc import Sequence

# linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


class Descendants:
    """The processes that are started below this one while a block runs; those from before are left alone."""

    def __init__(self) -> None:
        self._before: set[psutil.Process] = set()
        self._was_subreaper: int | None = None

    def __enter__(self) -> Self:
        self._before = set(psutil.Process().children(recursive=True))
        self._was_subreaper = _set_subreaper(1)
        return self

    def __exit__(self, *_: object) -> None:
        if self._was_subreaper is not None:
            _set_subreaper(self._was_subreaper)

    def spare(self, pid: int) -> None:
        """Count a child among those from before."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._before.add(psutil.Process(pid))

    def reap_orphans(self, command: int | None = None) -> None:
        """Take note of the end of those that came to this process, so that none stays a zombie while a command runs.

        Args:
            command: A child whose end is somebody else's to see.
        """
        spared = {process.pid for process in self._before} | {command}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in spared:
                    return
                os.waitpid(ended.si_pid, os.WNOHANG)

    def alive(self) -> list[psutil.Process]:
        """Return those that run, or are stopped."""
        found = []
        for process in psutil.Process().children(recursive=True):
            if process in self._before:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found


def send(processes: Sequence[psutil.Process], number: int) -> None:
    """Send a signal to processes; those that are gone, or are somebody else's by now, are passed over."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def send_to_group(group: int, number: int) -> None:
    """Send a signal to a process group; one that is gone is passed over."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.killpg(group, signal.SIGCONT)  # what is stopped would never see it


def _set_subreaper(value: int) -> int | None:
    """Set whether orphans below this process go to it; return what it was, or None where there is no such thing."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    before = ctypes.c_int()
    if libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0) != 0:
        return None
    libc.prctl(_PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(value), 0, 0, 0)
    return before.value
