"""Handles signals, errors and checkpoint intervals: each leaves a checkpoint of the last whole state."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from autoaccum import _oom
from autoaccum._engine import devices
from autoaccum._system import signals
from autoaccum._training.rank_coordination import END, SAVE, STOP
from autoaccum.errors import (
    AutoaccumError,
    CheckpointError,
    DeviceLostError,
    RankFailedError,
    StartAgainError,
    StateDamagedError,
    StepCompleteError,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from autoaccum._training.checkpoints import Checkpoints
    from autoaccum._training.fit_context import FitContext
    from autoaccum._training.plan_lifecycle import PlanLifecycle
    from autoaccum._training.progress import TrainingProgress


class Interrupts:
    """Runs a training to its end, or saves its progress in a checkpoint if something interrupts it.

    Args:
        call: The call of `fit`.
        progress: Tracks the state of the loop.
        lifecycle: Holds the current runner.
        checkpoints: Writes checkpoints; None without `checkpoint`.
    """

    def __init__(
        self, call: FitContext, progress: TrainingProgress, lifecycle: PlanLifecycle, checkpoints: Checkpoints | None
    ) -> None:
        self._progress, self._lifecycle, self._all_checkpoints = progress, lifecycle, checkpoints
        self._process = os.getpid()
        self._world, self._step, self._notices = call.world, call.step, call.notices
        self._watch = signals.SignalGuard(waits=not call.world.is_alone)
        self._outer: BaseException | None = None  # an error that the caller of `fit` is handling

    @property
    def _checkpoints(self) -> Checkpoints | None:
        """As above; None in a process that was forked from the one that trains."""
        return self._all_checkpoints if os.getpid() == self._process else None

    def watching(self) -> AbstractContextManager[object]:
        """Return a context that handles signals; a signal that ends the process takes effect when the context ends."""
        if self._checkpoints is None:
            return nullcontext()
        if not signals.can_be_handled():
            self._notices.say(
                "checkpoint: SIGTERM and SIGUSR1 write none, since fit was called outside of the main thread, where "
                "Python handles no signals (as in a worker of Ray Train); those at intervals and at the end are written"
            )
        return self._watch.handling()

    # --- between two windows ------------------------------------------------------------------------------------------

    def requests(self, ahead: int) -> int:
        """Return what this process requests after a window: bits of `SAVE`, `END` and `STOP`.

        Args:
            ahead: 0 for the window that was just made, 1 for the one in progress.
        """
        stop = 0 if self._lifecycle.observers.reason is None else STOP
        if self._checkpoints is None:
            return stop
        is_due = self._world.is_main and self._checkpoints.is_due(self._progress.state.windows + ahead)
        is_due = is_due or self._watch.is_save_requested
        return stop | (SAVE if is_due else 0) | (SAVE | END if self._watch.is_ending else 0)

    def after_window(self) -> bool:
        """Save or end if any process requests it after a window; return whether any requests to stop.

        Raises:
            RankFailedError: Another process was asked to end.
        """
        requests = self._world.requests_of_all(self.requests)
        if requests & SAVE:
            self._save()
        if requests & END:
            self._end()
        self._watch.raise_if_terminated()
        return bool(requests & STOP)

    def after_evaluation(self) -> None:
        """Save after an evaluation with the lowest loss so far."""
        if self._checkpoints is not None:
            is_best = self._world.is_main and self._checkpoints.has_best_state
            if any(self._world.gather("best", is_best)):
                self._save()

    def _end(self) -> None:
        """End because SIGTERM has reached this process or another one; a single one may have a handler that returns."""
        if self._watch.is_ending:
            self._watch.end()
            if self._world.is_alone:
                return
        raise RankFailedError(
            f"a process of this training was asked to end (SIGTERM) after step {self._progress.state.windows}; the "
            "same call resumes from its checkpoint"
        )

    def _save(self) -> bool:
        """Write a checkpoint of this state; return False if it was refused because it would not be finite."""
        assert self._checkpoints is not None
        self._world.compare_weights(self._step)
        path = self._checkpoints.save()
        if self._watch.is_save_requested:
            self._watch.note_saved()
        if path is None:
            return False
        self._lifecycle.observers.on_checkpoint(path, step=self._progress.state.windows)
        return True

    # --- at the end ---------------------------------------------------------------------------------------------------

    def run(self, train: Callable[[], None]) -> None:
        """Train to the end; if anything interrupts that, leave a checkpoint of the last whole state.

        Args:
            train: Trains from the present state to the end.
        """
        self._outer = sys.exception()
        try:
            self._watch.is_active = True
            train()
            self._world.gather("end", None)  # whether another rank has failed after its last optimizer step
            self._world.compare_weights(self._step)
            if self._checkpoints is not None and not self._checkpoints.has_this_state:
                self._save()
        except StartAgainError as error:
            if self._checkpoints is not None and error.micro_batch is not None:
                try:
                    self._checkpoints.saving.note_out_of_memory(
                        error.micro_batch, str(error), self._checkpoints.storage.guard
                    )
                except OSError as failure:  # must not hide the reason to start again
                    error.add_note(f"autoaccum: that size could not be noted for the next start ({failure.strerror})")
            raise
        except DeviceLostError as error:
            raise self._lost(error) from error
        except BaseException as error:
            # Of any operation, since devices tell of their errors late.
            if isinstance(error, Exception) and not isinstance(error, AutoaccumError) and _oom.is_device_lost(error):
                lost = devices.lost(self._step.memory, error)
                raise self._lost(lost) from error
            self._leave_a_checkpoint(error)
            raise
        finally:
            self._watch.is_active = False

    def _lost(self, lost: DeviceLostError) -> DeviceLostError:
        """Return the error of a lost device, with the checkpoint to go on from."""
        newest = None if self._checkpoints is None else self._checkpoints.storage.newest
        return lost if newest is None else DeviceLostError(f"{lost}, and go on from the checkpoint {newest}")

    def _leave_a_checkpoint(self, error: BaseException) -> None:
        """Write a checkpoint of the last whole state before `error` propagates; a failure to do so becomes a note."""
        self._watch.is_active = False
        if self._checkpoints is None:
            return
        cannot = isinstance(error, CheckpointError) or _oom.is_device_lost(error)
        is_whole = not cannot and not self._is_damaged(error)
        is_whole = self._world.can_save_together(error, is_whole=is_whole) and is_whole
        # Before the first window there is no progress to save.
        step, newest = self._progress.state.windows, self._checkpoints.storage.newest
        is_worth_it = step > 0 and not self._checkpoints.has_this_state
        if isinstance(error, StepCompleteError | StateDamagedError) and not is_whole and newest is not None:
            error.add_note(f"autoaccum: no checkpoint of that moment is written; the last one is {newest}")
        if not is_whole or not is_worth_it:
            return
        try:
            is_saved = self._save()
        except Exception as failure:  # noqa: BLE001 - the first error matters more than any failure here
            reason = _oom.first_line(failure)
            error.add_note(f"autoaccum: no checkpoint of step {step} could be written ({reason})")
            self._notices.say(f"no checkpoint of step {step} could be written ({reason})")
        else:
            why = "SIGTERM" if isinstance(error, signals.Terminated) else type(error).__name__
            if is_saved:
                where = self._checkpoints.storage.newest
                self._notices.say(f"after {why}, step {step} is saved in {where}; the same call resumes there")

    def _is_damaged(self, error: BaseException) -> bool:
        """Whether the state in memory is not the last whole state: no checkpoint may hold half an optimizer step."""
        runner = self._lifecycle.current
        is_behind = self._progress.state.windows != runner.events.windows  # of the optimizer, or before it
        engine = runner.engine
        is_lost = engine.has_lost_parameters or engine.is_half_done
        return not self._progress.is_whole or is_behind or is_lost or self._is_of_damage(error)

    def _is_of_damage(self, error: BaseException | None) -> bool:
        """Whether an error is of damage, or is an interrupt that waited for the optimizer step to end, and hides it."""
        if error is None or error is self._outer:
            return False
        return isinstance(error, StateDamagedError) or self._is_of_damage(error.__context__)
