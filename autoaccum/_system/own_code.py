"""Distinguishes this package's code from the user's in frames and tracebacks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

_NAME = __name__.partition(".")[0]
# Modules of this package that call user code set this name to True: if the arguments do not fit, Python raises in the
# frame of the caller.
_MARK = "CALLS_USER_CODE"


# The folder of the package.
FOLDER = str(Path(__file__).parents[1])


def is_own_file(name: str) -> bool:
    """Whether a file belongs to this package."""
    return Path(FOLDER) in Path(name).parents


def raised_here(error: BaseException) -> bool:
    """Whether an error was raised by this package itself, and not by user code that it calls."""
    link = error.__traceback__
    while link is not None and link.tb_next is not None:
        link = link.tb_next
    return link is not None and _is_own(link.tb_frame) and not link.tb_frame.f_globals.get(_MARK, False)


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] == _NAME
