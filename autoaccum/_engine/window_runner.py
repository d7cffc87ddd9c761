"""Makes exactly one optimizer step from one window, or raises an error and leaves everything as it was before.

`WindowRunner.step` is the story of an optimizer step. What may be repeated stands in one attempt (`window.py`). Once
the optimizer has stepped there is no way back: later failures are raised as `StepCompleteError`, and the window must
not be repeated. Nothing here waits for the device where a hand-written loop would not.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from autoaccum._data.order import arranged, largest_first
from autoaccum._data.splits import ListOfSamples
from autoaccum._engine import devices, optimizers
from autoaccum._engine.forward_backward import drop_old_gradients
from autoaccum._engine.noise_scale import shuffled
from autoaccum._engine.peers import Peers
from autoaccum._engine.window import Engine
from autoaccum._engine.window_checks import no_gradient
from autoaccum._loss.loss_values import not_finite
from autoaccum._oom import first_line, is_device_lost, is_oom
from autoaccum._records import DeviceScalar, StepReport
from autoaccum._system import signals
from autoaccum.errors import StepCompleteError

if TYPE_CHECKING:
    from collections.abc import Callable

    from autoaccum._data.batches import Window
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.gradients import WindowResult
    from autoaccum._engine.noise_scale import NoiseScale
    from autoaccum._sizing.events import Events
    from autoaccum._sizing.sizing import Sizing
    from autoaccum._system.notices import Notices


class WindowRunner:
    """Makes one optimizer step from each window.

    Args:
        step: The training step.
        sizing: Cuts the windows.
        events: Counts windows and reports out-of-memory errors.
        notices: Reports choices made on the user's behalf.
        peers: The processes that make the windows together; None if this one is alone.
        allocate_ahead: Allocates what `step_made` needs, while there is a way back, and again on a retry; given the
            window's samples, over all processes. None for nothing.
        step_made: Moves everything that moves with an optimizer step, as soon as it is made, before a pending
            interrupt is delivered; told whether the scaler `skipped` it. None for nothing.
        noise: The gradient noise scale to measure; None without `noise_scale`.

    Attributes:
        engine: Computes gradients of windows.
    """

    def __init__(
        self,
        step: TrainingStep,
        sizing: Sizing,
        events: Events,
        notices: Notices,
        *,
        peers: Peers | None = None,
        allocate_ahead: Callable[[int], None] | None = None,
        step_made: Callable[..., None] | None = None,
        noise: NoiseScale | None = None,
    ) -> None:
        self._step = step
        self._noise = noise
        # A loss over the window may depend on the order of its samples; a mean over them does not.
        in_parts = step.options.loss_scope == "micro_batch"
        self._sorts = in_parts and isinstance(step.objective.split, ListOfSamples)
        self.sizing = sizing
        self.events = events
        self._notices = notices
        self._peers = peers or Peers(step)
        self._allocate_ahead = allocate_ahead
        self._step_made = step_made
        self.engine = Engine(step, sizing, events, notices, peers=self._peers, noise=noise)
        # A loss that is not finite is an error only in the first window: later it may result from the training itself.
        self._checks_finite = events.windows == 0
        # Of the current window: the number of its optimizer step, and how many were made before it; whether everything
        # that moves with it has moved; the learning rates of each group.
        self._number, self._made_before, self._has_moved = events.windows + 1, step.optimizer_steps.made, False
        self._rates: tuple[DeviceScalar | None, ...] = ()
        drop_old_gradients(step, notices)

    def step(self, part: Window) -> StepReport | None:
        """Make one optimizer step from one window.

        Returns:
            What was done; None if no process has a sample of the window.
        """
        started = time.perf_counter()
        engine, peers, steps, number = self.engine, self._peers, self._step.optimizer_steps, self.events.windows + 1
        self._number, self._made_before, self._has_moved = number, steps.made, False
        measures = self._noise is not None and self._noise.is_due(number) and self.sizing.is_stable
        part = (shuffled(part, number) if measures else self._in_order(part)).made_of(part)
        try:
            drop_old_gradients(self._step, self._notices)
            try:
                engine.begin(part, is_made=self._is_made, on_change=self._on_change, measures_noise=measures)
                while True:
                    with engine.attempt():
                        given = engine.gradient()
                        steps.reserve(peers.expected_gradients())
                        reduced = peers.reduce(given)
                        if not reduced.samples:
                            engine.restore()
                            return None
                        self._check(reduced)
                        reduced = peers.decide(reduced)
                        skipped = self._step_optimizer()
                        break
            except BaseException as error:
                engine.give_up(error)
                raise
            finally:
                engine.end()
            elapsed_s = time.perf_counter() - started
            if part.samples:
                engine.learn_from_window(elapsed_s)
            if steps.has_new_gradients:  # some are trained that were not
                engine.checks.void()
            return self._report(reduced, elapsed_s, skipped=skipped)
        except BaseException as error:
            if self._is_made():
                self._raise_as_step_complete(error)
            raise
        finally:
            steps.drop_reservation()

    def _in_order(self, part: Window) -> Window:
        """Return a window of lists of samples in order of size; another, just like the last, as a `KnownWindow`."""
        if self._sorts:
            part = largest_first(part)
            order = self.sizing.filling(part)
            return part if order is None else arranged(part, order)
        batch = part.plain_batch() if part.kinds is None else None
        known = None if batch is None else self.engine.checks.known(batch)
        return part if known is None else known

    def _check(self, reduced: WindowResult) -> None:
        """Reject an unusable optimizer step, and prepare what moves with it, while there is a way back."""
        if self.engine.checks_all:
            if self._checks_finite:
                values = {name: parts.total().item() for name, parts in reduced.losses.items()}
                if not all(map(math.isfinite, values.values())):
                    raise not_finite(values)
            if not self._step.holds_gradients():
                raise no_gradient(self._step.parameters)
            self._checks_finite = False
        if self._allocate_ahead is not None:
            self._allocate_ahead(reduced.samples)

    def _step_optimizer(self) -> bool:
        """Step the optimizer, and move everything that moves with it; return whether the scaler skipped it."""
        self._rates = optimizers.learning_rates(self._step.optimizer)
        with signals.deferred():  # inside the optimizer an interrupt would leave half an optimizer step
            skipped = self._peers.commit()
            self.events.windows = self._number
            self._step.clear_gradients()
            if self._step_made is not None:
                self._step_made(skipped=skipped)
            self._has_moved = True
        return skipped

    def _report(self, reduced: WindowResult, elapsed_s: float, *, skipped: bool) -> StepReport:
        """Return the report on the window that was just made."""
        noise = None
        if self._noise is not None and reduced.spread is not None and not skipped:
            self._noise.learn(reduced.spread, reduced.samples)
            noise = self._noise.samples
        return StepReport(
            step=self.events.windows,
            elapsed_s=elapsed_s,
            skipped=skipped,
            device_learning_rates=self._rates,
            device_grad_norm=None if reduced.grad_norm is None else DeviceScalar(reduced.grad_norm),
            noise_scale=noise,
            **self.engine.reported(reduced),
        )

    def _raise_as_step_complete(self, error: BaseException) -> None:
        """Raise a failure after the optimizer step as an error which states that it is made, unless it already does."""
        self.events.windows = self._number  # only an assignment: whatever else fails, this window counts as done
        self._step.clear_gradients()
        if is_device_lost(error):
            raise devices.lost(self._step.memory, error) from error
        said = as_step_complete(error, self._number, has_moved=self._has_moved)
        if said is error:
            return
        try:
            raise said from error
        finally:
            del said  # otherwise it and this frame, which holds the runner, would hold each other

    def _on_change(self) -> None:
        """Drop what new parameters hold, and report once any that need a gradient but are not in the optimizer."""
        drop_old_gradients(self._step, self._notices)
        held = set(self._step.held())
        if left := sum(p.requires_grad and p not in held for p in self._step.parameters):
            self._notices.say(
                f"the model or the optimizer has changed: {left} parameters that need a gradient are not in the "
                "optimizer, so they stay as they are; optimizer.add_param_group(...) adds them",
                key="parameters that stay",
            )

    # --- what others see ----------------------------------------------------------------------------------------------

    def _is_made(self) -> bool:
        """Whether the optimizer step of the current window is made."""
        return self._step.optimizer_steps.made != self._made_before

    @property
    def is_past_return(self) -> bool:
        """Whether the optimizer step of the most recent window is made, here or by other processes."""
        return self._is_made() or self._peers.is_decided


def as_step_complete(error: BaseException, step: int, *, has_moved: bool) -> BaseException:
    """Return the exception to raise for an error that came after an optimizer step: the error itself if it can stay.

    Interrupts pass through unchanged, and so do callback errors once everything that moves with the optimizer step (the
    scheduler) has moved; a note on them states that the optimizer step was made. Out-of-memory errors are always
    wrapped, because they would be mistaken for the window's own.
    """
    if isinstance(error, StepCompleteError):
        return error
    rest, then = "everything that moves with it has moved", "go on with the next window"
    if not has_moved:
        rest = "not all that moves with it (the scheduler) has moved"
        then = (
            "do not make this window again; fix what failed, and resume from the last checkpoint, or start over if "
            "there is none"
        )
    if isinstance(error, Exception) and (not has_moved or is_oom(error)):
        what = f"what follows it failed ({type(error).__name__}: {first_line(error)})"
        return StepCompleteError(f"optimizer step {step} is made, and {rest}: {what}; {then}", step)
    error.add_note(f"autoaccum: optimizer step {step} is made, and {rest}")
    return error
