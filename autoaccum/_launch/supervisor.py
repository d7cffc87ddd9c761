"""Runs a command in a session of its own, forwards signals to it, and passes its stderr through.

The session keeps signals of a terminal from reaching the command twice. If our stderr is a terminal, the command gets a
pseudo-terminal of the same size and draws its progress bars; otherwise a pipe. stdin and stdout are the command's. If
this process is killed, the kernel sends SIGTERM to the command (PR_SET_PDEATHSIG). What the command has started, in
sessions of its own too as torchrun's ranks are, ends with a command that is asked to end. Linux only, main thread only.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from autoaccum._system.process_tree import adopt_orphans, descendants

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from types import FrameType

_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
_CHUNK_BYTES = 1 << 16
_TAIL_BYTES = 1 << 20
# The last bytes through a pseudo-terminal arrive a moment after the end; a daemon may write for ever.
_QUIET_S, _DRAIN_S = 0.1, 1.0
_POLL_S = 0.05
# A process that survives SIGKILL this long hangs in the kernel.
_KILLED_S = 5.0

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_LIBC = ctypes.CDLL(None)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended.

    Attributes:
        code: Its exit code as a shell reports it: 128 + N after signal N, 126 or 127 if it could not be started.
        tail: The end of its stderr.
        refusal: Why it could not be started; empty if it was.
    """

    code: int
    tail: str = ""
    refusal: str = ""


class Supervisor:
    """Runs commands one after another, within a `with` block. Ignored signals stay ignored, as `nohup` requires.

    Args:
        grace_s: Seconds from the first signal that asks for the end to SIGKILL.

    Attributes:
        ended_by: The signal that asked for the end; None until then.
    """

    def __init__(self, grace_s: float) -> None:
        self.ended_by: int | None = None
        self._grace_s = max(grace_s, 0.001)  # a timer of 0 s is none
        self._group: int | None = None
        self._stderr: _Stderr | None = None
        self._former: dict[int, Any] = {}
        self._others: set[int] = set()  # processes that were there before
        self._woken, self._wakes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def __enter__(self) -> Self:
        self._others = descendants()
        adopt_orphans(adopts=True)
        signal.set_wakeup_fd(self._wakes, warn_on_full_buffer=False)
        handlers: dict[int, Any] = {
            **dict.fromkeys(_ENDS, self._on_end),
            **dict.fromkeys(_PASSED_ON, self._forward),
            signal.SIGTSTP: self._on_stop,
            signal.SIGWINCH: self._on_resize,
            signal.SIGALRM: self._on_overdue,
            signal.SIGCHLD: lambda *_: None,  # so that it wakes the loop
        }
        for number, handler in handlers.items():
            former = signal.getsignal(number)
            if former not in (signal.SIG_IGN, None) or number == signal.SIGCHLD:
                self._former[number] = former
                signal.signal(number, handler)
        return self

    def __exit__(self, *_: object) -> None:
        adopt_orphans(adopts=False)
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, former in self._former.items():
            signal.signal(number, former)
        signal.set_wakeup_fd(-1)
        os.close(self._woken)
        os.close(self._wakes)

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Ended:
        """Run a command to its end. There is no shell."""
        self._group = None
        with _Stderr() as self._stderr:
            # A signal that comes while the command starts is for the command, too.
            unblocked = signal.pthread_sigmask(signal.SIG_BLOCK, self._former)
            asked_before = self.ended_by
            try:
                process = subprocess.Popen(  # noqa: S603 - the user's own command
                    list(arguments),
                    env=environment,
                    stderr=self._stderr.theirs,
                    start_new_session=True,
                    close_fds=False,  # inherited descriptors are meant for the command
                    preexec_fn=lambda: _begin(unblocked),  # noqa: PLW1509 - this process has one thread
                )
                self._group = process.pid
            except OSError as error:
                is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
                return Ended(127 if is_missing else 126, refusal=error.strerror or str(error))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
            if asked_before is not None:
                self._forward(asked_before)
            self._stderr.hand_over()
            while process.poll() is None:
                ready, _, _ = select.select([self._woken, *self._stderr.ours], [], [])
                if self._woken in ready:
                    os.read(self._woken, 512)
                if len(ready) > (self._woken in ready):
                    self._stderr.pass_on()
            self._stderr.drain()
        if self.ended_by is not None:
            self._wait_for_rest(self._grace_s + _KILLED_S)
        code = process.returncode
        return Ended(code if code >= 0 else 128 - code, self._stderr.tail)

    def end_rest(self) -> None:
        """End what the last command has left: it may hold the memory that the next one needs."""
        for number, seconds in ((signal.SIGTERM, self._grace_s), (signal.SIGKILL, _KILLED_S)):
            self._signal_all(number)
            self._wait_for_rest(seconds)

    def _rest(self) -> set[int]:
        return descendants() - self._others

    def _signal_all(self, number: int) -> None:
        for process in self._rest():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process, number)

    def _wait_for_rest(self, seconds: float) -> bool:
        """Wait until nothing that was started is alive; return False if the time is up first."""
        end = time.monotonic() + seconds
        while self._rest():
            if time.monotonic() >= end:
                return False
            time.sleep(_POLL_S)
        return True

    # --- signals ------------------------------------------------------------------------------------------------------

    def _on_end(self, number: int, _frame: FrameType | None = None) -> None:
        if self.ended_by is None:
            self.ended_by = number
            signal.setitimer(signal.ITIMER_REAL, self._grace_s, 1.0)
        self._forward(number)

    def _on_overdue(self, _number: int, _frame: FrameType | None) -> None:
        self._signal_all(signal.SIGKILL)
        if self._stderr is not None:
            self._stderr.gives_up = True

    def _forward(self, number: int, _frame: FrameType | None = None) -> None:
        if self._group is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._group, number)

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._forward(signal.SIGSTOP)  # not SIGTSTP, which does not stop a group without a terminal
        os.kill(os.getpid(), signal.SIGSTOP)
        self._forward(signal.SIGCONT)

    def _on_resize(self, number: int, _frame: FrameType | None) -> None:
        if self._stderr is not None:
            self._stderr.resize()
        self._forward(number)


