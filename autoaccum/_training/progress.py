"""Iterates over windows and tracks the state to resume from.

That is the state after the last whole window. Everything that changes with an optimizer step changes inside
it, while interrupts are held back (`step_made`); everything that changes with an epoch changes together
at its end. A checkpoint holds this state, and a resumed run begins from it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import shown
from autoaccum._data.loader_memory import of_order
from autoaccum._data.loader_state import Track
from autoaccum._data.regrouping import TOKENS_ARE
from autoaccum._data.splits import is_default
from autoaccum._engine.window_runner import as_step_complete
from autoaccum._records import SAMPLES, TOKENS
from autoaccum._training.checkpoint_contents import LoopState
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from autoaccum._data.batches import Window
    from autoaccum._data.loader_state import Position
    from autoaccum._records import Evaluation
    from autoaccum._training.fit_context import FitContext


class TrainingProgress:
    """Iterates over a loader's epochs, window by window.

    Attributes:
        state: The state after the last whole window.
        is_whole: Whether model, optimizer and scheduler are in that state; False during an optimizer step.
    """

    def __init__(self, call: FitContext) -> None:
        self._call = call
        self._schedule, self._memory, self._world = call.schedule, call.step.memory, call.world
        self._random = None if call.saving is None else call.random  # else no state is kept
        self._track = Track(call.world.loader, self._random, call.world.split)
        self.state = LoopState(0, 0, self._track.at_start(1))
        self.is_whole = True
        self._windows: Iterator[Window] | None = None
        self._first: Window | None = None
        self._coming: Position = self.state.position
        self._next = self.state
        self._has_begun = False  # whether other processes were asked about this epoch

    @property
    def stopped(self) -> str | None:
        """Why a callback has ended the run early; None if none has, or if this call's length is another one."""
        stopped = self.state.stopped
        return None if stopped is None or stopped != self._stopped(stopped["reason"]) else str(stopped["reason"])

    def stop(self, reason: str) -> None:
        """End the training in this state, for a reason."""
        self.state = replace(self.state, stopped=self._stopped(reason))

    def _stopped(self, reason: str) -> dict[str, Any]:
        return {"reason": reason, "epochs": self._call.epochs, "max_steps": self._call.max_steps}

    @property
    def is_over(self) -> bool:
        """Whether training has reached its end."""
        if self.stopped is not None:
            return True
        windows, position = self.state.windows, self.state.position
        if self._call.epochs is not None and position.epoch > self._call.epochs:
            return True
        if self._call.max_steps is None or windows < self._call.max_steps:
            return False
        return position.closed or windows > self._call.max_steps

    @property
    def windows_ahead(self) -> int | None:
        """Number of windows still to come; None if unknown."""
        if self._call.max_steps is not None:
            return self._call.max_steps - self.state.windows
        if self._call.steps_per_epoch is None or self._call.epochs is None:
            return None
        return self._call.steps_per_epoch * self._call.epochs - self.state.windows

    def close(self) -> None:
        """Release the epoch's windows and with them the processes that load them."""
        self._windows = self._first = None
        self._track.close()

    # --- windows ------------------------------------------------------------------------------------------------------

    def first_part(self) -> Window:
        """Return the first window; `next_window` will return it again.

        Raises:
            InvalidInputError: The loader is empty.
        """
        windows = self._begin_epoch()
        with self._memory.lifted():
            first = next(windows, self._world.at_end)
        if first is None or not self._world.has_anything(first):
            raise self.no_window()
        self._first = first
        self._world.check_samples_differ(first)
        return first

    def no_window(self) -> InvalidInputError:
        """Return the error of a loader that gives no window."""
        dropped = ""
        if self._call.drop_last:
            dropped = (
                f" or less than target_{'batch' if self._call.counts == SAMPLES else 'tokens'}="
                f"{self._call.target_batch} {self._call.counts}, which drop_last=True leaves out"
            )
        split = self._world.split
        counted = "" if is_default(split) else f" with a sample, as split={shown(split)} counts them"
        if self._call.counts == TOKENS:
            counted = (
                f"{counted}{', and' if counted else ''} with a token, as target_tokens= counts them ({TOKENS_ARE})"
            )
        return InvalidInputError(
            f"the loader gave no batch{counted}{dropped}, so there is nothing to train on; check the length of its "
            "dataset, and the DataLoader's own drop_last=True, which leaves out fewer samples than a batch"
        )

    def next_window(self) -> Window | None:
        """Return the next window; None at the end of the epoch or of the training.

        The random state is read first: if the window comes to nothing, it is that of the last whole one.

        Errors of the loader propagate unchanged; they are never treated as failures of a step.
        """
        if self._random is not None:
            self.state = replace(self.state, random=self._random.capture())
        windows = self._begin_epoch() if self._windows is None else self._windows
        if self._ends_here:
            return None
        first, self._first = self._first, None
        if first is None:
            with self._memory.lifted():  # a data set may start processes to load a sample
                first = next(windows, None)
        window = self._world.at_end if first is None else first
        if window is not None:
            self._coming = self._track.after(window)
        return window

    def has_nothing(self, window: Window | None) -> bool:
        """Whether the epoch has no windows at all, given its first one; asked once per epoch."""
        if self._has_begun:
            return False
        self._has_begun = True
        return not self._world.has_anything(window)

    @property
    def _ends_here(self) -> bool:
        return self.state.windows == self._call.max_steps or self.stopped is not None

    def _begin_epoch(self) -> Iterator[Window]:
        # Worker processes start here and would inherit the limit.
        with self._memory.lifted():
            batches = self._track.begin(self.state.position.epoch)
        self._has_begun = False
        self._windows = self._world.windows(batches, skip=0)
        return self._windows

    # --- the state ----------------------------------------------------------------------------------------------------

    def prepare(self, samples: int) -> None:
        """Make the state that follows an optimizer step, while the step can still be undone if memory runs out.

        Args:
            samples: Number of samples in the window, over all processes.
        """
        now = self.state
        windows, samples = now.windows + 1, now.samples + samples
        self._next = replace(now, windows=windows, samples=samples, position=self._coming, random=None, stopped=None)

    def step_made(self, *, skipped: bool) -> None:
        """Advance everything that moves with an optimizer step, while interrupts are held back.

        Only the user's scheduler can fail here.

        Args:
            skipped: Whether the gradient scaler skipped the optimizer step.
        """
        self.is_whole = False
        if not skipped:  # a skipped window does not count for the scheduler
            self._schedule.after("step")
        self.state = self._next
        self._world.note_step(self._next.windows)
        self.is_whole = True

    @property
    def ends_training(self) -> bool:
        """Whether the epoch that ends now is the last one."""
        epochs = self._call.epochs
        return self._ends_here or (epochs is not None and self.state.position.epoch >= epochs)

    def move_on(self, evaluation: Evaluation | None, *, ends_epoch: bool) -> None:
        """Advance everything that moves between two windows.

        Args:
            evaluation: The evaluation of this state, if any.
            ends_epoch: Whether the epoch's last window, or the last of all, is done.

        Raises:
            StepCompleteError: The scheduler failed.
        """
        self.is_whole = False
        state, position = self.state, self.state.position
        try:
            if evaluation is not None:
                self._schedule.after_evaluation(evaluation)
                state = replace(state, evaluated=state.windows, last_val_loss=evaluation.loss)
            if ends_epoch and not position.closed:
                self._schedule.after("epoch")
        except Exception as error:
            raise as_step_complete(error, state.windows, has_moved=False) from error
        if ends_epoch and self._ends_here:  # the epoch may have more windows
            position = replace(position, closed=True)
        elif ends_epoch:
            position, self._windows = self._track.at_start(position.epoch + 1), None
        self.state = replace(state, position=position, random=None)
        self.is_whole = True

    def go_to(self, state: LoopState) -> None:
        """Restore the loader and the random generators to a state of the loop.

        Raises:
            CheckpointError: The loader is not the one of that state.
        """
        assert self._random is not None
        earlier, before, position = self.state, self._random.capture(), state.position
        self.state, self._windows, self._first = state, None, None
        if not self.is_over:
            try:
                with self._memory.lifted():
                    batches = self._track.go_to(position)
            except BaseException:
                self.state = earlier
                self._random.restore(before)
                raise
            if position.start is not None:  # of several ranks, one may have drawn nothing in an epoch that has begun
                self._has_begun = True
                self._windows = self._world.windows(batches, skip=position.used)
        self._random.restore(state.random or before)

    @property
    def differences(self) -> list[str]:
        """In what the return to a state is not exact, in words."""
        position, windows, val_every = self.state.position, self.state.windows, self._call.val_every
        is_due = position.whole == position.length
        if self._schedule.on_plateau and val_every is not None:
            is_due = windows % val_every == 0
        if not position.closed or not position.batches or is_due or self.is_over or not self._schedule.moves_by_epochs:
            return self._track.differences
        moved = (
            f"the run before ended after step {windows}, within epoch {position.epoch}, where its "
            f"{type(self._schedule.scheduler).__name__} moved as at an epoch's end; if the epoch goes on, that is one "
            "move more than an uninterrupted run makes"
        )
        return [*self._track.differences, moved]

    def taken_over(self, state: LoopState) -> LoopState:
        """Return the state from which this training resumes, given that of other processes."""
        position = state.position if state.position.batches else replace(state.position, loader_state=None)
        if not self._world.is_main:  # what rank 0 draws in its dataset is its own
            position = replace(position, memory=of_order(position.memory))
        # Only rank 0 keeps the random state: it draws the order of the coming epochs.
        return replace(
            state, position=position, random=state.random if self._world.is_main else self._call.random.capture()
        )
