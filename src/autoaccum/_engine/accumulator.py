"""Adds one batch's gradient to `.grad`, in micro-batches that fit, for loops that bring their own optimizer."""

from __future__ import annotations

import time
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._arguments import check_choice, check_function, shown
from autoaccum._callbacks import check_callbacks
from autoaccum._data.batches import as_window
from autoaccum._engine import devices
from autoaccum._engine.batchnorm import BatchNorms, check_batchnorm
from autoaccum._engine.events import Events
from autoaccum._engine.forward_backward import assemble_without_optimizer
from autoaccum._engine.gradient_hooks import no_gradient
from autoaccum._engine.micro_batches import MicroBatches
from autoaccum._engine.moving_layers import MovingLayers
from autoaccum._engine.outside_limit import Outside
from autoaccum._engine.phases import Phase
from autoaccum._engine.recovery import Recovery
from autoaccum._engine.step_limit import StepLimit
from autoaccum._engine.watched_gradients import WatchedGradients
from autoaccum._engine.window_loss import check_loss_scope
from autoaccum._loss.closures import Closure, modules_used_by
from autoaccum._loss.reported import means
from autoaccum._memory.limits import parse_limit
from autoaccum._oom import let_go
from autoaccum._records import BackwardReport, DeviceScalar, MemoryEvent
from autoaccum._sizing.headroom import Headroom
from autoaccum._sizing.offline_search import Line
from autoaccum._sizing.planner import TILE, check_finding, plan
from autoaccum._sizing.sizing import Cutting, Sizing, SizingOptions
from autoaccum._system import launched, signals
from autoaccum._system.environment import max_micro_batch
from autoaccum._system.notices import Notices
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor, nn

    from autoaccum._callbacks import Callback
    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._engine.gradients import Given
    from autoaccum._loss.objective import Loss
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Plan

_GRADIENT = attrgetter("grad")
_KEEP = ("outputs",)
# What autograd says of a graph that has been used.
_GRAPH_IS_GONE = "Trying to backward through the graph a second time"
# Batches after which cuts of full batches are timed, if the strategy asks for it.
_BATCHES_BEFORE_TIMING = 10


@dataclass(frozen=True, slots=True)
class _Lane:
    """What cuts and runs batches for which `.grad` was empty, or for which it was not: one plan does not fit both.

    Attributes:
        sizing: Cuts the batches.
        room: Tracks how much memory they leave free.
        work: Runs their micro-batches.
        recovery: Recovers them from lack of memory.
    """

    sizing: Sizing
    room: Headroom
    work: MicroBatches
    recovery: Recovery


@dataclass(frozen=True, slots=True)
class _Done:
    """The results of a batch that is complete, before anything of the user's is changed.

    Attributes:
        losses: Its losses by name, on the device.
        reported: Values reported in addition, by name.
        sums: Its gradients, added to earlier ones, by parameter.
    """

    losses: Mapping[str, Tensor]
    reported: Mapping[str, Tensor]
    sums: Sequence[Tensor | None]


