"""The main job: windows from a loader, a plan from a probe, epochs of updates, evaluations, progress."""

from __future__ import annotations

import math
import random
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

from autoaccum import devices, optimizers
from autoaccum.batches import Window, check_windows, stream
from autoaccum.callbacks import Callback
from autoaccum.errors import InvalidInputError
from autoaccum.evaluation import Evaluator
from autoaccum.memory.limits import parse_limit
from autoaccum.notices import Notices
from autoaccum.planner import plan
from autoaccum.probe import probe
from autoaccum.progress import progress_for
from autoaccum.records import FitResult, check_positive_int
from autoaccum.runner import Runner
from autoaccum.state import RandomState
from autoaccum.step import assemble, check_clip, drop_old_gradients

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import nn

    from autoaccum.evaluation import Metric
    from autoaccum.memory.base import MemoryBackend
    from autoaccum.objective import Loss
    from autoaccum.optimizers import MakesOptimizer
    from autoaccum.records import Evaluation, MemoryEvent, Plan, ProbeResult, StepReport, Trial
    from autoaccum.step import TrainingStep

_INTERVALS = ("step", "epoch")
# Losses that nobody has read wait on the device; every so many windows they are read, all in one wait.
_READ_EVERY = 256


def fit(
    model: nn.Module,
    loader: Iterable[Any],
    target_batch: int,
    *,
    loss: Loss | Sequence[Loss] | None = None,
    optimizer: torch.optim.Optimizer | MakesOptimizer | None = None,
    scheduler: Any = None,
    scheduler_interval: str = "step",
    epochs: int | None = None,
    max_steps: int | None = None,
    device: str | torch.device | MemoryBackend | None = None,
    precision: str = "auto",
    micro_batch: int | str = "auto",
    memory_limit: float | str | None = None,
    clip_grad_norm: float | None = None,
    last_window: str = "step",
    lr_scaling: str | None = None,
    base_batch: int | None = None,
    val_loader: Iterable[Any] | None = None,
    metrics: Metric | Sequence[Metric] | Mapping[str, Metric] | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    loss_reduction: str | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool | str | Callback = "auto",
    seed: int | None = None,
) -> FitResult:
    """Train with updates of `target_batch` samples, whatever the device can hold at once.

    Finds the largest micro-batch that fits, plans how to cut each window of `target_batch` samples, and trains with the
    gradient of the whole window. When memory runs out the window is undone and done again in a smaller cut.

    Args:
        model: The model, trained in place. It is moved to the device and stays there; its submodules keep the modes
            (training or evaluation) that they have.
        loader: Any iterable of batches, of whatever size. A batch is (inputs, targets), which calls `model(inputs)`; a
            mapping, which calls `model(**batch)`; or anything else, which calls `model(batch)`.
        target_batch: Samples an update is made from.
        loss: A callable of (outputs, targets), or of (outputs, batch) where a batch is no pair, that returns a scalar,
            a vector of per-sample losses, a (sum, weight) pair, or a mapping of those; or a list of callables of
            (model, batch), each run and back-propagated by itself. None: the model's own loss, else cross entropy for
            whole-number targets and mean squared error for floating ones.
        optimizer: An optimizer over the model's parameters, or a function of them that makes one. None: AdamW(lr=1e-3).
        scheduler: A learning-rate scheduler, or a function of the optimizer that makes one. ReduceLROnPlateau moves
            with each evaluation's loss.
        scheduler_interval: "step": the scheduler moves after every update; "epoch": after every epoch.
        epochs: Times to go through the loader. None: 1, or as many as `max_steps` takes.
        max_steps: Windows after which to stop.
        device: A device, its name, or a memory backend that stands for one. None: where the model is if that is an
            accelerator, else the accelerator, else the CPU.
        precision: "fp32", "bf16" or "fp16" by autocast, with a gradient scaler for fp16. "auto": bf16 or fp16 on CUDA
            by what the card does well, fp32 elsewhere.
        micro_batch: Most samples at once, or "auto" to find out.
        memory_limit: Bytes, a text such as "12GiB", or a fraction. On a card it is of the whole device; on the host it
            is what may be taken beyond what the process holds now. None: what is free.
        clip_grad_norm: Norm to which the gradient of the whole window is clipped.
        last_window: "step": a shorter last window of an epoch makes an update of its own; "drop": it is left out.
        lr_scaling: "linear" or "sqrt": multiply the learning rates once, by `target_batch / base_batch` or its root.
        base_batch: The batch size that the learning rates were chosen for.
        val_loader: Evaluated after each epoch.
        metrics: For the evaluation: callables of (outputs, targets) averaged over samples, or torchmetrics objects.
        forward: A callable of (model, batch) that returns the outputs, in place of the conventions for batches.
        loss_reduction: "mean" or "sum", for a loss of which this should not be found out.
        callbacks: Told what happens.
        progress: "auto": a bar on a terminal, lines elsewhere; "bar", "lines", or False for nothing, not even what was
            chosen. On stderr.
        seed: Seeds torch's, Python's and NumPy's generators first.

    Returns:
        What was done. The model is trained in place.

    Raises:
        InvalidInputError: An argument, a batch or a loss cannot be used.
        DoesNotFitError: Not even one sample at a time fits.
        DeviceLostError: The device can no longer be used by this process.
        StateDamagedError: The optimizer failed after it had begun to write.
    """
    started = time.perf_counter()
    check_windows(target_batch, last_window)
    check_clip(clip_grad_norm)
    epochs, max_steps = _check_length(epochs, max_steps)
    _check_micro_batch(micro_batch)
    _check_scheduler(scheduler, scheduler_interval, val_loader)
    _check_iterable("loader", loader)
    if val_loader is not None:
        _check_iterable("val_loader", val_loader)
    elif metrics is not None:
        raise InvalidInputError("metrics= are for the evaluation of a val_loader=, and there is none; pass both")
    _check_callbacks(callbacks)
    if lr_scaling is not None:
        optimizers.scaling_factor(lr_scaling, target_batch, base_batch)
    if seed is not None:
        _seed(seed)
    shown = progress_for(progress)
    notices = Notices(silent=progress is False)
    memory = devices.resolve(device, model, notices)
    limit_bytes = parse_limit(memory_limit, memory)
    step = assemble(
        model,
        loss,
        optimizer,
        memory=memory,
        precision_name=precision,
        forward=forward,
        loss_reduction=loss_reduction,
        clip_grad_norm=clip_grad_norm,
        notices=notices,
    )
    fitting = _Fit(
        step,
        loader,
        target_batch,
        epochs=epochs,
        max_steps=max_steps,
        last_window=last_window,
        callbacks=(shown, *callbacks),
        notices=notices,
    )
    evaluator = None if val_loader is None else Evaluator(step, metrics, fitting.evaluation_ran_out)
    if lr_scaling is not None:
        optimizers.scale_learning_rate(
            step.optimizer,
            lr_scaling,
            target_batch=target_batch,
            base_batch=base_batch,
            notices=notices,
            scheduler=scheduler,
        )
    return fitting.run(
        micro_batch=micro_batch,
        limit_bytes=limit_bytes,
        scheduler=scheduler,
        scheduler_interval=scheduler_interval,
        val_loader=val_loader,
        evaluator=evaluator,
        started=started,
    )


