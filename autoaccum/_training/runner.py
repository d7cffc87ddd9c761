"""`Runner`: optimizer steps from windows, in a loop of the user's own, with public arguments."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import check_one_batch, shown
from autoaccum._data.batches import as_window
from autoaccum._data.loaders import check_loader
from autoaccum._data.random_state import RandomState
from autoaccum._engine import devices, optimizers
from autoaccum._engine.assembly import assemble
from autoaccum._engine.at_work import AtWork
from autoaccum._engine.noise_scale import NoiseScale
from autoaccum._engine.options import Options
from autoaccum._engine.step_limit import StepLimit, drawn
from autoaccum._engine.window_runner import WindowRunner
from autoaccum._evaluation.evaluation import Evaluator
from autoaccum._loss.closures import used_by
from autoaccum._records import Plan, StepReport
from autoaccum._saving.savings import Savings
from autoaccum._sizing.cutting import Cutting, SizingOptions
from autoaccum._sizing.events import Events
from autoaccum._sizing.sizing import Sizing
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
    from autoaccum._engine.optimizers import MakesOptimizer
    from autoaccum._loss.loss_sources import Loss
    from autoaccum._memory.base import MemoryBackend

# The attributes that can be set on a runner; setting any other would have no effect.
_SETTABLE = ("plan", "optimizer")


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
        save_memory: As for `fit`. It is in force within `step` and `evaluate`; the model's forward passes elsewhere
            are as they were.
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
        save_memory: str | Sequence[str] | None = None,
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
        if optimizer is None or self._runner.engine.is_at_work:
            why = "within a window" if self._runner.engine.is_at_work else "to None"
            raise InvalidInputError(f"runner.optimizer cannot be set {why}; set an optimizer between two windows")
        self._step.use(optimizers.resolve(optimizer, self._step.objective.modules, self._notices))

    @property
    def plan(self) -> Plan:
        """The current plan. It shrinks when memory runs out, and grows back up to the plan that was set."""
        return self._runner.sizing.plan

    @plan.setter
    def plan(self, plan: Plan) -> None:
        _check_plan(plan)
        self._runner.sizing.replace_plan(plan)

    @property
    def savings(self) -> tuple[str, ...]:
        """What saves memory in the next window, by names of the argument `save_memory`."""
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
            part: Window | None = self._runner.engine.checks.known(window)
            if part is None:
                part = as_window(window, self._step.objective.split)
            runner, savings = self._runner, self._savings
            with self._limit.in_force():
                report = savings.run(
                    lambda: runner.step(part),
                    on_escalate=lambda: runner.sizing.replace_plan(runner.sizing.cutter.target_plan),
                    is_past_return=lambda: runner.is_past_return,
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
        random = RandomState(memory.device, self._step.objective.modules, used_by(self._step.objective.calls.functions))
        before = random.capture()
        try:
            with self._limit.in_force(), self._savings.in_force():
                found = self._evaluator.run(drawn(loader, memory), trained_size=self.plan.micro_batch)
        finally:
            with suppress(RuntimeError):  # the device may be lost, and its generator with it
                random.restore(before)
        assert found.loss is not None  # there are no metrics, without which it is refused
        return found.loss


def _check_plan(plan: object) -> None:
    if not isinstance(plan, Plan):
        raise InvalidInputError(f"plan={shown(plan)} is not an autoaccum.Plan; autoaccum.plan(target, limit) makes one")
