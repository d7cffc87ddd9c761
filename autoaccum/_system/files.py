"""Reads and writes files in folders that other programs can write to.

A file is written under another, unpredictable name and then renamed: it is there as a whole or not at all, and no link
or pipe of its name is written through. Only regular files are read: a pipe would be waited for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from autoaccum._arguments import check_path
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from os import PathLike

# The suffix of a file that is being written, which a killed writer leaves behind.
UNFINISHED = ".unfinished"

# O_BINARY exists only on Windows, the others only elsewhere.
_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)
_NONBLOCK = getattr(os, "O_NONBLOCK", 0)
_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)
_COMMON = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)


class NotRegularError(OSError):
    """The file is not a regular one, or larger than any that could have been written here."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.strerror = reason


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
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotRegularError("it is a folder, a pipe or a device, not a file")
    return os.fdopen(descriptor, "rb")


def read(path: Path, most_bytes: int, *, follows: bool = False) -> bytes:
    """Return the content of a regular file, also by a link to it if `follows`.

    Raises:
        NotRegularError: It is not a regular file, or holds more than `most_bytes`.
        OSError: The file cannot be read.
    """
    with open_regular(path, follows=follows) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise NotRegularError(f"it holds more than {most_bytes} bytes")
    return data


@contextlib.contextmanager
def replacing(
    path: Path,
    *,
    ending: str = UNFINISHED,
    mode: int = 0o666,
    before_rename: Callable[[], None] | None = None,
) -> Iterator[Path]:
    """Yield an empty file that replaces `path` when the block ends; if the block raises, it is removed.

    Args:
        path: The file to replace.
        ending: Suffix of the unfinished file's name, by which some libraries choose the format.
        mode: Permissions of the file, subject to the umask.
        before_rename: Runs just before the rename; an exception prevents it.

    Raises:
        OSError: The file cannot be written.
    """
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(8)}{ending}")
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NOFOLLOW | _COMMON, mode))
    try:
        yield unfinished
        if before_rename is not None:
            before_rename()
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)


def write(path: Path, data: bytes, *, mode: int = 0o666) -> None:
    """Write a complete file; arguments and errors as for `replacing`."""
    with replacing(path, mode=mode) as unfinished:
        unfinished.write_bytes(data)


@contextlib.contextmanager
def beside(path: str | PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to, which replaces a user's file at the end; if the block raises, that is unchanged.

    Raises:
        InvalidInputError: It is no path, the folder does not exist, or permission to write there is missing.
    """
    place = check_path("path", path, "file to write")
    try:
        with replacing(place, ending=place.suffix) as unfinished:
            yield unfinished
    except OSError as error:
        raise _refused(repr(str(place)), error.strerror or str(error)) from error


def check_place(path: str | PathLike[str], option: str) -> None:
    """Raise if the path of an option cannot be written, before there is anything to write.

    Raises:
        InvalidInputError: The folder does not exist, or permission to write there is missing.
    """
    place, reason = Path(path), ""
    if place.is_dir():
        reason = "it is a folder"
    elif not place.parent.is_dir():
        reason = "there is no such folder"
    elif not os.access(place.parent, os.W_OK | os.X_OK):
        reason = "no permission"
    if reason:
        raise _refused(f"{option} {str(place)!r}", reason)


def _refused(asked: str, reason: str) -> InvalidInputError:
    return InvalidInputError(
        f"{asked} cannot be written ({reason}); pass a file in an existing folder that you may write to"
    )


def flush_folder(folder: Path) -> None:
    """Flush the names in a folder to disk; a system or file system that cannot do that is no error."""
    if not hasattr(os, "O_DIRECTORY"):
        return  # Windows cannot flush folders
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH:
            raise
    finally:
        os.close(descriptor)
