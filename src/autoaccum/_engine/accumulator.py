"""Adds one batch's gradient to `.grad`, in micro-batches that fit, for loops that bring their own optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.batches import as_window
from autoaccum._engine.batchnorm import BatchNorms
from autoaccum._engine.gradient_hooks import no_gradient
from autoaccum._engine.micro_batches import MicroBatches
from autoaccum._engine.moving_layers import MovingLayers
from autoaccum._engine.recovery import Recovery
from autoaccum._loss.reported import means
from autoaccum._records import MemoryEvent
from autoaccum._sizing.headroom import Headroom
from autoaccum._system import signals

if TYPE_CHECKING:
    from autoaccum._engine.events import Events
    from autoaccum._engine.forward_backward import GradientStep
    from autoaccum._engine.gradients import Given
    from autoaccum._sizing.sizing import Sizing
    from autoaccum._system.notices import Notices


@dataclass(frozen=True, slots=True)
class Backward:
    """What one call of `Accumulator.backward` did.

    Attributes:
        losses: The batch's losses by name, scalars on the device.
        reported: Values reported in addition to the losses, by name.
        samples: Samples of the batch.
        micro_batches: Sizes of the micro-batches, in order.
        oom_events: Number of times memory ran out.
        recomputed_samples: Samples that were computed and discarded.
    """

    losses: dict[str, Tensor]
    reported: dict[str, Tensor]
    samples: int
    micro_batches: tuple[int, ...]
    oom_events: int
    recomputed_samples: int


class Accumulator:
    """Adds gradients of whole batches to `.grad`, regardless of the micro-batches used. Involves no optimizer.

    Args:
        step: Model, loss, precision and device for computing gradients.
        sizing: Cuts batches into micro-batches.
        events: Counts batches and reports out-of-memory errors.
        notices: Reports choices made on the user's behalf.
        loss_scope: As for `fit`.
        batchnorm: As for `fit`.
    """

    def __init__(
        self,
        step: GradientStep,
        sizing: Sizing,
        events: Events,
        notices: Notices,
        *,
        loss_scope: str = "micro_batch",
        batchnorm: str = "keep",
    ) -> None:
        self._step = step
        self._sizing = sizing
        self._events = events
        self._room = Headroom(step.memory)
        self._norms = BatchNorms(step.objective.modules, batchnorm, notices)
        moving = MovingLayers(step.objective.modules, notices)
        self._work = MicroBatches(step, sizing, loss_scope=loss_scope, norms=self._norms, moving=moving)
        self._recovery = Recovery(step, self._work, sizing, self._room, events, self._norms)

    def backward(self, batch: Any) -> Backward:
        """Add the gradient of a batch to `.grad`, as one backward pass of the whole batch would.

        Existing gradients are set aside. This batch's gradient is accumulated from zero, corrected by what the losses
        run over, and added to the existing gradients once, so running out of memory midway does not affect them.
        A gradient scaler's factor is divided out.

        Args:
            batch: One batch, or a sequence of batches that belong together.

        Returns:
            What was done. Reading a loss waits for the device.

        Raises:
            InvalidInputError: The batch or the loss's return value cannot be used. After this and the other errors,
                `.grad`, buffers and random state are unchanged.
            DoesNotFitError: Not even one sample at a time fits.
            DeviceLostError: This process can no longer use the device.
        """
        window = as_window(batch, self._step.objective.split)
        step, work, recovery = self._step, self._work, self._recovery
        step.objective.begin_window()
        if step.parameters_changed():
            self._norms.search()
            work.take_stock()
        earlier = [parameter.grad for parameter in step.parameters]
        step.clear_gradients()
        try:
            self._begin(window)
            try:
                while isinstance(given := self._attempt(), MemoryEvent):
                    recovery.cut_smaller(given)
            except BaseException as error:
                recovery.give_up(error, window)
                raise
            finally:
                work.end()
        except BaseException:
            self._put(earlier)
            raise
        self._add(earlier)
        self._events.windows += 1
        self._sizing.end(work.sizes, is_clean=not recovery.lacks, has_room=self._room.is_free)
        losses, reported = given.corrected_losses(), means(given.slots)
        return Backward(losses, reported, given.samples, work.sizes, len(recovery.lacks), work.recomputed)

    def _attempt(self) -> Given | MemoryEvent:
        """Try to compute the batch's gradient, continuing from completed micro-batches; memory may run out."""
        try:
            given = self._work.run(aside=False)
            self._correct(given)
        except Exception as error:  # noqa: BLE001 - put_back_or_raise re-raises anything but lack of memory
            return self._recovery.put_back_or_raise(error)
        return given

    def _begin(self, window: Any) -> None:
        self._room.follow(self._sizing.plan)
        self._recovery.begin()
        self._sizing.begin(window)
        self._work.begin(window)

    def _correct(self, given: Given) -> None:
        """Multiply the gradient by the correction that single micro-batches lack, and divide out a scaler's factor."""
        gradients = [parameter.grad for parameter in self._step.parameters if parameter.grad is not None]
        if not gradients:
            raise no_gradient(self._step.parameters)
        scaler, factor = self._step.precision.scaler, given.correction
        if scaler is not None:
            factor = factor / scaler.get_scale()
        if not isinstance(factor, float) or factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def _put(self, gradients: list[Tensor | None]) -> None:
        for parameter, gradient in zip(self._step.parameters, gradients, strict=True):
            parameter.grad = gradient

    def _add(self, earlier: list[Tensor | None]) -> None:
        """Add this batch's gradients in place to those that were there before."""
        # An interrupt in between would leave some parameters with both gradients and others with only one.
        with signals.held(), torch.no_grad():
            for parameter, before in zip(self._step.parameters, earlier, strict=True):
                own = parameter.grad
                if before is None or own is None:
                    parameter.grad = own if before is None else before
                elif before.layout is torch.strided:
                    parameter.grad = before.add_(own)
                else:
                    parameter.grad = before + own
