"""Wraps errors raised after the optimizer has stepped in one that states the optimizer step was made.

This module does not decide whether the optimizer step was made, and restores nothing.
"""

from __future__ import annotations

from autoaccum._oom import first_line, is_oom
from autoaccum.errors import UpdateCompleteError


def wrapped(error: BaseException, step: int, *, has_moved: bool) -> BaseException:
    """Return the exception to raise for an error that came after an optimizer step: the error itself if it can stay.

    Interrupts pass through unchanged, and so do callback errors once everything that moves with it (the
    scheduler) has moved; a note on them states that the optimizer step was made. Out-of-memory errors are always
    wrapped, because they would be mistaken for the window's own.
    """
    if isinstance(error, UpdateCompleteError):
        return error
    rest = (
        "everything that moves with it has moved"
        if has_moved
        else "not all that moves with it (the scheduler) has moved"
    )
    if isinstance(error, Exception) and (not has_moved or is_oom(error)):
        then = "go on with the next window"
        if not has_moved:
            then = (
                "do not make this window again; fix what failed, and resume from the last checkpoint, or start over if "
                "there is none"
            )
        what = f"what follows it failed ({type(error).__name__}: {first_line(error)})"
        return UpdateCompleteError(f"optimizer step {step} is made, and {rest}: {what}; {then}", step)
    error.add_note(f"autoaccum: optimizer step {step} is made, and {rest}")
    return error
