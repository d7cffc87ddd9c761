"""The base class of callbacks, which observe a call of `fit`.

Callbacks run on the training thread, between windows. An exception from a callback ends the call and arrives unchanged,
except `StopTraining`, which ends it in order.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Literal

from autoaccum._arguments import check_choice, check_positive_int, shown
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

    from autoaccum._records import Evaluation, FitResult, MemoryEvent, Plan, ProbeResult, StepReport, Trial


class StopTraining(Exception):  # noqa: N818 - a request, not an error
    """Raised by a method of a callback to end a call of `fit` early.

    Training stops after the current window, or after the epoch's evaluation if that is under way. On several ranks it
    is enough that one asks, and all stop after the same window, which is the next one if `on_step` asks: ranks tell
    each other along with a window. The run is then complete: `fit` evaluates and notifies as after `max_steps`, writes
    a checkpoint, and returns a result whose `stopped` is the reason (docs/long-runs.md).

    Args:
        reason: The reason, for the result and the progress display.

    Raises:
        InvalidInputError: The reason is not a string.
    """

    def __init__(self, reason: str = "a callback asked for it") -> None:
        if not isinstance(reason, str):
            raise InvalidInputError(f"reason={shown(reason)} is not a text; say in a few words why to stop")
        super().__init__(reason)
        self.reason = reason


class Callback:
    """Base class of callbacks. Every method does nothing by default; override the ones you need.

    Any of them may raise `StopTraining` to end the training early.
    """

    def on_fit_start(self, *, epochs: int | None, max_steps: int | None, steps_per_epoch: int | None) -> None:
        """Called after `fit` has checked its arguments; a number is None if it is unknown or not set."""

    def on_trial(self, trial: Trial) -> None:
        """Called after the probe has tried a micro-batch size."""

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:
        """Called when a new plan takes effect, from window `step` on; `probe` is set if a probe led to the plan."""

    def on_step(self, report: StepReport, *, epoch: int) -> None:
        """Called after each window; reading `report.loss` waits for the device."""

    def on_oom(self, event: MemoryEvent, *, step: int) -> None:
        """Called when memory ran out in window `step`; the window is undone and restarted, cut smaller."""

    def on_epoch_end(self, epoch: int) -> None:
        """Called after the last window of an epoch; epochs count from 1.

        After a resume, it may come before any `on_step`.
        """

    def on_evaluation(self, evaluation: Evaluation, *, epoch: int, step: int) -> None:
        """Called after an evaluation in or after epoch `epoch`."""

    def on_checkpoint(self, path: Path, *, step: int) -> None:
        """Called after a checkpoint of the state after window `step` was written."""

    def on_resume(self, path: Path, *, step: int, epoch: int) -> None:
        """Called when training resumes in epoch `epoch` from the checkpoint of window `step`.

        Earlier reports on later windows, of the call before, are void.
        """

    def on_fit_end(self, result: FitResult | None) -> None:
        """Called once after every `on_fit_start`, before `fit` returns `result` or raises (`result` is then None)."""


class EarlyStopping(Callback):
    """Ends training when the evaluations have not improved for a while.

    A resumed call counts anew. With `checkpoint`, the checkpoint with the lowest loss is `FitResult.best_checkpoint`.

    Args:
        patience: Number of evaluations in a row without an improvement after which training ends.
        monitor: What should improve: "loss", or the name of a metric.
        mode: Whether it improves by getting lower ("min") or higher ("max").

    Raises:
        InvalidInputError: An argument cannot be used.
    """

    def __init__(self, patience: int = 3, monitor: str = "loss", mode: Literal["min", "max"] = "min") -> None:
        self._patience = check_positive_int("patience", patience)
        if not isinstance(monitor, str):
            raise InvalidInputError(f"monitor={shown(monitor)} is not a name; pass 'loss' or the name of a metric")
        check_choice("mode", mode, ("min", "max"))
        self._monitor = monitor
        self._sign = 1.0 if mode == "min" else -1.0
        self._best = math.inf
        self._without = 0

    def on_fit_start(self, **_: int | None) -> None:
        """Begin to count."""
        self._best, self._without = math.inf, 0

    def on_evaluation(self, evaluation: Evaluation, *, epoch: int, step: int) -> None:  # noqa: ARG002 - as the base has it
        """Ask to stop if there was no improvement for too long."""
        loss = {} if evaluation.loss is None else {"loss": evaluation.loss}
        known = {**evaluation.metrics, **loss}
        if self._monitor not in known:
            raise InvalidInputError(
                f"monitor={self._monitor!r} is not among what is evaluated: {', '.join(map(repr, known))}; pass one of "
                "these, or that metric as metrics="
            )
        value = self._sign * known[self._monitor]
        if value < self._best:
            self._best, self._without = value, 0
            return
        self._without += 1
        if self._without >= self._patience:
            raise StopTraining(f"{self._monitor} has not improved in {self._without} evaluations")


def check_callbacks(callbacks: object) -> None:
    """Check the argument `callbacks`.

    Raises:
        InvalidInputError: It is no list or tuple of callbacks, or a method of one cannot take what it is called with.
    """
    if isinstance(callbacks, Callback):
        raise InvalidInputError(f"callbacks={shown(callbacks)} is a single callback; pass [it]")
    if not isinstance(callbacks, list | tuple) or not all(isinstance(one, Callback) for one in callbacks):
        raise InvalidInputError(f"callbacks={shown(callbacks)} must be a list of autoaccum.Callback objects")
    for callback in callbacks:
        for name in (name for name in vars(Callback) if name.startswith("on_")):
            _check_method(callback, name)


def _check_method(callback: Callback, name: str) -> None:
    """Check that a method can be called as it will be, which may be hours later."""
    _, *expected = inspect.signature(getattr(Callback, name)).parameters.values()
    named = [one.name for one in expected if one.kind is one.KEYWORD_ONLY]
    given = [one.name for one in expected if one.kind is not one.KEYWORD_ONLY]
    try:
        inspect.signature(getattr(callback, name)).bind(*given, **dict.fromkeys(named))
    except ValueError:  # it has no signature
        return
    except TypeError as error:
        written = ", ".join(["self", *given, *["*"] * bool(named), *named])
        raise InvalidInputError(
            f"callbacks: {type(callback).__name__}.{name} cannot be called as it will be ({error}); write "
            f"def {name}({written})"
        ) from None
