"""Tracebacks as the command line prints them: without the frames between the shell and the user's code.

Left out are frames of autoaccum, of the command-line parser and of the script that started it, unless autoaccum itself
raised: then the error is its own, and all frames are shown. `--traceback` shows all frames always.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum._system.output import write_line
from autoaccum._system.own_code import is_own_file

if TYPE_CHECKING:
    from collections.abc import Sequence

OPTION = "--traceback"
_END_OF_OPTIONS = "--"
_PARSERS = tuple(
    str(Path(spec.origin).parent)
    for name in ("typer", "click")
    if (spec := importlib.util.find_spec(name)) is not None and spec.origin is not None
)

_shows_all = False


def show_all() -> None:
    """Show all frames from now on."""
    global _shows_all  # noqa: PLW0603 - a setting of the process
    _shows_all = True


def with_option_first(arguments: Sequence[str]) -> list[str]:
    """Return a command line with `--traceback`, which may stand behind the command too, in front of it."""
    end = list(arguments).index(_END_OF_OPTIONS) if _END_OF_OPTIONS in arguments else len(arguments)
    if OPTION not in arguments[:end]:
        return list(arguments)
    return [OPTION, *(one for one in arguments[:end] if one != OPTION), *arguments[end:]]


def show(error: BaseException) -> None:
    """Write an error's traceback to stderr."""
    write_line(text_of(error))


def text_of(error: BaseException) -> str:
    """Return an error's traceback as Python writes it, with the frames that are shown."""
    told = traceback.TracebackException.from_exception(error)
    left_out = 0 if _shows_all else _leave_out(told)
    text = "".join(told.format()).rstrip("\n")
    # Above, since whoever looks for the error looks at the last line.
    return f"({left_out} frames of autoaccum are left out; {OPTION} shows them)\n{text}" if left_out else text


def _leave_out(told: traceback.TracebackException) -> int:
    """Remove the frames that are not the user's from an error and from those that led to it; return their number."""
    found = 0
    for earlier in (told.__cause__, told.__context__):
        if earlier is not None:
            found += _leave_out(earlier)
    frames = told.stack
    if not frames or is_own_file(frames[-1].filename):
        return found
    kept = [frame for frame in frames if not _is_left_out(frame.filename)]
    found += len(frames) - len(kept)
    told.stack = traceback.StackSummary.from_list(kept)
    return found


def _is_left_out(name: str) -> bool:
    return is_own_file(name) or name.startswith((*_PARSERS, "<frozen runpy>")) or Path(name) == Path(sys.argv[0])
