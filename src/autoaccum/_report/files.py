"""Files that are whole or not there: each is written beside its place and renamed."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum._system import safe_files
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike


def check_place(path: str | PathLike[str], option: str = "") -> None:
    """Refuse a place where no file can be written, before there is anything to write.

    Args:
        path: The place.
        option: By which the user gave it, for the message.

    Raises:
        InvalidInputError: There is no such folder, or no permission to write there.
    """
    place = Path(path)
    if place.is_dir():
        raise _refused(place, "it is a folder", option)
    if not place.parent.is_dir():
        raise _refused(place, "there is no such folder", option)
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise _refused(place, "no permission", option)


@contextlib.contextmanager
def beside(path: str | PathLike[str]) -> Iterator[Path]:
    """Yield a path to write to, which takes the place of `path` at the end; where the block raises nothing changes.

    Raises:
        InvalidInputError: There is no such folder, or no permission to write there.
    """
    place = Path(path)
    try:
        with safe_files.replacing(place, ending=place.suffix) as unfinished:
            yield unfinished
    except OSError as error:
        raise _refused(place, error.strerror or str(error)) from error


def _refused(place: Path, reason: str, option: str = "") -> InvalidInputError:
    asked = f"{option} {str(place)!r}" if option else repr(str(place))
    return InvalidInputError(
        f"{asked} cannot be written ({reason}); pass a file in a folder that is there and that you may write to"
    )
