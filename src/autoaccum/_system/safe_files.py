"""Opens files in places that others may write to: no link is followed when a file is made, and no pipe is waited for.

A name that can be guessed may be taken already, by a link to a file of the user's, by a FIFO (opening one waits for its
other end) or by a device. So files are created exclusively, under a name that is free, and only regular files are read.
"""

from __future__ import annotations

import os
import secrets
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


def create(path: Path) -> BinaryIO:
    """Create a file and open it for writing.

    Raises:
        FileExistsError: There is something of that name, be it a link to nothing.
        OSError: It cannot be created.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _COMMON, 0o666), "wb")


def create_beside(place: Path, *, is_hidden: bool = False) -> Path:
    """Create an empty file in the folder of another, under a name that nobody can guess, and return its path.

    Args:
        place: Its name is a part of the new one, and its ending (which tells some writers what to write) the new one's.
        is_hidden: Whether the name begins with a dot.

    Raises:
        OSError: It cannot be created.
    """
    dot = "." if is_hidden else ""
    path = place.with_name(f"{dot}{place.stem}.{os.getpid()}.{secrets.token_hex(8)}{place.suffix}")
    create(path).close()
    return path


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
