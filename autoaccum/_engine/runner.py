"""Makes exactly one optimizer step from one window, or raises an error and leaves everything as it was before.

`WindowRunner.step` is the story of an optimizer step: `_engine/window.py` computes the window's gradient, and begins
again where memory runs out; `_finish` reserves memory, reduces the gradient over all processes and steps the optimizer.
After that there is no way back: later failures are raised as `StepCompleteError`, and the window must not be
repeated.

`Runner` has one, and public arguments. Nothing here waits for the device where a hand-written loop would not.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from autoaccum import _oom
from autoaccum._arguments import check_one_batch, shown
from autoaccum._data.batches import as_window, largest_first
from autoaccum._data.loaders import check_loader
from autoaccum._data.random_state import RandomState
from autoaccum._data.splits import ListOfSamples
from autoaccum._engine import devices, optimizer_modes, optimizers, step_complete
from autoaccum._engine.assembly import assemble
from autoaccum._engine.at_work import AtWork
from autoaccum._engine.evaluation import Evaluator
from autoaccum._engine.forward_backward import drop_old_gradients
from autoaccum._engine.noise_scale import NoiseScale, shuffled
from autoaccum._engine.options import Options
from autoaccum._engine.peers import Peers
from autoaccum._engine.savings import Savings
from autoaccum._engine.step_limit import StepLimit, drawn
from autoaccum._engine.window import Engine
from autoaccum._engine.window_checks import no_gradient
from autoaccum._loss.closures import used_by
from autoaccum._loss.loss_values import not_finite
from autoaccum._records import DeviceScalar, Plan, StepReport
from autoaccum._sizing.events import Events
from autoaccum._sizing.sizing import Cutting, Sizing, SizingOptions
from autoaccum._system import signals
from autoaccum._system.notices import Notices
from autoaccum._system.reason_file import writes_reason
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from os import PathLike

    import torch
    from torch import nn

    from autoaccum._callbacks import Callback
    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._engine.forward_backward import TrainingStep
    from autoaccum._engine.gradients import Losses, PartResult, WindowResult
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._loss.loss_sources import Loss
    from autoaccum._memory.base import MemoryBackend

# The attributes that can be set on a runner; setting any other would have no effect.
_SETTABLE = ("plan", "optimizer")


class WindowRunner:
    """Makes one optimizer step from each window.

    Args:
        step: The training step.
        sizing: Cuts the windows.
        events: Counts windows and reports out-of-memory errors.
        notices: Reports choices made on the user's behalf.
        peers: The processes that make the windows together; None if this one is alone.
        prepare: Allocates what `step_made` needs, while the optimizer step can still be abandoned, and again on a
            retry; given the window's samples, over all processes. None for nothing.
        step_made: Moves everything that moves with an optimizer step, as soon as it is made, before a pending
            interrupt is delivered; told whether the scaler `skipped` it. None for nothing.
        noise: The gradient noise scale to measure; None without `noise_scale`.

    Attributes:
        engine: Computes gradients of windows.
        is_at_work: Whether a window has begun and not ended.
    """

    def __init__(
        self,
        step: TrainingStep,
        sizing: Sizing,
        events: Events,
        notices: Notices,
        *,
        peers: Peers | None = None,
        prepare: Callable[[int], None] | None = None,
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
        self._prepare = prepare
        self._step_made = step_made
        self.engine = Engine(step, sizing, events, notices, peers=self._peers, noise=noise)
        # A loss that is not finite is an error only in the first window: later it may result from the training itself.
        self._checks_finite = events.windows == 0
        self.is_at_work = False
        # Of the current window: the number of its optimizer step, and how many were made before it; whether everything
        # that moves with it has moved; the learning rates of each group.
        self._number, self._made_before, self._has_moved = events.windows + 1, step.optimizer_steps.made, False
        self._rates: tuple[DeviceScalar | None, ...] = ()
        drop_old_gradients(step, notices)

    def step(self, part: Window) -> StepReport | None:
        """Make one optimizer step from one window.

        Returns:
            What was done; None if no process has a sample of the window.

        Raises:
            RankFailedError: Another process cannot continue.
            AutoaccumError: As for `Runner.step`.
        """
        started = time.perf_counter()
        step, noise, number = self._step, self._noise, self.events.windows + 1
        self._number, self._made_before, self._has_moved = number, step.optimizer_steps.made, False
        measures = noise is not None and noise.is_due(number) and self.sizing.is_stable
        part = (shuffled(part, number) if measures else self._prepared(part)).made_of(part)
        optimizer_modes.train(step.optimizer)
        try:
            if step.holds_gradients():
                drop_old_gradients(step, self._notices)
            self.is_at_work = True
            try:
                reduced, skipped = self.engine.run(
                    part, self._finish, is_final=self._is_made, on_change=self._on_change, measures_noise=measures
                )
            except BaseException:
                step.optimizer_steps.drop_reservation()
                raise
            finally:
                self.is_at_work = False
            if skipped is None:
                return None
            elapsed_s = time.perf_counter() - started
            if part.samples:
                self.engine.complete(elapsed_s)
            if step.optimizer_steps.has_new_gradients:  # some are trained that were not
                self.engine.steady.void()
            return self._report(reduced, elapsed_s, skipped=skipped)
        except BaseException as error:
            if self._is_made():
                self._raise_as_step_complete(error)
            raise

    def _prepared(self, part: Window) -> Window:
        """Return a window of lists of samples in order of size; another, just like the last, as a `KnownWindow`."""
        if self._sorts:
            return largest_first(part)
        batch = part.plain_batch() if part.kinds is None else None
        known = None if batch is None else self.engine.steady.known(batch)
        return part if known is None else known

    def _finish(self, given: PartResult) -> tuple[WindowResult, bool | None] | None:
        """Make the optimizer step from a window's gradient; None if another process lacks memory for it.

        Returns:
            The window, and whether the scaler skipped its optimizer step; None if no process has a sample of it.
        """
        self._step.optimizer_steps.reserve(self._peers.expected_gradients())
        reduced = self._peers.reduce(given, self.engine, self._before_step)
        if reduced is not None and reduced.samples:
            return reduced, self._step_optimizer()
        self._step.optimizer_steps.drop_reservation()
        return None if reduced is None else (reduced, None)

    def _before_step(self, losses: Losses, samples: int) -> None:
        """Reject an unusable optimizer step, and prepare what moves with it, while there is a way back."""
        if self.engine.is_due:
            if self._checks_finite:
                _check_finite(losses)
            if not self._step.holds_gradients():
                raise no_gradient(self._step.parameters)
            self._checks_finite = False
        if self._prepare is not None:
            self._prepare(samples)

    def _step_optimizer(self) -> bool:
        """Step the optimizer, and move everything that moves with it."""
        self._rates = optimizers.learning_rates(self._step.optimizer)
        with signals.held():  # inside the optimizer an interrupt would leave half an optimizer step
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
        if _oom.is_device_lost(error):
            raise devices.lost(self._step.memory, error) from error
        said = step_complete.wrapped(error, self._number, has_moved=self._has_moved)
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


class Runner:
    """Trains window by window, in a loop of your own.

        runner = autoaccum.Runner(model, optimizer, autoaccum.plan(100, 37), loss=loss)
        for window in autoaccum.windows(loader, 100):
            report = runner.step(window)

    Args:
        model: The model. It is moved to the device and stays there. Submodules keep their modes.
        optimizer: As for `fit`.
        plan: How a window is cut. It shrinks when memory runs out.
        loss: As for `fit`.
        loss_reduction: As for `fit`.
        loss_scope: As for `fit`.
        forward: As for `fit`.
        split: As for `fit`. With it, `step` takes one batch or a `Window`.
        batchnorm: As for `fit`.
        clip_grad_norm: As for `fit`.
        callbacks: Called when memory runs out and when the plan changes.
        device: As for `fit`.
        precision: As for `fit`.
        memory_limit: As for `fit`. It is in force within `step` and `evaluate`, and lifted between them, so that a
            runner need not be closed. On the host, it counts from when the runner is created, without what batches take
            beyond those of the first window.
        memory: As for `fit`. It is in force within `step` and `evaluate`; the model's forward passes elsewhere are as
            they were.
        noise_scale: As for `fit`; the property of this name is the newest estimate.
        oom_report: As for `fit`.

    The model may change between two windows: each window begins by checking which parameters exist and which of them
    need a gradient. A window's optimizer step uses only its own gradients. Any that were left in `.grad` before it (by
    a backward pass of your own, or by another Runner whose loss passes through this one's model) are dropped, which is
    reported once. Of the arguments, only `plan` and `optimizer` can be set afterwards.

    Raises:
        InvalidInputError: An argument cannot be used.
        DoesNotFitError: The model itself does not fit on the device.
    """

    @writes_reason
    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakesOptimizer | str | None,
        plan: Plan,
        *,
        loss: Loss | Sequence[Loss] | None = None,
        loss_reduction: str | None = None,
        loss_scope: str = "micro_batch",
        forward: Callable[[nn.Module, Any], Any] | None = None,
        split: Split | None = None,
        batchnorm: str = "keep",
        clip_grad_norm: float | None = None,
        callbacks: Sequence[Callback] = (),
        device: str | torch.device | MemoryBackend | None = None,
        precision: str = "auto",
        memory_limit: float | str | None = None,
        memory: str | Sequence[str] | None = None,
        noise_scale: bool | int = False,
        oom_report: str | PathLike[str] | None = None,
    ) -> None:
        options = Options.of(Runner, locals())
        _check_plan(plan)
        notices = Notices(holds_choices=True)
        backend = devices.resolve(device, model, notices)
        limit_bytes = options.limit_bytes(backend)
        savings = options.savings(backend)
        step = assemble(model, options, memory=backend, notices=notices)
        self._limit = StepLimit(backend, limit_bytes)
        self._savings = Savings(step.objective.modules, savings, backend, notices)
        events = Events(backend, callbacks, notices)
        sizing = Sizing(backend, lambda: step.parameters, Cutting.of(plan), SizingOptions(), events)
        noise = None if options.noise_every is None else NoiseScale(options.noise_every, notices)
        self._runner = WindowRunner(step, sizing, events, notices, noise=noise)
        self._step, self._noise, self._notices = step, noise, notices
        self._evaluator: Evaluator | None = None
        self._stepping, self._evaluating = AtWork("step", model), AtWork("evaluate", model, nests=True)
        notices.tell_choices()

    def __setattr__(self, name: str, value: object) -> None:
        """Set `plan` or `optimizer`.

        Raises:
            InvalidInputError: The attribute is another one, which would have no effect.
        """
        if not name.startswith("_") and name not in _SETTABLE:
            raise InvalidInputError(
                f"runner.{name} cannot be set, only {' and '.join(_SETTABLE)} can; create another Runner with the "
                "value you need"
            )
        super().__setattr__(name, value)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer, even if created here; for several, one that steps all of them.

        Can be set between two windows, to whatever the constructor takes.
        """
        return self._step.optimizer

    @optimizer.setter
    def optimizer(
        self, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakesOptimizer | str
    ) -> None:
        if optimizer is None or self._runner.is_at_work:
            why = "within a window" if self._runner.is_at_work else "to None"
            raise InvalidInputError(f"runner.optimizer cannot be set {why}; set an optimizer between two windows")
        self._step.use(optimizers.resolve(optimizer, self._step.objective.modules, self._notices))

    @property
    def plan(self) -> Plan:
        """The current plan. It shrinks when memory runs out, and grows back up to the plan that was set."""
        return self._runner.sizing.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        _check_plan(plan)
        self._runner.sizing.set(plan)

    @property
    def memory(self) -> tuple[str, ...]:
        """What saves memory in the next window, by names of the argument `memory`."""
        return self._savings.names

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples; None as long as it has not been, or cannot be, measured."""
        return None if self._noise is None else self._noise.samples

    @writes_reason
    def step(self, window: Any, *others: Any) -> StepReport:
        """Make one optimizer step from one window.

        Args:
            window: One batch, or a sequence of the loader's batches (what `autoaccum.windows` yields, a `Window`,
                a list of batches). It need not have the plan's number of samples.
            others: None; inputs and targets are one batch, a pair.

        Returns:
            What was done. Reading `report.loss` waits for the device.

        Raises:
            InvalidInputError: The window or the loss's return value cannot be used.
            DoesNotFitError: Not even one sample at a time fits.
            DeviceLostError: This process can no longer use the device.
            StateDamagedError: The optimizer, or a hook on its step, failed after it had begun to write.
            StepCompleteError: Memory ran out after the optimizer step: it is made, and this window
                must not be passed again. Interrupts that come after the optimizer step are raised unchanged, with a
                note that says so.
        """
        if others:
            check_one_batch("step", others)
        with self._stepping:
            part: Window | None = self._runner.engine.steady.known(window)
            if part is None:
                part = as_window(window, self._step.objective.split)
            runner, savings = self._runner, self._savings
            if not (self._limit.enforces or savings.names or savings.is_auto):
                report = runner.step(part)
            else:
                with self._limit.in_force():
                    report = savings.run(
                        lambda: runner.step(part),
                        on_climb=lambda: runner.sizing.set(runner.sizing.set_plan),
                        is_final=lambda: runner.is_past_return,
                    )
        assert report is not None
        return report

    @writes_reason
    def evaluate(self, loader: Iterable[Any]) -> float:
        """Return the mean loss over a loader's samples, each counted once, without touching the training.

        Random state, also that of generators which modules hold, is as before it afterwards, and after an error.

        Raises:
            InvalidInputError: The loader yields nothing, or the model returns no loss in evaluation mode.
            DoesNotFitError: Not even one sample at a time fits.
        """
        check_loader("loader", loader, self._step.objective.split)
        with self._evaluating:
            return self._evaluated(loader)

    def _evaluated(self, loader: Iterable[Any]) -> float:
        if self._evaluator is None:
            self._evaluator = Evaluator(self._step)
        memory = self._step.memory
        before = RandomState(memory.device, self._step.objective.modules, used_by(self._step.objective.calls.functions))
        before.take()
        try:
            with self._limit.in_force(), self._savings.in_force():
                found = self._evaluator.run(drawn(loader, memory), trained_size=self.plan.micro_batch)
        finally:
            with suppress(RuntimeError):  # the device may be lost, and its generator with it
                before.put_back()
        assert found.loss is not None  # there are no metrics, without which it is refused
        return found.loss


def _check_finite(losses: Losses) -> None:
    values = {name: parts.total().item() for name, parts in losses.items()}
    if not all(map(math.isfinite, values.values())):
        raise not_finite(values)


def _check_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise InvalidInputError(f"plan={shown(plan)} is not an autoaccum.Plan; autoaccum.plan(target, limit) makes one")
