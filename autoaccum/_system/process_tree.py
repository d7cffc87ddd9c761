"""Runs a command and ends all that it has started, also what left its session or lost its parent. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

_POLL_S = 0.05
_SUBREAPER, _DEATH_SIGNAL = 36, 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


def run_and_end_all(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    timeout_s: float,
    is_done: Callable[[], bool],
) -> int | None:
    """Run a command without stdin until it ends or is done; then kill all of it.

    Its output goes to files `out` and `err` of the folder. SIGTERM and SIGHUP to this process kill the command, too.
    From the main thread alone, while nothing else starts processes. Returns its exit code, 128 + N if signal N ended
    it, 127 if it cannot be started; None if it was killed.
    """
    with _ending_all(), (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        end = time.monotonic() + timeout_s
        try:
            process = subprocess.Popen(  # noqa: S603 - the user's own command
                list(arguments),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
                preexec_fn=lambda: _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL),  # noqa: PLW1509 - one thread
            )
        except OSError as error:
            err.write(f"{arguments[0]} cannot be started ({error.strerror or error})".encode())
            return 127
        while process.poll() is None and not is_done() and time.monotonic() < end:
            time.sleep(_POLL_S)
        code = process.returncode
    process.wait()
    return code if code is None or code >= 0 else 128 - code


def adopt_orphans(*, adopts: bool) -> None:
    """Let what loses its parent below this process become its child, or not any more."""
    _LIBC.prctl(_SUBREAPER, int(adopts))


def descendants(*, with_zombies: bool = False) -> set[int]:
    """Return the processes below this one; nobody but their parents reaps zombies."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, parent, *_ = path.read_bytes().rpartition(b") ")[2].split()
            if with_zombies or state not in (b"Z", b"X"):
                parents[int(path.parent.name)] = int(parent)
    found: set[int] = set()
    left = {os.getpid()}
    while left:
        left = {process for process, parent in parents.items() if parent in left}
        found |= left
    return found


@contextlib.contextmanager
def _ending_all() -> Iterator[None]:
    others = descendants(with_zombies=True)
    adopt_orphans(adopts=True)
    former = {number: signal.signal(number, _leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        while left := descendants(with_zombies=True) - others:
            for process in left:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(process, signal.SIGKILL)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(process, os.WNOHANG)
            time.sleep(_POLL_S / 10)
        adopt_orphans(adopts=False)
        for number, handler in former.items():
            signal.signal(number, handler)


def _leave(number: int, _frame: object) -> None:
    sys.exit(128 + number)
