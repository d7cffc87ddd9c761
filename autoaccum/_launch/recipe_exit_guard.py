"""Turns a recipe's exit, by `sys.exit` or click, into an input error, whatever its exit code.

Otherwise `sys.exit(0)` in a recipe, its model or its loss would end a command with 0, which means "done" for a training
and "it fits" for a report.
"""

from __future__ import annotations

import signal
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum._system.exceptions import contextmanager
from autoaccum._system.own_code import is_own_file
from autoaccum._system.signals import Terminated
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import TracebackType

# By name: the library does not import click, and typer may vendor it.
_EXITS_OF_CLICK = ("Exit", "Abort", "ClickException")
_HINT = "return instead, or raise an exception that says what is wrong"


@contextmanager
def exits_refused(recipe: str | Path) -> Iterator[None]:
    """Turn an exit by a recipe's code inside the block into an error.

    Ctrl-C, SIGTERM and the recipe's own signal handlers keep their effect.

    Args:
        recipe: Its path, optionally with the name of its function.

    Raises:
        InvalidInputError: The recipe exited; the cause is what it raised.
    """
    try:
        yield
    except BaseException as error:
        if not is_exit(error):
            raise
        raise exit_error(recipe, error) from error


def is_exit(error: BaseException) -> bool:
    """Whether an exception is an attempt to end the process."""
    if isinstance(error, KeyboardInterrupt | Terminated | Stopped) or _is_from_signal(error.__traceback__):
        return False
    return not isinstance(error, Exception) or any(
        kind.__name__ in _EXITS_OF_CLICK and kind.__module__.split(".")[0] in ("click", "typer")
        for kind in type(error).__mro__
    )


def exit_error(recipe: str | Path, error: BaseException) -> InvalidInputError:
    """Return the error that says where and how a recipe exited."""
    call = f"sys.exit({error.code!r})" if isinstance(error, SystemExit) else f"{type(error).__name__}({error})"
    return InvalidInputError(f"the recipe {str(recipe)!r} exited by {call}{_place(recipe, error)}; {_HINT}")


def _place(recipe: str | Path, error: BaseException) -> str:
    """Return where it exited: the last frame of the recipe's file, otherwise of the user's code."""
    frames = traceback.extract_tb(error.__traceback__)
    path = Path(recipe)
    path = path if path.suffix == ".py" else Path(str(recipe).rpartition(":")[0])
    own = [frame for frame in frames if Path(frame.filename) == path.resolve()]
    others = [frame for frame in frames if not is_own_file(frame.filename)]
    last = next((group[-1] for group in (own, others, frames) if group), None)
    if last is None:
        return ""
    function = "" if last.name == "<module>" else f", in {last.name}()"
    return f" at {last.filename}:{last.lineno}{function}"


def _is_from_signal(link: TracebackType | None) -> bool:
    """Whether a frame is that of a signal handler."""
    handlers = {
        getattr(handler, "__code__", None)
        for number in signal.valid_signals()
        if callable(handler := signal.getsignal(number))
    } - {None}
    while link is not None:
        if link.tb_frame.f_code in handlers:
            return True
        link = link.tb_next
    return False


class Stopped(BaseException):
    """A signal has ended the training; its checkpoint is written."""
