"""The exceptions that autoaccum raises itself.

Every message says what was asked, what was found and what to try next. An exception from the user's own model,
loss, loader or callback is never wrapped: it arrives as it was raised. The exception is what fails after the optimizer
has stepped, where whoever catches it has to know that the update is made: `UpdateCompleteError`, raised from it.
"""


class AutoaccumError(Exception):
    """Base of every error that autoaccum raises itself."""


class InvalidInputError(AutoaccumError, ValueError):
    """An argument, a batch or a recipe cannot be used; nothing was changed."""


class DeviceMissingError(InvalidInputError):
    """The device that was asked for is not there; nothing was changed."""


class DoesNotFitError(AutoaccumError):
    """Not even the smallest micro-batch fits in the memory there is; everything is as it was before the call."""


class DeviceLostError(AutoaccumError):
    """The device reported an error after which this process can no longer use it; start a new process."""


class StateDamagedError(AutoaccumError):
    """The optimizer failed after it had begun to write, so the parameters are part old, part new.

    Training must not go on from here: load a checkpoint. With `checkpoint=`, `fit` goes back to its last one by itself.
    """


class UpdateCompleteError(AutoaccumError):
    """The optimizer has stepped, and something that follows the update failed; `__cause__` is what failed.

    It may be an optimizer's hook, the scheduler, or memory that ran out in either or in what the library notes after an
    update. The window must not be given again: its update is made. Where the message says that what moves with the
    update has not all moved, no checkpoint is written of this moment, and the last one is where to go on from.

    Attributes:
        step: The update that was made, counted as `StepReport.step`; None only where no runner has made it.
    """

    def __init__(self, message: str, step: int | None = None) -> None:
        super().__init__(message)
        self.step = step


class NotFiniteError(AutoaccumError):
    """A window's loss or gradient was NaN or infinite, and `on_nan="stop"` asked to stop there.

    With `checkpoint=`, the last checkpoint whose parameters are finite is kept.
    """


class CheckpointError(AutoaccumError):
    """A checkpoint cannot be written or read, or belongs to something else; the message says if anything changed."""


class CheckpointInUseError(CheckpointError):
    """Another process, which the message names, trains with this checkpoint folder; nothing there was changed.

    Either it was there first and is alive, or it has taken the folder over from this one, which was suspended too long.
    """


class StartAgainError(AutoaccumError):
    """Memory ran out where this process cannot go on, nor can the others of its training: all have to start again.

    From a checkpoint, `fit` goes on in a smaller cut. Uncaught, it ends `autoaccum` with exit code 75 (EX_TEMPFAIL).

    Attributes:
        micro_batch: Samples of the micro-batch that did not fit; None where it was none.
        exit_code: What a script of your own may end with, so that others can tell: 75.
    """

    exit_code = 75  # EX_TEMPFAIL of sysexits.h

    def __init__(self, message: str, micro_batch: int | None = None) -> None:
        super().__init__(message)
        self.micro_batch = micro_batch


class RankFailedError(AutoaccumError):
    """Another process of the same distributed job failed, so this one cannot go on either."""
