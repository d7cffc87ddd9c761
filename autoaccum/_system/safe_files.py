"""Reads and writes files in folders that others may write to; a file written here is either complete or absent.

A predictable name may already be taken, by a link to a user's file, by a FIFO (opening one waits for its other end) or
by a device. So files are created exclusively, under a free name, and only regular files are read. A file is written
under a temporary name and then renamed: no reader sees half of it, and a killed writer leaves the previous file.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

# The suffix of a file that is being written, which a killed writer leaves behind.
UNFINISHED = ".unfinished"

# O_BINARY exists only on Windows, the others only elsewhere.
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_COMMON = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class NotRegularError(OSError):
    """The file is not a regular one, or larger than any that could have been written here."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.strerror = reason


def create(path: Path, mode: int = 0o666) -> BinaryIO:
    """Create a file and open it for writing.

    Raises:
        FileExistsError: The name is taken, even if by a dangling link.
        OSError: The file cannot be created.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _COMMON, mode), "wb")


def open_regular(path: Path, *, follows: bool = False) -> BinaryIO:
    """Open a regular file for reading.

    Args:
        path: The file.
        follows: Whether to follow a link of that name.

    Raises:
        NotRegularError: It is a folder, a pipe or a device.
        OSError: It cannot be opened, or is a link and `follows` is False.
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
        raise NotRegularError("it is a folder, a pipe or a device, not a file")


def read(path: Path, most_bytes: int, *, follows: bool = False) -> bytes:
    """Return the content of a regular file.

    Raises:
        NotRegularError: It is not a regular file, or holds more than `most_bytes`.
        OSError: The file cannot be read.
    """
    with open_regular(path, follows=follows) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise NotRegularError(f"it holds more than {most_bytes} bytes")
    return data


@contextmanager
def replacing(
    path: Path,
    *,
    ending: str = UNFINISHED,
    mode: int = 0o666,
    overwrites: bool = True,
    flushes_rename: bool = False,
    before_rename: Callable[[], None] | None = None,
) -> Iterator[Path]:
    """Yield an empty file that replaces `path` when the block ends; if the block raises, it is removed.

    Args:
        path: The file to replace.
        ending: Suffix of the unfinished file's name, by which some libraries choose the format.
        mode: Permissions of the file, subject to the umask.
        overwrites: Whether to replace an existing file.
        flushes_rename: Whether to flush the rename to disk, so that it survives a power loss. The block flushes the
            file itself, through the descriptor that it writes to.
        before_rename: Runs just before the rename; an exception prevents it.

    Raises:
        FileExistsError: The file exists, and `overwrites` is False.
        OSError: The file cannot be written.
    """
    # An unpredictable name, so that nobody else writes to the file that is renamed.
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{ending}")
    create(unfinished, mode).close()
    try:
        yield unfinished
        if before_rename is not None:
            before_rename()
        if overwrites:
            unfinished.replace(path)
        else:
            os.link(unfinished, path)
        if flushes_rename:
            _flush_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write(path: Path, data: bytes, *, mode: int = 0o666, overwrites: bool = True) -> None:
    """Write a complete file; arguments as for `replacing`.

    Raises:
        FileExistsError: The file exists, and `overwrites` is False.
        OSError: The file cannot be written.
    """
    with replacing(path, mode=mode, overwrites=overwrites) as unfinished:
        unfinished.write_bytes(data)


def _flush_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows cannot flush folders
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
