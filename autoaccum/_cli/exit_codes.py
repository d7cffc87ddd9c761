"""Exit codes of all commands, and the errors they stand for.

An error of autoaccum is one line on stderr; any other keeps its traceback.
"""

from __future__ import annotations

import enum
import sys
from typing import TYPE_CHECKING, TypeVar

import typer

from autoaccum._cli import tracebacks
from autoaccum._launch.deaths import DOES_NOT_FIT
from autoaccum._system.exceptions import contextmanager
from autoaccum._system.output import drop_pending, write_line
from autoaccum.errors import (
    AutoaccumError,
    CheckpointError,
    CheckpointInUseError,
    DeviceLostError,
    DoesNotFitError,
    InvalidInputError,
    NotFiniteError,
    RankFailedError,
    StartAgainError,
    StateDamagedError,
    UpdateCompleteError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_T = TypeVar("_T")


class ExitCode(enum.IntEnum):
    """Exit codes; `--help` and docs/cli.md describe them."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    BAD_INPUT = 3
    DOES_NOT_FIT = DOES_NOT_FIT
    DAMAGED = 5
    SMALLER = 6
    NO_DEVICE = 7
    IN_USE = 8
    NOT_FINITE = 9
    START_AGAIN = StartAgainError.exit_code
    INTERRUPTED = 130
    TERMINATED = 143


EPILOG = (
    "Exit codes: 0 done, or it fits; 1 unexpected error, with its traceback; 2 command line not understood; "
    "3 bad input or recipe; 4 does not fit in memory; "
    "5 device lost, state damaged or another rank failed, start a new process; "
    "6 fits, but only in smaller micro-batches than required; 7 device busy or missing (report); "
    "8 another process uses the checkpoint folder; "
    "9 loss not finite (--on-nan stop); "
    "75 start again from the checkpoint, with a smaller cut; 130 interrupted; 143 ended by SIGTERM. "
    "run passes on the exit code of its command."
)


@contextmanager
def errors_as_exit_codes() -> Iterator[None]:
    """Turn errors of autoaccum into a message and an exit code; others keep their traceback."""
    try:
        yield
    except KeyboardInterrupt:
        complain("interrupted")
        raise typer.Exit(ExitCode.INTERRUPTED) from None
    except AutoaccumError as error:
        if isinstance(error, UpdateCompleteError):  # usually from the user's scheduler: show where
            tracebacks.show(error)
        complain(f"error: {error}")
        for note in getattr(error, "__notes__", ()):
            complain(note.removeprefix("autoaccum: "))
        raise typer.Exit(code_for(error)) from None


def complain(text: str) -> None:
    """Write a line to stderr with autoaccum's prefix."""
    write_line(f"autoaccum: {text}")


def print_result(text: str, *, done: str) -> None:
    """Print a result to stdout, or exit with code 1 if that fails.

    Args:
        text: The result.
        done: What the command has done nevertheless, for the message.
    """
    try:
        if sys.stdout is None:
            raise OSError("it is closed")  # noqa: TRY301 - like a failed write
        typer.echo(text)
    except (OSError, ValueError) as error:
        drop_pending(sys.stdout)
        reason = getattr(error, "strerror", None) or error
        complain(f"error: the result could not be written to stdout ({reason}); {done}")
        raise typer.Exit(ExitCode.UNEXPECTED) from None


# The first match counts: the error for a folder in use is also a CheckpointError.
_CODES: tuple[tuple[type[AutoaccumError], ExitCode], ...] = (
    (CheckpointInUseError, ExitCode.IN_USE),
    (InvalidInputError, ExitCode.BAD_INPUT),
    (CheckpointError, ExitCode.BAD_INPUT),
    (DoesNotFitError, ExitCode.DOES_NOT_FIT),
    (StartAgainError, ExitCode.START_AGAIN),
    (DeviceLostError, ExitCode.DAMAGED),
    (StateDamagedError, ExitCode.DAMAGED),
    (UpdateCompleteError, ExitCode.DAMAGED),
    (RankFailedError, ExitCode.DAMAGED),
    (NotFiniteError, ExitCode.NOT_FINITE),
)


def code_for(error: AutoaccumError) -> ExitCode:
    """Return the exit code of an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), ExitCode.UNEXPECTED)


def loaded(recipe: str, load: Callable[[str], _T]) -> _T:
    """Load a recipe with `load`, and show the traceback if the recipe raises.

    Raises:
        InvalidInputError: The recipe cannot be used.
    """
    try:
        return load(recipe)
    except InvalidInputError as error:
        if error.__cause__ is not None:
            tracebacks.show(error.__cause__)
        raise
