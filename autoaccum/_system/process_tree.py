"""Ends whatever was started within a block: also what left its session, or whose parent has ended. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_POLL_S = 0.01
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


@contextlib.contextmanager
def ended_with_block() -> Iterator[None]:
    """Kill what was started within, and wait for its end; SIGTERM and SIGHUP leave the block by SystemExit.

    From the main thread alone, while nothing else starts processes.
    """
    others = _descendants()
    _LIBC.prctl(_SUBREAPER, 1)  # orphans become children of this process
    former = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        while left := _descendants() - others:
            for process in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process, os.WNOHANG)
            time.sleep(_POLL_S)
        _LIBC.prctl(_SUBREAPER, 0)
        for number, handler in former.items():
            signal.signal(number, handler)


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent has ended; for `preexec_fn`."""
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)


def _descendants() -> set[int]:
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_bytes().rpartition(b") ")[2].split()[1])
    found: set[int] = set()
    left = {os.getpid()}
    while left:
        left = {process for process, parent in parents.items() if parent in left}
        found |= left
    return found