class _Fit(Callback):
    """One call of `fit`, its arguments checked. As a callback of its own it notes the plans."""

    def __init__(
        self,
        step: TrainingStep,
        loader: Iterable[Any],
        target_batch: int,
        *,
        epochs: int | None,
        max_steps: int | None,
        last_window: str,
        callbacks: Sequence[Callback],
        notices: Notices,
    ) -> None:
        self._step = step
        self._loader = loader
        self._target_batch = target_batch
        self._epochs = epochs
        self._max_steps = max_steps
        self._last_window = last_window
        self._callbacks = (self, *callbacks)
        self._notices = notices
        self._history: list[StepReport] = []
        self._plans: list[tuple[int, Plan]] = []
        self._evaluations: list[Evaluation] = []

    def run(
        self,
        *,
        micro_batch: int | str,
        limit_bytes: int | None,
        scheduler: Any,
        scheduler_interval: str,
        val_loader: Iterable[Any] | None,
        evaluator: Evaluator | None,
        started: float,
    ) -> FitResult:
        memory = self._step.memory
        result = None
        try:
            self._tell_start()
            windows = self._windows()
            first = next(windows, None)
            if first is None:
                raise InvalidInputError(f"the loader gave no batch{self._dropped()}, so there is nothing to train on")
            drop_old_gradients(self._step, self._notices)
            found = self._probe(first, micro_batch, limit_bytes)
            with ExitStack() as stack:
                stack.enter_context(memory.limited(limit_bytes))
                runner = Runner.of(
                    self._step,
                    self._first_plan(found, micro_batch),
                    callbacks=self._callbacks,
                    notices=self._notices,
                    bytes_per_sample=None if found is None else found.bytes_per_sample,
                )
                for callback in self._callbacks:
                    callback.on_plan(runner.plan, step=1, probe=found)
                moves = _Scheduler(scheduler, scheduler_interval, runner.optimizer)
                self._train(runner, first, windows, moves, val_loader, evaluator)
            result = FitResult(
                steps=len(self._history),
                samples=sum(report.samples for report in self._history),
                history=tuple(self._history),
                plan=runner.plan,
                plans=tuple(self._plans),
                oom_events=runner.oom_events,
                evaluations=tuple(self._evaluations),
                elapsed_s=time.perf_counter() - started,
            )
        finally:
            with ExitStack() as ends:  # every callback is told, also when one of them raises
                for callback in reversed(self._callbacks):
                    ends.callback(callback.on_fit_end, result)
        return result

    def on_plan(self, plan: Plan, *, step: int, probe: ProbeResult | None) -> None:  # noqa: ARG002 - as the base has it
        """Note the plan."""
        self._plans.append((step, plan))

    def evaluation_ran_out(self, event: MemoryEvent) -> None:
        """Tell the callbacks that memory ran out in an evaluation."""
        for callback in self._callbacks:
            callback.on_oom(event, step=len(self._history))

    def _tell_start(self) -> None:
        steps = _steps_per_epoch(self._loader, self._target_batch, self._last_window)
        for callback in self._callbacks:
            callback.on_fit_start(epochs=self._epochs, max_steps=self._max_steps, steps_per_epoch=steps)

    def _windows(self) -> Iterator[Window]:
        """Yield an epoch's windows. An error of the loader arrives as it is: it is never the step's."""
        # Worker processes are started by iter(), and would inherit the limit.
        with self._step.memory.lifted():
            batches = iter(self._loader)
        return stream(batches, self._target_batch, last_window=self._last_window)

    def _probe(self, first: Window, micro_batch: int | str, limit_bytes: int | None) -> ProbeResult | None:
        if micro_batch != "auto":
            return None
        sizes = first.groups()
        begin = sum(sizes[: (largest := sizes.index(max(sizes)))])
        batch = first.cut(begin, begin + sizes[largest])
        return probe(self._step, batch, first.samples, limit_bytes, self._tell_trial)

    def _tell_trial(self, trial: Trial) -> None:
        for callback in self._callbacks:
            callback.on_trial(trial)

    def _first_plan(self, found: ProbeResult | None, micro_batch: int | str) -> Plan:
        most = micro_batch if found is None else found.micro_batch
        assert isinstance(most, int)
        return plan(self._target_batch, min(most, self._target_batch), trials=() if found is None else found.trials)

    def _train(
        self,
        runner: Runner,
        first: Window,
        windows: Iterator[Window],
        moves: _Scheduler,
        val_loader: Iterable[Any] | None,
        evaluator: Evaluator | None,
    ) -> None:
        epoch = 1
        window: Window | None = first
        while window is not None:
            while window is not None:
                report = runner.step(window)
                # Let go of the window before the next one is loaded: large ones must not be held twice.
                window = None
                self._note(report, epoch)
                moves.after(report)
                if len(self._history) != self._max_steps:
                    window = next(windows, None)
            for callback in self._callbacks:
                callback.on_epoch_end(epoch)
            if evaluator is not None and val_loader is not None:
                self._evaluate(evaluator, val_loader, moves, epoch=epoch, size=runner.plan.micro_batch)
            moves.after_epoch()
            if epoch == self._epochs or len(self._history) == self._max_steps:
                return
            epoch += 1
            windows = self._windows()
            window = next(windows, None)
        self._notices.say(
            f"the loader gave nothing in epoch {epoch}, so training ends there; a generator can be read only once, a "
            "DataLoader or a list every epoch"
        )

    def _note(self, report: StepReport, epoch: int) -> None:
        self._history.append(report)
        if len(self._history) % _READ_EVERY == 0:
            for earlier in self._history[-_READ_EVERY:]:
                _ = earlier.loss, earlier.grad_norm
        for callback in self._callbacks:
            callback.on_step(report, epoch=epoch)

    def _evaluate(
        self, evaluator: Evaluator, val_loader: Iterable[Any], moves: _Scheduler, *, epoch: int, size: int
    ) -> None:
        # A loader draws a seed for its workers, and a model may draw in evaluation mode too.
        before = RandomState(self._step.memory.device)
        before.take()
        with self._step.memory.lifted():
            batches = iter(val_loader)
        evaluation = evaluator.run(batches, trained_size=size)
        before.put_back()
        self._evaluations.append(evaluation)
        for callback in self._callbacks:
            callback.on_evaluation(evaluation, epoch=epoch, step=len(self._history))
        moves.after_evaluation(evaluation)

    def _dropped(self) -> str:
        if self._last_window != "drop":
            return ""
        return f" or less than target_batch={self._target_batch} samples, which last_window='drop' leaves out"


