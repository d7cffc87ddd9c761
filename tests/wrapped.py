"""Commands under `autoaccum run` in a process of its own, forked from this one so that torch is imported once."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

from autoaccum._launch.run import Options, run_command
from autoaccum.errors import AutoaccumError

# For a machine that others use, too; shorter than the time that a test has.
LONG_S = 240
_NUMBERS = itertools.count()


@dataclass
class Wrapper:
    """A wrapper that runs.

    Attributes:
        pid: Its process id.
        out: Where its stdout goes.
        err: Where its stderr goes.
    """

    pid: int
    out: Path
    err: Path

    def send(self, number):
        os.kill(self.pid, number)

    def wait(self):
        """Wait for its end; return its exit code, negative for a signal that ended it."""
        ended = until(lambda: os.waitpid(self.pid, os.WNOHANG)[1:] if has_ended(self.pid) else None)
        return os.waitstatus_to_exitcode(ended[0])

    @property
    def told(self):
        """The lines that are the wrapper's own."""
        return [line for line in self.err.read_text().splitlines() if line.startswith("autoaccum: ")]


def has_ended(pid):
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def until(condition):
    """Wait for a condition to give something, and return that."""
    deadline = time.monotonic() + LONG_S
    while not (found := condition()):
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.005)
    return found


def start(folder, command, *, prepare=lambda: None, **options):
    """Start a wrapper, which first calls `prepare`; what it writes goes to files in a folder."""
    number = next(_NUMBERS)
    out, err = folder / f"out-{number}", folder / f"err-{number}"
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of a fork beside threads: the child starts none of its own
        pid = os.fork()
    if pid == 0:
        code = 70
        try:
            become(out, err)
            prepare()
            code = run_command([str(argument) for argument in command], Options(**options))
        except AutoaccumError as error:
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        except BaseException as error:  # noqa: BLE001 - the child must not go on as the parent
            sys.excepthook(type(error), error, error.__traceback__)
        os._exit(code)
    return Wrapper(pid, out, err)


def become(out, err):
    """Make this process, which was forked, one whose streams go to files."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    for descriptor, path in ((1, out), (2, err)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        os.dup2(file, descriptor)
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", closefd=False)


def run(folder, command, **options):
    """Run a wrapper to its end; return it and its exit code."""
    wrapper = start(folder, command, **options)
    try:
        return wrapper, wrapper.wait()
    except BaseException:
        with contextlib.suppress(ProcessLookupError):
            os.kill(wrapper.pid, signal.SIGKILL)
        raise


def python(source, *arguments):
    """A command that runs a program of Python's without anything around it: it starts in no time."""
    return [sys.executable, "-I", "-S", "-c", source, *map(str, arguments)]


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    return False


def direct(command):
    """What a command does by itself."""
    return subprocess.run(list(map(str, command)), capture_output=True, check=False, timeout=LONG_S)