class Accumulator:
    """Adds gradients of whole batches to `.grad`, whatever fits at once, in a loop with an optimizer of your own.

        accumulator = autoaccum.Accumulator(model, loss=loss)
        for batch in loader:  # batches of the size that you mean
            report = accumulator.backward(batch)
            optimizer.step()
            optimizer.zero_grad()

    `backward` takes the place of the forward pass, the loss and `loss.backward()`. It finds the largest micro-batch
    that fits while it trains, cuts smaller and continues when memory runs out, and grows back once memory is free
    again. It steps no optimizer and clears no gradients: called twice, gradients add up.

    Args:
        model: The model. It is moved to the device and stays there.
        loss: As for `fit`.
        closure: Instead of `loss`, a function of one micro-batch on the device that runs the model itself and returns
            the loss, in any form that `loss` may return. It is called again after memory has run out, so it must not
            change anything but the state of modules and random numbers. Modules that it refers to besides the model
            (a teacher, a discriminator) are found, moved to the device, and restored with the model.
        device: As for `fit`.
        precision: As for `fit`. Where your loop has entered `torch.autocast`, "auto" leaves that in force. "fp16" needs
            `scale`.
        memory_limit: As for `fit`. It is in force within `backward`. On the host, it counts from when the accumulator
            is created.
        micro_batch: The most samples at once; "auto" finds it.
        strategy: As for `fit`.
        forward: As for `fit`.
        loss_reduction: As for `fit`.
        loss_scope: As for `fit`.
        batchnorm: As for `fit`.
        split: As for `fit`.
        scale: A `torch.amp.GradScaler`, or a function of the loss that returns what is backpropagated. Gradients stay
            scaled, for `scaler.unscale_` and `scaler.step`.
        callbacks: Called when memory runs out and when the plan changes.
        notices: Reports choices made on your behalf; None for stderr.

    A batch's gradient is computed from none and added to what was in `.grad` once it is complete, so that memory which
    runs out on the way does not affect earlier gradients. This takes the memory of a second set of gradients while
    there are earlier ones, and sizes for those batches are found separately.

    Parameters must not have post-accumulate-grad hooks (an optimizer that steps in the backward pass), since they would
    run for each micro-batch. Gradients cannot be differentiated again (`create_graph`).

    Raises:
        InvalidInputError: An argument cannot be used.
        DoesNotFitError: The model itself does not fit on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Loss | Sequence[Loss] | None = None,
        closure: Callable[[Any], Any] | None = None,
        device: str | torch.device | MemoryBackend | None = None,
        precision: str = "auto",
        memory_limit: float | str | None = None,
        micro_batch: int | str = "auto",
        strategy: str | None = None,
        forward: Callable[[nn.Module, Any], Any] | None = None,
        loss_reduction: str | None = None,
        loss_scope: str = "micro_batch",
        batchnorm: str = "keep",
        split: Split | None = None,
        scale: torch.amp.GradScaler | Callable[[Tensor], Tensor] | None = None,
        callbacks: Sequence[Callback] = (),
        notices: Notices | None = None,
    ) -> None:
        check_finding(micro_batch, "inline", strategy)
        check_callbacks(callbacks)
        check_loss_scope(loss_scope)
        check_batchnorm(batchnorm)
        _check_functions(loss, closure, forward, loss_scope)
        if notices is not None and not isinstance(notices, Notices):
            raise InvalidInputError(f"notices={shown(notices)} is unknown; leave it out, or pass None for stderr")
        if launched.world_size() > 1:
            raise InvalidInputError(
                f"Accumulator adds up gradients of one process, and there are {launched.world_size()}; use "
                "autoaccum.fit, which trains on several ranks"
            )
        self._notices = notices = notices or Notices()
        if isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = model.module
        memory = devices.resolve(device, model, notices)
        limit_bytes = parse_limit(memory_limit, memory)
        used = [] if closure is None else modules_used_by(closure)
        losses = loss if isinstance(loss, list | tuple) else [loss]
        used += [module for one in (*losses, forward) if callable(one) for module in modules_used_by(one)]
        self._step = assemble_without_optimizer(
            model,
            loss if closure is None else [Closure(closure)],
            memory=memory,
            precision_name=precision,
            forward=forward,
            loss_reduction=loss_reduction,
            notices=notices,
            split=split,
            further=[module for module in dict.fromkeys(used) if module not in losses],
            scale=scale,
        )
        self._limit = StepLimit(memory, limit_bytes)
        self._events = Events([Outside(callback, memory) for callback in callbacks], notices)
        self._asked = micro_batch
        self._strategy = strategy or ("fastest" if micro_batch == "auto" else "balanced")
        self._scope = loss_scope
        self._norms = BatchNorms(self._step.objective.modules, batchnorm, notices)
        self._moving = MovingLayers(self._step.objective.modules, notices)
        self._watched = WatchedGradients(self._step)
        self._lanes: dict[bool, _Lane] = {}
        self._is_at_work = False

    @property
    def plan(self) -> Plan | None:
        """How the largest batch so far is cut where `.grad` was empty before; None before the first batch."""
        lane = self._lanes.get(False) or self._lanes.get(True)
        return None if lane is None else lane.sizing.plan

    def backward(self, batch: Any, *, keep: str | None = None) -> BackwardReport:
        """Add the gradient of a batch to `.grad`, as one backward pass of the whole batch would.

        Args:
            batch: One batch, of any size, or a sequence of batches that belong together (what `autoaccum.windows`
                yields).
            keep: "outputs" to return what the model returned for each micro-batch; None for nothing.

        Returns:
            What was done. Reading its loss waits for the device.

        Raises:
            InvalidInputError: The batch or the loss's return value cannot be used. After this and the other errors,
                `.grad`, buffers and random state are as before.
            DoesNotFitError: Not even one sample at a time fits.
            DeviceLostError: This process can no longer use the device.
        """
        started = time.perf_counter()
        if keep is not None:
            check_choice("keep", keep, _KEEP)
            if len(self._step.objective.sources) > 1 or not self._step.objective.gives_outputs:
                raise InvalidInputError(
                    "keep='outputs': a closure, or a list of losses, returns no outputs; leave it out"
                )
        if self._is_at_work:
            raise InvalidInputError("backward was called within backward (by a hook, a closure or a callback)")
        window = as_window(batch, self._step.objective.split)
        self._step.keeps_outputs = keep is not None
        self._is_at_work = True
        try:
            with self._limit.in_force():
                return self._backward(window, started)
        finally:
            self._is_at_work = False

    def _backward(self, window: Window, started: float) -> BackwardReport:
        step = self._step
        step.objective.begin_window()
        if step.parameters_changed():
            self._norms.search()
            for lane in self._lanes.values():
                lane.work.take_stock()
            self._watched.look_again()
        self._watched.refuse_hooks()
        earlier = list(map(_GRADIENT, step.parameters))
        lane = self._lane(window, is_empty=all(gradient is None for gradient in earlier))
        step.clear_gradients()
        try:
            done = self._run(lane, window, earlier)
            outputs = lane.work.outputs
        except BaseException:
            self._put(earlier)
            raise
        finally:
            lane.work.end()
        with signals.held():  # an interrupt would leave some gradients with this batch, and others without it
            self._put([_kept_in(before, both) for before, both in zip(earlier, done.sums, strict=True)])
            self._events.windows += 1
        lane.recovery.choose_next_sizes(self._notices)
        return BackwardReport(
            samples=window.samples,
            micro_batches=lane.work.sizes,
            oom_events=len(lane.recovery.lacks),
            elapsed_s=time.perf_counter() - started,
            peak_bytes=lane.recovery.peak_bytes,
            recomputed_samples=lane.work.recomputed,
            device_losses={name: DeviceScalar(loss) for name, loss in done.losses.items()},
            device_reported={name: DeviceScalar(value) for name, value in done.reported.items()},
            outputs=outputs,
        )

    def _run(self, lane: _Lane, window: Window, earlier: Sequence[Tensor | None]) -> _Done:
        """Compute the batch's gradient in the empty `.grad`, and its sums with earlier ones."""
        lane.room.follow(lane.sizing.plan)
        lane.recovery.begin()
        lane.sizing.begin(window)
        lane.work.begin(window)
        try:
            while isinstance(done := self._attempt(lane, earlier), MemoryEvent):
                lane.recovery.cut_smaller(done)
        except BaseException as error:
            lane.recovery.give_up(error, window)
            if _GRAPH_IS_GONE in str(error):
                error.add_note(
                    "autoaccum: the loss depends on a graph of an earlier micro-batch, which is gone once that is done;"
                    " detach what is carried over from one call of the loss to the next"
                )
            raise
        return done

    def _attempt(self, lane: _Lane, earlier: Sequence[Tensor | None]) -> _Done | MemoryEvent:
        """Try to compute them, continuing from completed micro-batches; memory may run out."""
        try:
            given = lane.work.run(aside=lane.recovery.takes_gradients_aside)
            self._step.stage.phase = Phase.ADD
            self._correct(given)
            reported = means(given.slots) if given.reported else {}
            return _Done(given.corrected_losses(), reported, self._sums(earlier))
        except Exception as error:  # noqa: BLE001 - put_back_or_raise re-raises anything but lack of memory
            return lane.recovery.put_back_or_raise(error)

    def _correct(self, given: Given) -> None:
        """Multiply the gradient by the correction that single micro-batches lack."""
        gradients = [gradient for gradient in map(_GRADIENT, self._step.parameters) if gradient is not None]
        if not gradients:
            raise no_gradient(self._step.parameters)
        factor = given.correction
        if not isinstance(factor, float) or factor != 1.0:
            torch._foreach_mul_(gradients, factor)

    def _sums(self, earlier: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Return the sums of earlier gradients, which stay as they are, and this batch's, which need not."""
        with torch.no_grad():
            return [
                parameter.grad if before is None else _sum(before, parameter.grad)
                for parameter, before in zip(self._step.parameters, earlier, strict=True)
            ]

    def _put(self, gradients: Sequence[Tensor | None]) -> None:
        with signals.held():
            for parameter, gradient in zip(self._step.parameters, gradients, strict=True):
                parameter.grad = gradient

    # --- sizes --------------------------------------------------------------------------------------------------------

    def _lane(self, window: Window, *, is_empty: bool) -> _Lane:
        """Return what cuts and runs a batch, newly made for the first one and for one larger than any that fitted."""
        lane = self._lanes.get(is_empty)
        if lane is not None and not _is_outgrown(lane.sizing, window):
            return lane
        self._lanes[is_empty] = lane = self._new_lane(window, lane or self._lanes.get(not is_empty))
        return lane

    def _new_lane(self, window: Window, known: _Lane | None) -> _Lane:
        step, samples, cap = self._step, window.samples, max_micro_batch()
        is_auto = not isinstance(self._asked, int)
        most = min(samples if is_auto else int(self._asked), samples if cap is None else cap)
        strategy = "balanced" if self._strategy == "fastest" else self._strategy
        # A multiple of the tile is worth it only where matrix units work in halves.
        multiple_of = TILE if is_auto and step.precision.name != "fp32" else 1
        wanted = SizingOptions(
            strategy=self._strategy,
            multiple_of=multiple_of,
            by_bytes=is_auto,
            learns=is_auto and self._scope != "window",
            times_after=_BATCHES_BEFORE_TIMING,
            most=None if cap is None or cap >= samples else cap,
            **_experience(known),
        )
        asked = begins = plan(samples, min(most, samples), strategy=strategy, multiple_of=multiple_of)
        if known is not None and known.sizing.plan.micro_batch < known.sizing.set_plan.micro_batch:  # after failures
            smaller = min(known.sizing.plan.micro_batch, asked.micro_batch)
            begins = plan(samples, smaller, strategy=strategy, multiple_of=multiple_of)
        sizing = Sizing(step.memory, lambda: step.parameters, Cutting(begins, asked), wanted, self._events)
        room = Headroom(step.memory)
        work = MicroBatches(step, sizing, loss_scope=self._scope, norms=self._norms, moving=self._moving)
        return _Lane(sizing, room, work, Recovery(step, work, sizing, room, self._events, self._norms))


def _sum(before: Tensor, own: Tensor | None) -> Tensor:
    """Return a sum that is not in `before`, and in `own` if that needs no memory."""
    if own is None:
        return before
    return own.add_(before) if _are_dense(before, own) else before + own


def _kept_in(before: Tensor | None, both: Tensor | None) -> Tensor | None:
    """Write a sum to the tensor in which the user keeps the gradient, as autograd does, and return that."""
    if before is None or both is None or both is before or not _are_dense(before, both):
        return both
    try:
        with torch.no_grad():
            return before.copy_(both)
    except Exception as error:  # noqa: BLE001 - others may be written already, and the sum itself is as good
        let_go(error)
        return both


def _are_dense(*gradients: Tensor) -> bool:
    return all(gradient.layout is torch.strided for gradient in gradients)


def _check_functions(loss: object, closure: object, forward: object, loss_scope: str) -> None:
    if closure is None:
        return
    given = [name for name, one in (("loss", loss), ("forward", forward)) if one is not None]
    if loss_scope == "window":
        given.append("loss_scope='window'")
    if given:
        raise InvalidInputError(
            f"closure= runs the model and returns the loss itself, so {' and '.join(given)} would have no effect; "
            "leave one of them out"
        )
    check_function("closure", closure, "batch")


def _experience(known: _Lane | None) -> dict[str, Any]:
    """Return what is known from other batches, as options of `SizingOptions`."""
    if known is None:
        return {}
    size, slope = known.sizing.plan.micro_batch, known.sizing.bytes_per_sample
    return {"begins_with": size, "fitted_before": size, "line": Line(0.0, slope) if slope else None}


def _is_outgrown(sizing: Sizing, window: Window) -> bool:
    """Whether a window is larger than any before, and those fitted at once, so that more may."""
    return not sizing.is_learning and window.samples > sizing.plan.target_batch and sizing.plan.accum_steps == 1
