"""Runs commands one after another, each with its whole process tree, and returns how each ended.

A command gets its own session. A terminal then sends signals only to this process, which forwards each once to the
command's process group; stopping this process stops all of it. In exchange, the command cannot open /dev/tty (reading
stdin works). No process outlives its command: after a moment it gets SIGTERM, then SIGKILL. If this process itself is
killed, `watchdog.py` does that. The supervisor is meant for a process that does nothing else.
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

# The default of Kubernetes before it kills a container, and of torchrun before it kills a worker.
GRACE_S = 30.0
# Loader workers notice within a second that their parent is gone.
_MOMENT_S = 1.0
_POLL_S = 0.05

_MARK = "AUTOACCUM_RUN_MARK"
_ENDS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")
_PASSED_ON = ("SIGUSR1", "SIGUSR2")
# Exit codes with which shells report a command that cannot be started.
_CANNOT_EXECUTE = 126
_NOT_FOUND = 127


class Supervisor:
    """Runs commands, and forwards signals to the running one, within a `with` block.

    Ignored signals stay ignored, also for the command, as `nohup` requires. Outside the main thread, signals are not
    forwarded.

    Args:
        grace_s: Seconds from the first signal that asks for the end to SIGKILL.
        stderr: The descriptor for stderr; None for this process's own.

    Attributes:
        ended_by: The signal that asked for the end; None until then.
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
        self._unsent: int | None = None  # a signal received while no command was running
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
        """Run a command to its end, and end the processes it leaves behind.

        Args:
            arguments: The program and its arguments; there is no shell.
            environment: All environment variables of the command.

        Returns:
            How it ended; exit code 127 or 126 if it could not be started.
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
        # Before it is reaped, because the kernel may then reuse its id.
        self._group = None
        process.wait()

    def _clean_up(self) -> None:
        """Wait briefly for the processes that the command left behind, then send SIGTERM, then SIGKILL."""
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
        """Forward some of stderr, or wait for it until a signal arrives or the time is up.

        Returns:
            Whether a signal arrived, or may have.
        """
        poll = select.poll()
        poll.register(self._woken[0], select.POLLIN)
        assert self._stderr is not None
        waits = self._stderr.waits_for()
        if waits is not None:
            poll.register(*waits)
        if not self._former:  # signals wake only the main thread
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
        # Not SIGTSTP, which does not stop a process group without a terminal.
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