class _Scheduler:
    """A learning-rate scheduler and when it moves."""

    def __init__(self, scheduler: Any, interval: str, optimizer: torch.optim.Optimizer) -> None:
        is_one = scheduler is None or hasattr(scheduler, "step")
        self._scheduler = scheduler if is_one else scheduler(optimizer)
        self._interval = interval
        self._on_plateau = isinstance(self._scheduler, ReduceLROnPlateau)

    def after(self, report: StepReport) -> None:
        if self._interval == "step" and not report.skipped:
            self._move()

    def after_epoch(self) -> None:
        if self._interval == "epoch":
            self._move()

    def after_evaluation(self, evaluation: Evaluation) -> None:
        if self._on_plateau:
            self._scheduler.step(evaluation.loss)

    def _move(self) -> None:
        if self._scheduler is not None and not self._on_plateau:
            self._scheduler.step()


def _check_length(epochs: int | None, max_steps: int | None) -> tuple[int | None, int | None]:
    if epochs is not None:
        check_positive_int("epochs", epochs)
    if max_steps is not None:
        check_positive_int("max_steps", max_steps)
        return epochs, max_steps
    return (1 if epochs is None else epochs), None


def _check_micro_batch(micro_batch: int | str) -> None:
    if isinstance(micro_batch, str) and micro_batch != "auto":
        raise InvalidInputError(f"micro_batch={micro_batch!r} is unknown; pass 'auto' or a whole number of samples")
    if micro_batch != "auto":
        check_positive_int("micro_batch", micro_batch)


