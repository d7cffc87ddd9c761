"""Writes files atomically: under another name in the same folder first, then renamed."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum._arguments import check_path
from autoaccum._system import safe_files
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike


def check_place(path: str | PathLike[str], option: str = "") -> None:
    """Raise if a path cannot be written, before there is anything to write.

    Args:
        path: The path.
        option: The command-line option it came from, for the message.

    Raises:
        InvalidInputError: The folder does not exist, or permission to write there is missing.
    """
    place = Path(path)
    if place.is_dir():
        raise _refused(place, "it is a folder", option)
    if not place.parent.is_dir():
        raise _refused(place, "there is no such folder", option)
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise _refused(place, "no permission", option)


@contextmanager
def beside(path: str | PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to, which replaces `path` at the end; if the block raises, `path` is unchanged.

    Raises:
        InvalidInputError: It is no path, the folder does not exist, or permission to write there is missing.
    """
    place = check_path("path", path, "file to write")
    try:
        with safe_files.replacing(place, ending=place.suffix) as unfinished:
            yield unfinished
    except OSError as error:
        raise _refused(place, error.strerror or str(error)) from error


def _refused(place: Path, reason: str, option: str = "") -> InvalidInputError:
    asked = f"{option} {str(place)!r}" if option else repr(str(place))
    return InvalidInputError(
        f"{asked} cannot be written ({reason}); pass a file in an existing folder that you may write to"
    )
