"""Opens files in places that others may write to: no link is followed when a file is made, and no pipe is waited for.

A name that can be guessed may be taken already, by a link to a file of the user's, by a FIFO (opening one waits for its
other end) or by a device. So files are created exclusively, under a name that is free, and only regular files are read.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pathlib import Path

# Windows has the third, and the others only elsewhere.
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_COMMON = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class NotRegularError(OSError):
    """What is there is no regular file, or more than could have been written."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.strerror = reason


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a file and open it for writing.

    Raises:
        FileExistsError: Something has that name, be it a link to nothing.
        OSError: The file cannot be created.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _COMMON, mode), "wb")


def open_regular(path: Path, *, follows: bool = False) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: Where it is.
        follows: Whether a link of that name is followed.

    Raises:
        NotRegularError: It is a folder, a pipe or a device.
        OSError: It cannot be opened; a link is one that cannot where it is not followed.
    """
    descriptor = os.open(path, os.O_RDONLY | _NONBLOCK | _COMMON | (0 if follows else _NOFOLLOW))
    try:
        _refuse_others(os.fstat(descriptor).st_mode)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def _refuse_others(mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise NotRegularError("it is a folder, a pipe or a device, and no file")


def read(path: Path, most_bytes: int, *, follows: bool = False) -> bytes:
    """Return what a regular file holds.

    Raises:
        NotRegularError: It is no regular file, or holds more than `most_bytes`.
        OSError: It cannot be read.
    """
    with open_regular(path, follows=follows) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise NotRegularError(f"it holds more than {most_bytes} bytes")
    return data