def _check_scheduler(scheduler: Any, interval: str, val_loader: Iterable[Any] | None) -> None:
    if interval not in _INTERVALS:
        raise InvalidInputError(f"scheduler_interval={interval!r} is unknown; choose 'step' or 'epoch'")
    if scheduler is not None and not (hasattr(scheduler, "step") or callable(scheduler)):
        raise InvalidInputError(f"scheduler={scheduler!r} has no step(), nor is it a function that makes one")
    if isinstance(scheduler, ReduceLROnPlateau) and val_loader is None:
        raise InvalidInputError("ReduceLROnPlateau moves with the validation loss; pass val_loader=")


def _check_iterable(name: str, loader: Any) -> None:
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise InvalidInputError(
            f"{name}={loader!r} cannot be iterated over; pass a DataLoader, or any iterable of batches"
        )


def _check_callbacks(callbacks: Sequence[Callback]) -> None:
    for callback in callbacks if isinstance(callbacks, list | tuple) else [callbacks]:
        if not isinstance(callback, Callback):
            raise InvalidInputError(f"callbacks={callbacks!r} must be a list of autoaccum.Callback objects")
    if not isinstance(callbacks, list | tuple):
        raise InvalidInputError(f"callbacks={callbacks!r} is a single callback; pass [it]")


def _seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidInputError(f"seed={seed!r} must be a whole number")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - the user's global generator


def _steps_per_epoch(loader: Iterable[Any], target_batch: int, last_window: str) -> int | None:
    """Return the number of windows an epoch has, where the loader lets it be known beforehand."""
    if not isinstance(loader, torch.utils.data.DataLoader):
        return None
    try:
        samples = len(loader.sampler) if loader.batch_size is not None else None  # type: ignore[arg-type]
        if samples is not None and loader.drop_last:
            samples = len(loader) * int(loader.batch_size or 1)
    except TypeError:  # an iterable dataset without a length
        return None
    if samples is None:
        return None
    return math.ceil(samples / target_batch) if last_window == "step" else samples // target_batch
