"""What a user can hang on to a call of `fit`: one small protocol, and two loggers that use it.

Callbacks are called on the training thread, between windows. Whatever one raises ends the call and arrives unchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from autoaccum._arguments import shown
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from autoaccum._records import Evaluation, FitResult, MemoryEvent, Plan, ProbeResult, StepReport, Trial


class Callback:
    """Base of all callbacks; every method does nothing, so override what you need."""

    def on_fit_start(self, *, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> None:
        """`fit` has checked its arguments; None means that the number is not known (or, for epochs, not set)."""

    def on_trial(self, trial: Trial) -> None:
        """The probe has tried one size."""

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """A plan was made and holds from window `step` on; `probe` is set where a probe led to it."""

    def on_step(self, report: StepReport, *, epoch: int) -> None:
        """A window is done; reading `report.loss` waits for the device."""

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:
        """Memory ran out in window `step`; what failed was undone, and the window goes on in a smaller cut."""

    def on_epoch_end(self, epoch: int) -> None:
        """An epoch's windows are done; epochs count from 1."""

    def on_evaluation(self, evaluation: Evaluation, *, epoch: int, step: int) -> None:
        """The validation data has been gone through after epoch `epoch`."""

    def on_checkpoint(self, path: Path, *, step: int) -> None:
        """A checkpoint of the state after window `step` was written."""

    def on_resume(self, path: Path, *, step: int, epoch: int) -> None:
        """Training goes on, in epoch `epoch`, from the checkpoint of window `step`: what was told beyond is void.

        This comes at the beginning of a call that resumes, and where a call goes back to its last checkpoint.
        """

    def on_fit_end(self, result: FitResult | None) -> None:
        """`fit` is about to return `result`, or to raise (then it is None). Always called once after `on_fit_start`."""


def check_callbacks(callbacks: object) -> None:
    """Check the argument `callbacks`.

    Raises:
        InvalidInputError: It is no list (or tuple) of callbacks.
    """
    if isinstance(callbacks, Callback):
        raise InvalidInputError(f"callbacks={shown(callbacks)} is a single callback; pass [it]")
    if not isinstance(callbacks, list | tuple) or not all(isinstance(one, Callback) for one in callbacks):
        raise InvalidInputError(f"callbacks={shown(callbacks)} must be a list of autoaccum.Callback objects")
