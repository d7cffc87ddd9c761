"""Ends what a wrapper has started where the wrapper itself was killed. A script of its own, run by its path.

Standard input is a pipe whose other end only the wrapper holds: while it lives that stays open. Over it comes the id of
each session that the wrapper starts, as a line, and the same negative once it is over, since ids are used again. At
the end of the pipe every process of the sessions that are left, and every process with the wrapper's mark in its
environment, gets SIGTERM, and after the grace period SIGKILL; where the wrapper has cleaned up itself, there is none. A
process that has cleared its environment and left its session is not found. It reads /proc, so it is for Linux, and
imports nothing but the standard library: it starts beside every command.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.05
# A process that SIGKILL does not end waits inside the kernel; nobody can do more about it.
_MOST_S = 10.0
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
# Fields of /proc/PID/stat after the name: state, parent, group, session.
_STATE, _SESSION = 0, 3


def main(mark: str, grace_s: float) -> None:
    """Wait for the wrapper's end, then end what it has left.

    Args:
        mark: What stands in the environment of every process of the wrapper's.
        grace_s: Seconds from SIGTERM to SIGKILL.
    """
    for name in _SIGNALS:  # what is sent to everybody is not meant for this process
        signal.signal(signal.Signals[name], signal.SIG_IGN)
    sessions: set[int] = set()
    for line in sys.stdin:
        session = int(line)
        sessions = sessions | {session} if session > 0 else sessions - {-session}
    deadline_s = time.monotonic() + grace_s
    asked: set[int] = set()
    while (left := set(_left(mark.encode(), sessions))) and time.monotonic() < deadline_s + _MOST_S:
        is_over = time.monotonic() >= deadline_s
        for pid in left if is_over else left - asked:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL if is_over else signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)  # one that was stopped would never see it
        asked |= left
        time.sleep(_POLL_S)


def _left(mark: bytes, sessions: set[int]) -> Iterator[int]:
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        with contextlib.suppress(OSError, IndexError):
            fields = (folder / "stat").read_bytes().rpartition(b") ")[2].split()
            if fields[_STATE] in (b"Z", b"X"):
                continue
            if int(fields[_SESSION]) in sessions or mark in (folder / "environ").read_bytes():
                yield int(folder.name)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
