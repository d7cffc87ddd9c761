"""The exceptions that autoaccum raises.

Every message says what was asked, what was found and what to try next. Exceptions from the user's own model, loss,
loader or callbacks propagate unchanged, except after the optimizer has stepped: `StepCompleteError`, raised from the
original exception, tells the caller that the optimizer step is made.
"""

from __future__ import annotations

from typing import Any


class AutoaccumError(Exception):
    """Base class of all exceptions that autoaccum raises."""


class InvalidInputError(AutoaccumError, ValueError):
    """An argument, a batch or a script is invalid; nothing was changed."""


class SavingRefusedError(InvalidInputError):
    """`save_memory=` does not go with this model or loss; everything is as it was before the step."""


class LossWarning(UserWarning):
    """The gradient of a window may differ from that of the whole batch, because of how its loss is written."""


class DeviceMissingError(InvalidInputError):
    """The requested device does not exist; nothing was changed."""


class DoesNotFitError(AutoaccumError):
    """Not even the smallest micro-batch fits in memory; everything is as it was before the call.

    Attributes:
        saving_helps: Whether a step that keeps less for its backward pass (`save_memory=`) might fit; False if memory
            ran out for the optimizer's own step.
        where: The window, and the place in it of the sample that does not fit alone; None if it is none.
    """

    saving_helps = True
    where: tuple[Any, int] | None = None


class DeviceLostError(AutoaccumError):
    """The device failed and this process can no longer use it; start a new process."""


class StateDamagedError(AutoaccumError):
    """The optimizer, or a hook on its step, failed after it had begun to write: parameters are part old, part new.

    Training must not continue from this state; load a checkpoint. With `checkpoint=`, the same call of `fit` resumes
    from its last one.
    """


class StepCompleteError(AutoaccumError):
    """The optimizer has stepped, but something that follows it failed; `__cause__` is the original exception.

    The scheduler failed, or memory ran out in it or in the library's own bookkeeping. Do not train on the window again:
    its optimizer step is made. If the message says that not all state has moved with the optimizer step, no checkpoint
    of this state is written; resume from the last one.

    Attributes:
        step: Number of the optimizer step that was made, as in `StepReport.step`.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class NotFiniteError(AutoaccumError):
    """A window's loss or gradient norm was NaN or infinite, with `on_nan="stop"`.

    With `checkpoint=`, the last checkpoint with finite parameters is kept.
    """


class CheckpointError(AutoaccumError):
    """A checkpoint cannot be written or read, or belongs to another run; the message says whether anything changed."""


class CheckpointInUseError(CheckpointError):
    """Another process, named in the message, trains with this checkpoint folder; nothing in the folder was changed.

    Either that process was first and is alive, or the file system let it in while this one was suspended.
    """


class StartAgainError(AutoaccumError):
    """Memory ran out at a point from which no process of the training can continue; all of them must be restarted.

    When restarted from a checkpoint, `fit` cuts windows smaller. Uncaught, this error ends the `autoaccum` command with
    exit code 75 (EX_TEMPFAIL).

    Attributes:
        micro_batch: Size of the micro-batch that did not fit; None if no micro-batch was running.
        exit_code: The exit code that your own script should use for this error: 75.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h

    def __init__(self, message: str, micro_batch: int | None = None) -> None:
        super().__init__(message)
        self.micro_batch = micro_batch


class RankFailedError(AutoaccumError):
    """Another process of the same distributed job failed, so this one cannot continue."""
