"""One window in, exactly one optimizer update out; or an error, with everything as it was before the window.

The cut may change under way when memory runs out; the gradient does not. Nothing is copied for this but buffers and
random state, and nothing waits for the device that a hand-written loop would not wait for.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import defaultdict
from contextlib import closing
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum import devices, oom, signals
from autoaccum.batches import Window, as_window
from autoaccum.errors import DeviceLostError, DoesNotFitError, InvalidInputError
from autoaccum.evaluation import Evaluator
from autoaccum.notices import Notices
from autoaccum.planner import balanced, plan, shrink
from autoaccum.probe import does_not_fit_text
from autoaccum.records import DeviceScalar, MemoryEvent, Plan, StepReport
from autoaccum.state import Mark, RandomState
from autoaccum.step import Accumulated, assemble, check_weight, drop_old_gradients
from autoaccum.weighting import in_full

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from autoaccum.callbacks import Callback
    from autoaccum.memory.base import MemoryBackend
    from autoaccum.objective import Factors, Loss
    from autoaccum.optimizers import MakesOptimizer
    from autoaccum.step import TrainingStep, Update

# Asking for the peak costs as much as a small micro-step, so it is not asked for more often than this.
_PEAK_INTERVAL_S = 0.25


# The window's losses by name, and what became of the update.
_Outcome = tuple[dict[str, DeviceScalar], "Update"]


class Runner:
    """Trains window by window, for a loop of one's own.

        runner = autoaccum.Runner(model, optimizer, autoaccum.plan(100, 37), loss=loss)
        for window in autoaccum.windows(loader, 100):
            report = runner.step(window)

    Args:
        model: The model; it is moved to the device and stays there. Submodules keep their modes.
        optimizer: As for `fit`.
        plan: How a window is cut; it shrinks when memory runs out.
        loss: As for `fit`.
        device: As for `fit`.
        precision: As for `fit`.
        clip_grad_norm: As for `fit`.
        forward: As for `fit`.
        loss_reduction: As for `fit`.
        callbacks: Told when memory runs out and when the plan changes.
        notices: Where choices made for the user are said; None says them on stderr.

    Attributes:
        optimizer: The optimizer, also where it was made here.
        plan: The plan in force.
        oom_events: How often memory has run out so far.

    Raises:
        InvalidInputError: An argument cannot be used.
        DoesNotFitError: The model itself does not fit on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | MakesOptimizer | None,
        plan: Plan,
        *,
        loss: Loss | Sequence[Loss] | None = None,
        device: str | torch.device | MemoryBackend | None = None,
        precision: str = "auto",
        clip_grad_norm: float | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        loss_reduction: str | None = None,
        callbacks: Sequence[Callback] = (),
        notices: Notices | None = None,
    ) -> None:
        if not isinstance(plan, Plan):
            raise InvalidInputError(f"plan={plan!r} is no autoaccum.Plan; autoaccum.plan(target, limit) makes one")
        notices = notices or Notices()
        step = assemble(
            model,
            loss,
            optimizer,
            memory=devices.resolve(device, model, notices),
            precision_name=precision,
            forward=forward,
            loss_reduction=loss_reduction,
            clip_grad_norm=clip_grad_norm,
            notices=notices,
        )
        self._begin(step, plan, callbacks, notices, bytes_per_sample=None)

    @classmethod
    def of(
        cls,
        step: TrainingStep,
        plan: Plan,
        *,
        callbacks: Sequence[Callback],
        notices: Notices,
        bytes_per_sample: int | None,
    ) -> Runner:
        """Make a runner of a training step that is put together already.

        Args:
            step: The training step.
            plan: How a window is cut.
            callbacks: As for the class.
            notices: As for the class.
            bytes_per_sample: What a sample takes while it is worked on, where a probe has found it: then memory is
                asked for before each micro-batch on devices that cannot fail cleanly.
        """
        runner = cls.__new__(cls)
        runner._begin(step, plan, callbacks, notices, bytes_per_sample=bytes_per_sample)
        return runner

    def _begin(
        self,
        step: TrainingStep,
        plan: Plan,
        callbacks: Sequence[Callback],
        notices: Notices,
        *,
        bytes_per_sample: int | None,
    ) -> None:
        self.plan = plan
        self.oom_events = 0
        self.optimizer = step.optimizer
        self._step = step
        self._memory = step.memory
        self._callbacks = tuple(callbacks)
        self._notices = notices
        self._bytes_per_sample = bytes_per_sample
        self._mark = Mark(step.objective.modules, step.memory.device)
        self._evaluator: Evaluator | None = None
        self._size: int | None = None
        self._done = 0
        self._peak_bytes: int | None = None
        self._peak_read_at = -math.inf
        drop_old_gradients(step, notices)
        self._memory.reset_peak()

    def step(self, window: Any) -> StepReport:
        """Make one update from one window.

        Args:
            window: One batch, or a sequence of the loader's batches (what `autoaccum.windows` yields, a `Window`,
                a list of batches). It need not have the plan's number of samples.

        Returns:
            What was done; `report.loss` waits for the device when it is read.

        Raises:
            InvalidInputError: The window or what the loss returns cannot be used.
            DoesNotFitError: Not even one sample at a time fits.
            DeviceLostError: The device can no longer be used by this process.
            StateDamagedError: The optimizer failed after it had begun to write.
        """
        window = as_window(window)
        started = time.perf_counter()
        events: list[MemoryEvent] = []
        while True:
            sizes = self._cut(window)
            outcome = self._try(window, sizes, shrunk=bool(events))
            if not isinstance(outcome, MemoryEvent):
                break
            # The handler has ended: inside it the traceback would still pin the activations.
            self._memory.release()
            events.append(outcome)
            self._replan(events)
        losses, update = outcome
        return StepReport(
            step=self._done,
            samples=window.samples,
            micro_batches=sizes,
            oom_events=len(events),
            elapsed_s=time.perf_counter() - started,
            peak_bytes=self._peak(),
            skipped=update.skipped,
            device_losses=losses,
            device_grad_norm=None if update.grad_norm is None else DeviceScalar(update.grad_norm),
        )

    def evaluate(self, loader: Iterable[Any]) -> float:
        """Return the mean loss over a loader's samples, each counted once, without touching the training.

        Raises:
            InvalidInputError: The loader gives nothing, or the model gives no loss in evaluation mode.
            DoesNotFitError: Not even one sample at a time fits.
        """
        if self._evaluator is None:
            self._evaluator = Evaluator(self._step)
        before = RandomState(self._memory.device)
        before.take()
        loss = self._evaluator.run(loader, trained_size=self.plan.micro_batch).loss
        before.put_back()
        return loss

    def _cut(self, window: Window) -> tuple[int, ...]:
        groups = window.groups()
        if groups == [self.plan.target_batch]:
            return self.plan.micro_batches
        return tuple(itertools.chain.from_iterable(balanced(group, self.plan.micro_batch) for group in groups))

    def _try(self, window: Window, sizes: tuple[int, ...], *, shrunk: bool) -> _Outcome | MemoryEvent:
        """Make the update, or put everything back and return what happened if it was lack of memory."""
        before = self._done
        versions = window.versions()
        marked = False
        try:
            self._step.phase, self._size = "set aside", None
            self._mark.take()
            marked = True
            outcome = self._attempt(window, sizes)
        except BaseException as error:
            if self._done > before:
                raise  # an interrupt that waited for the update: the window is done
            self._undo(error, marked=marked)
            if oom.is_oom(error) or oom.is_too_large(error):
                if window.versions() != versions:
                    raise InvalidInputError(
                        "memory ran out after the model had changed its input in place, so the window cannot be done "
                        "again from the same data; let the model work on a copy (inputs.clone())"
                    ) from error
                event = MemoryEvent(self._step.phase, self._size, oom.first_line(error))
                oom.let_go(error)
                return event
            if shrunk and self._size == 1 and isinstance(error, ValueError):
                # BatchNorm refuses a single value a channel; one sample was taken only because more ran out.
                reason = f"one sample alone is refused: {error}"
                raise DoesNotFitError(does_not_fit_text(self._step, None, reason)) from error
            raise
        if window.versions() != versions:
            self._step.transfer.copy_always()
        return outcome

    def _attempt(self, window: Window, sizes: tuple[int, ...]) -> _Outcome:
        step = self._step
        step.phase = "forward"
        step.objective.settle(window, sizes, step.transfer.place, self._mark)
        factors = self._factors(window, sizes)
        accumulated = Accumulated()
        with closing(step.transfer.feed(window, sizes)) as feed:
            for size, factor in zip(sizes, factors, strict=True):
                self._size = size
                if self._bytes_per_sample is not None:
                    self._memory.ensure(self._bytes_per_sample * size)
                step.phase = "transfer"
                step.accumulate(next(feed), size, factor, accumulated)
        self._size = None
        correction = _correction(window, accumulated)
        losses = {name: _total(values, correction) for name, values in accumulated.losses.items()}
        if self._done == 0:
            self._check_first(losses)
        # An interrupt waits until the window is done: inside the optimizer it would leave half an update.
        with signals.held():
            update = step.update(correction)
            step.clear_gradients()
            self._done += 1
        return losses, update

    def _factors(self, window: Window, sizes: tuple[int, ...]) -> list[Factors]:
        objective = self._step.objective
        factors = objective.factors(window, sizes)
        if len(sizes) > 1 and objective.mixes_pairs():
            # Gradients of several losses lie in one .grad and cannot be set right one by one afterwards, so the weights
            # of (sum, weight) pairs are learned beforehand, by a forward pass without graph.
            for name, weight in self._pair_weights(window, sizes).items():
                for factor in factors:
                    factor.named[name] = 1.0 / weight
        return factors

    def _pair_weights(self, window: Window, sizes: tuple[int, ...]) -> dict[str, float]:
        step, weights = self._step, defaultdict[str, float](float)
        with torch.no_grad(), closing(step.transfer.feed(window, sizes)) as feed:
            for size in sizes:
                self._size = size
                batch = next(feed)
                for source in step.objective.sources:
                    with step.precision.autocast():
                        terms, _ = step.objective.terms(source, batch, size)
                    for term in terms:
                        if term.weight is not None:
                            weights[term.name] += float(term.weight)
        self._mark.put_back()
        for name, weight in weights.items():
            check_weight(name, weight)
        return dict(weights)

    def _check_first(self, losses: dict[str, DeviceScalar]) -> None:
        """Refuse a loss that is not a number from the start, before the first update spreads it."""
        values = {name: scalar.read() for name, scalar in losses.items()}
        if not all(map(math.isfinite, values.values())):
            found = ", ".join(f"{name}={value}" for name, value in values.items())
            raise InvalidInputError(
                f"the loss is not finite from the start ({found}); look for NaN in the inputs, log(0) or a division "
                "by 0 in the loss, or too large initial weights"
            )
        if not self._step.holds_gradients():
            raise InvalidInputError("the backward pass left no gradient on any parameter of the model")

    def _undo(self, error: BaseException, *, marked: bool) -> None:
        """Put everything back as it was before the window."""
        with signals.held():
            if oom.is_device_lost(error):
                reason = oom.first_line(error)
                raise DeviceLostError(
                    f"{self._memory.name} can no longer be used by this process ({reason}); start a new one"
                ) from error
            self._step.abandon()
            if marked:
                self._mark.put_back()

    def _replan(self, events: list[MemoryEvent]) -> None:
        """Take a smaller cut after memory ran out, or give up."""
        event = events[-1]
        self.oom_events += 1
        for callback in self._callbacks:
            callback.on_oom(event, step=self._done + 1)
        if event.size is None:
            # Unscaling, clipping and the optimizer do not depend on the cut: once more, with the caches let go.
            if len(events) > 1 and events[-2].size is None:
                raise DoesNotFitError(
                    f"the {event.phase} step does not fit on {self._memory.name} even with no activations alive "
                    f"({event.message}); try an optimizer with less state, foreach=False, or a smaller model"
                )
            return
        smaller = shrink(self.plan.target_batch, event.size)
        if smaller is None:
            raise DoesNotFitError(does_not_fit_text(self._step, None, event.message))
        self.plan = plan(self.plan.target_batch, smaller)
        for callback in self._callbacks:
            callback.on_plan(self.plan, step=self._done + 1, probe=None)

    def _peak(self) -> int | None:
        now = time.perf_counter()
        if now - self._peak_read_at >= _PEAK_INTERVAL_S:
            self._peak_bytes = self._memory.peak_bytes()
            self._peak_read_at = now
        return self._peak_bytes


def _total(values: list[Tensor], correction: float | Tensor) -> DeviceScalar:
    total = values[0] if len(values) == 1 else torch.stack(values).sum()
    return DeviceScalar(total if isinstance(correction, float) and correction == 1.0 else total * correction)


def _correction(window: Window, accumulated: Accumulated) -> float | Tensor:
    """Return what sets right gradients accumulated against a provisional weight of a (sum, weight) pair."""
    if not accumulated.pair_weights:
        return 1.0
    if len(accumulated.losses) > 1:
        raise InvalidInputError(
            f"losses {', '.join(map(repr, accumulated.losses))}: a (sum, weight) pair beside other losses whose weight "
            "is not known beforehand"
        )
    ((name, weights),) = accumulated.pair_weights.items()
    total = sum(weights)
    check_weight(name, total)
    # A device's own count may be whole, and would round the quotient to single precision.
    if isinstance(total, Tensor) and total.device.type != "cpu":
        return window.samples / in_full(total)
    return window.samples / float(total)
