"""Logs lines under "autoaccum", or writes them to stderr: each is seen once. Output errors never end a training.

The reader of a pipe may have exited, the disk of a log may be full, or stderr closed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from typing import Any, TextIO

_LOGGER = logging.getLogger("autoaccum")


def log(text: str, level: int = logging.INFO) -> None:
    """Log a line under "autoaccum"; where no handler takes it, write it to stderr, as logging does warnings.

    The level of the root logger, which is WARNING unless it is set, keeps no line from the user; that of "autoaccum"
    does.
    """
    if _is_taken(level):
        with contextlib.suppress(Exception):  # of a user's handler: a line that is lost ends no training
            _LOGGER.log(level, "%s", text)
    elif (_LOGGER.level or logging.INFO) <= level > _LOGGER.manager.disable and not _LOGGER.disabled:
        write_line(f"autoaccum: {text}")


def _is_taken(level: int) -> bool:
    """Whether a handler takes a line of this level."""
    logger: logging.Logger | None = _LOGGER if _LOGGER.isEnabledFor(level) else None
    while logger is not None:
        if any(handler.level <= level for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


def write_line(text: str) -> None:
    """Write a line to the current `sys.stderr`, which can be None, or drop it."""
    stream = BrokenPipeSafe(sys.stderr)
    stream.write(f"{text}\n")
    stream.flush()


def drop_pending(stream: Any) -> None:
    """Drop buffered output that cannot be written: Python would retry at exit, and end with exit code 120.

    A buffer can only be emptied by writing it, so the descriptor temporarily points to the null device.
    """
    with contextlib.suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as null:  # noqa: PTH123
        descriptor, kept = stream.fileno(), None
        with contextlib.suppress(OSError):
            kept = os.dup(descriptor)
        os.dup2(null.fileno(), descriptor)
        try:
            stream.flush()
        finally:
            if kept is None:  # it was closed
                os.close(descriptor)
            else:
                os.dup2(kept, descriptor)
                os.close(kept)


class BrokenPipeSafe:
    """A text stream that drops output that cannot be written, for libraries that write to it themselves.

    Args:
        stream: The stream; None for a closed one.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text, or drop it."""
        self._try("write", text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream, or drop its buffer."""
        self._try("flush")

    def isatty(self) -> bool:
        """Whether the stream is a terminal."""
        return is_terminal(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _try(self, name: str, *arguments: str) -> None:
        if self._stream is not None:
            try:
                getattr(self._stream, name)(*arguments)
            except (OSError, ValueError):
                drop_pending(self._stream)


def is_terminal(stream: Any) -> bool:
    """Whether a stream, which may be None or closed, is a terminal."""
    try:
        return stream is not None and bool(stream.isatty())
    except (OSError, ValueError):
        return False
