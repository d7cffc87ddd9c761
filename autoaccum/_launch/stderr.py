"""Forwards a command's stderr to ours, byte by byte as it arrives, and keeps its end.

If our stderr is a terminal, the command gets a pseudo-terminal of the same size, so that it draws its progress bars;
otherwise a pipe. The command inherits our stdin and stdout. If stdout and stderr go to one file, bytes are in the order
in which they arrive.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import select
import sys
import termios
from typing import Self

# PIPE_BUF on Linux: a write of this size does not block if poll reports room.
_CHUNK_BYTES = 4096
# Room for thousands of lines of other ranks after the failed rank's traceback.
_TAIL_BYTES = 1 << 22
# The last bytes through a pseudo-terminal arrive a moment after the end.
_QUIET_MS = 100


class Stderr:
    """One command's stderr.

    Attributes:
        theirs: The descriptor for the command.
        ours: The descriptor to read from; None once it is at its end.
    """

    def __init__(self, target: int | None = None) -> None:
        self._target = sys.__stderr__.fileno() if target is None and sys.__stderr__ is not None else target
        self._tail = bytearray()
        self._pending = b""
        self._is_terminal = self._target is not None and os.isatty(self._target)
        self.ours: int | None
        self.ours, self.theirs = pty.openpty() if self._is_terminal else os.pipe()
        if self._is_terminal:
            self._resemble()
        os.set_blocking(self.ours, False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.hand_over()
        self._close()

    @property
    def tail(self) -> str:
        """The last bytes, as text."""
        return bytes(self._tail).decode(errors="replace").replace("\r\n", "\n")

    def hand_over(self) -> None:
        """Close our copy of the command's end, after the command has started."""
        if self.theirs >= 0:
            os.close(self.theirs)
            self.theirs = -1

    def resize(self) -> None:
        """Resize the command's terminal to ours."""
        if self._is_terminal and self.ours is not None and self._target is not None:
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._target, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self.ours, termios.TIOCSWINSZ, size)

    def waits_for(self) -> tuple[int, int] | None:
        """Return the descriptor and event to wait for with `select.poll` before `work`; None for none."""
        if self._pending:
            assert self._target is not None
            return self._target, select.POLLOUT
        return None if self.ours is None else (self.ours, select.POLLIN)

    def work(self) -> None:
        """Forward some bytes after the event of `waits_for`; does not block."""
        if self._pending:
            self._write()
        elif self.ours is not None:
            self._read(self.ours)

    def drain(self) -> None:
        """Forward the last bytes after the command has ended, without waiting for what others write later."""
        while (waits := self.waits_for()) is not None:
            poll = select.poll()
            poll.register(*waits)
            if not poll.poll(None if self._pending else _QUIET_MS):
                return
            self.work()

    def _read(self, ours: int) -> None:
        try:
            data = os.read(ours, _CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:  # nobody has the terminal open any more
            data = b""
        if not data:
            self._close()
            return
        self._tail += data
        if len(self._tail) > 2 * _TAIL_BYTES:
            del self._tail[:-_TAIL_BYTES]
        if self._target is not None:
            self._pending = data

    def _write(self) -> None:
        assert self._target is not None
        try:
            self._pending = self._pending[os.write(self._target, self._pending) :]
        except BlockingIOError:
            return
        except OSError:
            # Nobody reads it. The command notices at its next write, as without us.
            self._pending = b""
            self._close()

    def _close(self) -> None:
        if self.ours is not None:
            os.close(self.ours)
            self.ours = None

    def _resemble(self) -> None:
        """Set up the pseudo-terminal like ours, but without output processing, which ours does already."""
        assert self._target is not None
        with contextlib.suppress(termios.error):
            settings = termios.tcgetattr(self._target)
            settings[1] &= ~termios.OPOST
            settings[3] &= ~termios.ECHO
            termios.tcsetattr(self.theirs, termios.TCSANOW, settings)
        self.resize()
