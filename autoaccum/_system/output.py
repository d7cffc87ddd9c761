"""Writes lines to stderr, and drops those that cannot be written: output errors never end a training.

The reader of a pipe may have exited, the disk of a log may be full, or stderr closed. The next line that can be written
reports how many were dropped.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from typing import Any, TextIO

_dropped = 0


def write_line(text: str, file: TextIO | None = None) -> bool:
    """Write a line; return False if that fails.

    Args:
        text: The line.
        file: The stream; None for the current `sys.stderr`, which can itself be None.
    """
    global _dropped  # noqa: PLW0603 - stderr is the process's
    stream = sys.stderr if file is None else file
    if stream is None:
        return False
    missing = f"autoaccum: {_dropped} lines before this one could not be written\n" if _dropped and file is None else ""
    try:
        stream.write(f"{missing}{text}\n")
        stream.flush()
    except (OSError, ValueError):  # ValueError: a closed file, or a character missing in its encoding
        drop_pending(stream)
        if file is None:
            _dropped += 1
        return False
    if file is None:
        _dropped = 0
    return True


def drop_pending(stream: Any) -> None:
    """Drop buffered output that cannot be written: Python would retry at exit, and end with exit code 120.

    A buffer can only be emptied by writing it, so the descriptor temporarily points to the null device.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError):
        descriptor = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            kept = _duplicate(descriptor)
            os.dup2(null, descriptor)
            try:
                stream.flush()
            finally:
                if kept is not None:
                    os.dup2(kept, descriptor)
                    os.close(kept)
                else:
                    os.close(descriptor)
        finally:
            os.close(null)


def _duplicate(descriptor: int) -> int | None:
    """Return a duplicate of a descriptor; None if it is closed."""
    try:
        return os.dup(descriptor)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None


class Dropping:
    """A text stream that drops output that cannot be written, for libraries that write to it themselves.

    Args:
        stream: The stream; None for a closed one.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        if self._stream is not None:
            try:
                self._stream.write(text)
            except (OSError, ValueError):
                drop_pending(self._stream)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or drop its buffer."""
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                drop_pending(self._stream)

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return is_terminal(self._stream)

    def fileno(self) -> int:
        """Return the stream's descriptor."""
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()

    @property
    def encoding(self) -> str:
        """The stream's encoding."""
        return getattr(self._stream, "encoding", None) or "utf-8"


def is_terminal(stream: Any) -> bool:
    """Whether a stream, which may be None or closed, is a terminal."""
    try:
        return stream is not None and bool(stream.isatty())
    except (OSError, ValueError):
        return False


def stand_in_for_closed() -> None:
    """Open the null device for standard streams that the process was started without (`2>&-`).

    Otherwise the next opened file gets such a descriptor, and output for stdout or stderr goes into that file. A closed
    stdout stays None, so that it is known when a result is lost.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            if null != descriptor:
                os.dup2(null, descriptor)
                os.close(null)
            setattr(sys, name, None)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - for the life of the process
