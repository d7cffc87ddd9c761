"""Runs commands one after the other, each as a whole tree of processes, and returns how each ended.

A command gets a session of its own. A terminal then sends its signals to this process alone, which forwards each once
to the command's whole process group; stopping this process stops all of it. The price: the command cannot open /dev/tty
(reading stdin works). No process outlives its command: it gets a moment, then SIGTERM, then SIGKILL. Where this process
itself is killed, `watchdog.py` does that. The supervisor is meant for a process that does nothing else.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Self

from autoaccum._launch import watchdog
from autoaccum._launch.deaths import Ended
from autoaccum._launch.descendants import Descendants, send, send_to_group
from autoaccum._launch.stderr import Stderr

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import FrameType

# As Kubernetes waits by default before it kills a container, and torchrun before it kills a worker.
GRACE_S = 30.0
# Workers of loaders see within a second that their parent is gone.
_MOMENT_S = 1.0
_POLL_S = 0.05

_MARK = "AUTOACCUM_RUN_MARK"
_ENDS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_PASSED_ON = ("SIGUSR1", "SIGUSR2")
# As shells report a command that cannot be started.
_CANNOT_EXECUTE = 126
_NOT_FOUND = 127


class Supervisor:
    """Runs commands, and forwards signals to the running one, within a `with` block.

    Ignored signals stay ignored, for the command too, as `nohup` wants it. Outside the main thread no signal is
    forwarded.

    Args:
        grace_s: Seconds from the first signal that asks for the end to SIGKILL.
        stderr: The descriptor for stderr; None for this process's own.

    Attributes:
        ended_by: The signal that asked for the end; None before.
    """

    def __init__(self, *, grace_s: float = GRACE_S, stderr: int | None = None) -> None:
        self.ended_by: int | None = None
        self._grace_s = grace_s
        self._target = stderr
        self._mark = secrets.token_hex(16)
        self._group: int | None = None
        self._stderr: Stderr | None = None
        self._kill_at_s: float | None = None
        self._cleans_up = False
        self._unsent: int | None = None  # a signal that came while no command ran
        self._descendants = Descendants()
        self._watchdog: subprocess.Popen[bytes] | None = None
        self._former: dict[int, Any] = {}
        self._woken = (-1, -1)
        self._former_wakeup = -1

    def __enter__(self) -> Self:
        self._descendants.__enter__()
        self._start_watchdog()
        self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if threading.current_thread() is threading.main_thread():
            self._former_wakeup = signal.set_wakeup_fd(self._woken[1], warn_on_full_buffer=False)
            for name in _ENDS:
                self._handle(signal.Signals[name], self._on_end)
            for name in _PASSED_ON:
                self._handle(signal.Signals[name], self._on_pass_on)
            self._handle(signal.SIGTSTP, self._on_stop)
            self._handle(signal.SIGCONT, self._on_continue)
            self._handle(signal.SIGWINCH, self._on_resize)
            self._handle(signal.SIGCHLD, lambda *_: None)  # so that it wakes the loop
        return self

    def __exit__(self, *_: object) -> None:
        for number, former in self._former.items():
            signal.signal(number, former)
        if self._former:
            signal.set_wakeup_fd(self._former_wakeup)
        for descriptor in self._woken:
            os.close(descriptor)
        assert self._watchdog is not None
        assert self._watchdog.stdin is not None
        self._watchdog.stdin.close()  # which ends it
        self._watchdog.wait()
        self._descendants.__exit__()

    def run(self, arguments: Sequence[str], environment: Mapping[str, str]) -> Ended:
        """Run a command to its end, and end the processes it leaves.

        Args:
            arguments: The program and its arguments; there is no shell.
            environment: All environment variables of the command.

        Returns:
            How it ended; with 127 or 126 where it could not be started.
        """
        marked = {**environment, _MARK: f"{environment.get(_MARK, '')}:{self._mark}"}
        with Stderr(self._target) as self._stderr:
            try:
                process = subprocess.Popen(  # noqa: S603 - the user's own command
                    list(arguments),
                    env=marked,
                    stderr=self._stderr.theirs,
                    start_new_session=True,
                    close_fds=False,  # inherited descriptors are meant for the command
                )
            except OSError as error:
                is_missing = isinstance(error, FileNotFoundError | NotADirectoryError)
                return Ended(_NOT_FOUND if is_missing else _CANNOT_EXECUTE, refusal=error.strerror or str(error))
            self._stderr.hand_over()
            self._watch(process.pid)
            try:
                self._wait_for(process)
                self._clean_up()
                self._stderr.drain()
            finally:
                self._tell_watchdog(-process.pid)
            code = process.returncode
            tail = self._stderr.tail
        return Ended(code, tail=tail) if code >= 0 else Ended(None, -code, tail)

    # --- waiting ------------------------------------------------------------------------------------------------------

    def _watch(self, pid: int) -> None:
        self._tell_watchdog(pid)
        self._group = pid
        unsent, self._unsent = self._unsent, None
        if unsent is not None:
            send_to_group(pid, unsent)

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if self._kill_at_s is not None and time.monotonic() >= self._kill_at_s:
                send_to_group(process.pid, signal.SIGKILL)
                send(self._descendants.alive(), signal.SIGKILL)
                self._kill_at_s = time.monotonic() + _MOMENT_S
            if self._look(None if self._kill_at_s is None else self._kill_at_s - time.monotonic()):
                self._descendants.reap_orphans(process.pid)
        # Before it is reaped, after which the kernel may use its number again.
        self._group = None
        process.wait()

    def _clean_up(self) -> None:
        """Wait a moment for the processes that the command left, then send SIGTERM, then SIGKILL."""
        self._cleans_up = True
        began_s = time.monotonic()
        asked = False
        while left := self._descendants.alive():
            now_s = time.monotonic()
            if self._kill_at_s is not None and now_s >= self._kill_at_s:
                send(left, signal.SIGKILL)
            elif not asked and now_s - began_s >= _MOMENT_S:
                asked = True
                self._kill_at_s = self._kill_at_s or now_s + self._grace_s
                send(left, signal.SIGTERM)
                send(left, signal.SIGCONT)
            self._look(_POLL_S)
        self._descendants.reap_orphans()
        self._cleans_up = False
        if self.ended_by is None:
            self._kill_at_s = None

    def _look(self, seconds: float | None) -> bool:
        """Pass on some of stderr, or wait for it until a signal comes or the time is over.

        Returns:
            Whether a signal came, or may have come.
        """
        poll = select.poll()
        poll.register(self._woken[0], select.POLLIN)
        assert self._stderr is not None
        waits = self._stderr.waits_for()
        if waits is not None:
            poll.register(*waits)
        if not self._former:  # nothing wakes a thread other than the main one
            seconds = _POLL_S if seconds is None else min(seconds, _POLL_S)
        ready = [descriptor for descriptor, _ in poll.poll(None if seconds is None else max(0.0, seconds * 1000))]
        if self._woken[0] in ready:
            os.read(self._woken[0], 512)
        if waits is not None and waits[0] in ready:
            self._stderr.work()
        return self._woken[0] in ready or not self._former

    # --- signals ------------------------------------------------------------------------------------------------------

    def _handle(self, number: int, handler: Any) -> None:
        former = signal.getsignal(number)
        if former not in (signal.SIG_IGN, None) or number == signal.SIGCHLD:
            self._former[number] = former
            signal.signal(number, handler)

    def _on_end(self, number: int, _frame: FrameType | None) -> None:
        if self.ended_by is None:
            self.ended_by = number
            self._kill_at_s = time.monotonic() + self._grace_s
        if self._group is None and not self._cleans_up:
            self._unsent = number
        self._on_pass_on(number, _frame)

    def _on_pass_on(self, number: int, _frame: FrameType | None) -> None:
        if self._group is not None:
            send_to_group(self._group, number)
        elif self._cleans_up:
            send(self._descendants.alive(), number)

    def _on_stop(self, _number: int, _frame: FrameType | None) -> None:
        # Not SIGTSTP, for which a process group without a terminal does not stop.
        send(self._descendants.alive(), signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)

    def _on_continue(self, _number: int, _frame: FrameType | None) -> None:
        send(self._descendants.alive(), signal.SIGCONT)

    def _on_resize(self, number: int, _frame: FrameType | None) -> None:
        if self._stderr is not None:
            self._stderr.resize()
        self._on_pass_on(number, _frame)

    # --- the watchdog -------------------------------------------------------------------------------------------------

    def _start_watchdog(self) -> None:
        self._watchdog = subprocess.Popen(  # noqa: S603 - our own file
            [sys.executable, "-I", "-S", watchdog.__file__, self._mark, str(self._grace_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._descendants.spare(self._watchdog.pid)

    def _tell_watchdog(self, session: int) -> None:
        assert self._watchdog is not None
        assert self._watchdog.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._watchdog.stdin.write(f"{session}\n".encode())
            self._watchdog.stdin.flush()
