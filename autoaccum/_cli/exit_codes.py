"""Exit codes of all commands, and the errors they stand for.

An error of autoaccum is one line on stderr; any other keeps its traceback.
"""

from __future__ import annotations

import enum
import sys

import click

from autoaccum._launch.diagnosis import DOES_NOT_FIT
from autoaccum._system.output import drop_pending, write_line
from autoaccum.errors import (
    AutoaccumError,
    CheckpointError,
    DoesNotFitError,
    InvalidInputError,
    StartAgainError,
)


class ExitCode(enum.IntEnum):
    """Exit codes; `--help` and docs/reference.md describe them."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    BAD_INPUT = 3
    DOES_NOT_FIT = DOES_NOT_FIT
    DAMAGED = 5
    SMALLER = 6
    NO_DEVICE = 7
    WRONG = 8
    START_AGAIN = StartAgainError.exit_code
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.DONE: "done; report: it fits",
    ExitCode.UNEXPECTED: "an unexpected error, with its traceback",
    ExitCode.USAGE: "the command line cannot be parsed",
    ExitCode.BAD_INPUT: "bad input: an option, a script, or a job that Slurm refuses",
    ExitCode.DOES_NOT_FIT: "it does not fit in memory, at any size that was allowed",
    ExitCode.DAMAGED: "the device was lost: start a new process",
    ExitCode.SMALLER: "report: it fits, but only in smaller micro-batches than required",
    ExitCode.NO_DEVICE: "report: the device is missing or busy",
    ExitCode.WRONG: "verify: gradients depend on how the batch is split",
    ExitCode.START_AGAIN: "your script's, to be restarted by run with a smaller micro-batch",
    ExitCode.INTERRUPTED: "interrupted by Ctrl-C",
}

# The first match counts.
_CODES: tuple[tuple[type[AutoaccumError], ExitCode], ...] = (
    (InvalidInputError, ExitCode.BAD_INPUT),
    (CheckpointError, ExitCode.BAD_INPUT),
    (DoesNotFitError, ExitCode.DOES_NOT_FIT),
    (StartAgainError, ExitCode.START_AGAIN),
    (AutoaccumError, ExitCode.DAMAGED),
)


def code_for(error: AutoaccumError) -> ExitCode:
    """Return the exit code of an error."""
    return next(code for kind, code in _CODES if isinstance(error, kind))


def complain(text: str) -> None:
    """Write a line to stderr with autoaccum's prefix."""
    write_line(f"autoaccum: {text}")


def print_result(text: str) -> None:
    """Print a result to stdout, or exit with code 1 if that fails."""
    try:
        if sys.stdout is None:
            raise OSError("it is closed")  # noqa: TRY301 - like a failed write
        click.echo(text)
    except (OSError, ValueError) as error:
        drop_pending(sys.stdout)
        reason = getattr(error, "strerror", None) or error
        complain(f"error: the result could not be written to stdout ({reason})")
        raise click.exceptions.Exit(ExitCode.UNEXPECTED) from None