class _Stderr:
    """The stderr of one command.

    Attributes:
        ours: The descriptor to read from; none once the command has closed it, or nobody reads ours.
        theirs: The descriptor for the command.
        gives_up: Whether to drop what cannot be written at once, so that a reader that has stopped holds nothing up.
    """

    def __init__(self) -> None:
        self._target = -1 if sys.__stderr__ is None else sys.__stderr__.fileno()
        self._is_terminal = os.isatty(self._target) if self._target >= 0 else False
        reading, self.theirs = pty.openpty() if self._is_terminal else os.pipe()
        self.ours = [reading]
        self.gives_up = False
        self._tail = bytearray()
        if self._is_terminal:
            self._resemble()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hand_over()
        self._close()

    @property
    def tail(self) -> str:
        """The last bytes, as text."""
        return self._tail.decode(errors="replace").replace("\r\n", "\n")

    def hand_over(self) -> None:
        """Close our copy of the command's end, after the command has started."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def resize(self) -> None:
        """Resize the command's terminal to ours."""
        for ours in self.ours if self._is_terminal else ():
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._target, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(ours, termios.TIOCSWINSZ, size)

    def pass_on(self) -> None:
        """Pass on what there is to read."""
        try:
            data = os.read(self.ours[0], _CHUNK_BYTES)
        except OSError:  # nobody has the terminal open any more
            data = b""
        self._tail += data
        del self._tail[:-_TAIL_BYTES]
        if not data or not self._written(data):
            self._close()  # the command notices at its next write, as without us

    def drain(self) -> None:
        """Pass on the last bytes after the command has ended, without waiting for what others write later."""
        end = time.monotonic() + _DRAIN_S
        while self.ours and time.monotonic() < end and select.select(self.ours, [], [], _QUIET_S)[0]:
            self.pass_on()

    def _written(self, data: bytes) -> bool:
        while data and self._target >= 0:
            if not select.select([], [self._target], [], _POLL_S)[1]:
                if self.gives_up:
                    return False
                continue
            try:
                data = data[os.write(self._target, data[: select.PIPE_BUF]) :]  # what a pipe takes without waiting
            except BlockingIOError:
                continue
            except OSError:  # nobody reads it
                return False
        return True

    def _close(self) -> None:
        while self.ours:
            os.close(self.ours.pop())

    def _resemble(self) -> None:
        """Set up the pseudo-terminal like ours, but without output processing, which ours does already."""
        with contextlib.suppress(termios.error):
            settings = termios.tcgetattr(self._target)
            settings[1] &= ~termios.OPOST
            settings[3] &= ~termios.ECHO
            termios.tcsetattr(self.theirs, termios.TCSANOW, settings)
        self.resize()


def _begin(unblocked: Iterable[int], wrapper: int = os.getpid()) -> None:
    """Unblock signals in the command's process, and ask the kernel for SIGTERM when the wrapper has ended."""
    signal.pthread_sigmask(signal.SIG_SETMASK, unblocked)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != wrapper:  # it was killed a moment ago
        os.kill(os.getpid(), signal.SIGTERM)
