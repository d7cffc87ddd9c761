"""Reads and writes files in folders that other programs can write to.

A file is written under another, unpredictable name and then renamed: it is there as a whole or not at all, and no link
or pipe of its name is written through.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum._arguments import check_path
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from io import BufferedReader
    from os import PathLike

# The suffix of a file that is being written, which a killed writer leaves behind.
UNFINISHED = ".unfinished"

_CANNOT_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EBADF)


class NotAFileError(OSError):
    """What has the name of a file is a pipe, a socket or a device."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file for reading. Anything else is refused: opening a pipe would wait for a writer.

    Raises:
        NotAFileError: It is no regular file.
        OSError: It cannot be opened.
    """
    try:
        file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115 - the caller's; no path takes an opener
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket
            raise NotAFileError(errno.EINVAL, "it is no regular file", str(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotAFileError(errno.EINVAL, "it is no regular file", str(path))
    return file


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read(path: Path, most_bytes: int) -> bytes:
    """Return the content of a file.

    Raises:
        ValueError: It holds more than `most_bytes`, so nothing here has written it.
        OSError: It cannot be read.
    """
    with open_regular(path) as file:
        data = file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"it holds more than {most_bytes} bytes")
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
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
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
