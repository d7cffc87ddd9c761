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
    unfinished = None
    try:
        try:
            # With the same ending: what writes a picture chooses its kind by it.
            unfinished = safe_files.create_beside(place, is_hidden=True)
            yield unfinished
            unfinished.replace(place)
        except OSError as error:
            raise _refused(place, error.strerror or str(error)) from error
    finally:
        if unfinished is not None:
            with contextlib.suppress(OSError):
                unfinished.unlink(missing_ok=True)


def _refused(place: Path, reason: str, option: str = "") -> InvalidInputError:
    asked = f"{option} {str(place)!r}" if option else repr(str(place))
    return InvalidInputError(
        f"{asked} cannot be written ({reason}); pass a file in a folder that is there and that you may write to"
    )
