"""A script that ends the processes of `autoaccum run` if `run` itself is killed.

Only the wrapper holds the other end of its standard input. Through this pipe the wrapper sends the id of each session
it starts, one per line, and the negative id when the session is over, because ids are reused. When the pipe closes,
every process of a remaining session, and every process with the wrapper's mark in its environment, gets SIGTERM and,
after the grace period, SIGKILL. After an orderly end none is left. A process that has cleared its environment and left
its session is not found. The script needs /proc, and imports only the standard library because it starts with every
command.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

_POLL_S = 0.05
# A process that survives SIGKILL this long hangs in the kernel.
_MOST_S = 10.0
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
# Fields of /proc/PID/stat after the name: state, parent, group, session.
_STATE, _SESSION = 0, 3


def main(mark: str, grace_s: float) -> None:
    """Wait for the wrapper to end, then end its processes.

    Args:
        mark: A text in the environment of every process of the wrapper.
        grace_s: Seconds from SIGTERM to SIGKILL.
    """
    for name in _SIGNALS:
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
                os.kill(pid, signal.SIGCONT)  # a stopped process does not handle signals
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
