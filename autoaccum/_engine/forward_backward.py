"""The smallest unit of training: one micro-batch forward and backward, with model, loss and optimizer assembled.

Nothing is caught here. `stage` records what was being done when something failed, for whoever catches it.
"""

from __future__ import annotations

from contextlib import nullcontext
from functools import cached_property, partial
from itertools import repeat
from operator import attrgetter, is_, is_not
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from autoaccum._data.nesting import without_graphs
from autoaccum._data.transfer import Transfer
from autoaccum._engine.dtensor import is_sharded
from autoaccum._engine.gradients import Progress
from autoaccum._engine.optimizer_step import OptimizerSteps
from autoaccum._engine.out_of_memory import Phase, Stage
from autoaccum._engine.savepoint import Savepoint
from autoaccum._loss import reported
from autoaccum._loss.graph_reader import leaves_of
from autoaccum._loss.knowledge import RecheckWindow
from autoaccum._loss.loss_sources import no_gradient
from autoaccum._loss.sample_choices import MOST_SAMPLES
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from contextlib import AbstractContextManager

    from autoaccum._data.batches import Window
    from autoaccum._engine.gradients import PartResult
    from autoaccum._engine.options import Options
    from autoaccum._engine.out_of_memory import Witness
    from autoaccum._engine.precision import Precision
    from autoaccum._engine.window_checks import GradientChecks
    from autoaccum._loss.known_shares import SingleMicroBatch
    from autoaccum._loss.loss_values import LossValue
    from autoaccum._loss.objective import Objective
    from autoaccum._loss.window_weights import WindowWeights
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices

    # How one forward pass of a micro-batch runs, given the batch and its samples; and what its losses add to the
    # window's, given what that returned, the batch and its samples. None if nothing in them counts.
    LossPass = tuple[Callable[[Any, int], Any], Callable[[Any, Any, int], Tensor | None]]

_GRADIENT = attrgetter("grad")


class Passes(Protocol):
    """Notified of each pass through a model that communicates in it, so that all processes begin passes together."""

    def training_pass(self, size: int) -> AbstractContextManager[None]:
        """Wait until all are ready for a pass, forward and backward; its size is for the error if it fails.

        Raises:
            torch.OutOfMemoryError: One of them lacks memory for the pass.
        """

    def prepare(self, window: Window | None, size: int) -> None:
        """Try the losses on samples of all, unless they were tried: this process's own are of a window, if it has any.

        Args:
            window: The samples.
            size: The most samples that are known to fit in a pass.
        """

    def evaluation_pass(self, size: int) -> AbstractContextManager[None]:
        """Wait until all are ready for a forward pass of an evaluation, which ranks without data join too."""

    def evaluate_with_others(self, make_passes: Callable[[Any, int], object]) -> None:
        """Run the forward passes that others still have to make, in evaluation mode and without gradients."""


class GradientStep:
    """A model, an objective and a precision on one device: everything needed to compute a gradient.

    Attributes:
        parameters: Every parameter of the objective's modules, as of the last `refresh`.
        witness: Called on the first lack of memory, before anything is freed; None if not requested.
        passes: Notified of each pass; None if the model does not communicate in passes.
        scale: Multiplies a loss before its backward pass; None for no scaling.
        watch: Checks gradients before and after each backward pass; None for no check.
        keeps_outputs: Whether to keep the outputs of micro-batches.
        is_spare: Whether the pass that runs contributes nothing, and is made since other processes make theirs.
    """

    optimizer: torch.optim.Optimizer | None = None
    optimizer_steps: OptimizerSteps | None = None

    def __init__(self, objective: Objective, precision: Precision, memory: MemoryBackend, options: Options) -> None:
        self.objective = objective
        self.precision = precision
        self.memory = memory
        self.options = options
        self.transfer = Transfer(memory.device)
        self.witness: Witness | None = None
        self.passes: Passes | None = None
        self.scale: Callable[[Tensor], Tensor] | None = None if precision.scaler is None else precision.scaler.scale
        self.watch: GradientChecks | None = None
        self.keeps_outputs = self.is_spare = False
        self.stage = Stage()
        # `fully_shard` swaps a module's parameters during a pass, which is not a change.
        self.is_sharded = is_sharded(objective.modules)
        self.parameters = self._found()
        self._are_trained = [parameter.requires_grad for parameter in self.parameters]

    def run_in_passes(self, passes: Passes, factor: int) -> None:
        """Run in passes of several processes from now on, with losses times a factor in the backward pass."""
        scale = self.scale
        self.passes = passes
        self.scale = lambda loss: loss * factor if scale is None else scale(loss * factor)
        self.objective.may_repeat_pass = False  # a pass by this process alone would wait for the others

    def refresh(self) -> bool:
        """Look up the current parameters; return whether they, or which of them are trained, have changed."""
        if self.is_sharded:
            return False
        before, were_trained = self.parameters, self._are_trained
        self.parameters = self._found()
        self._are_trained = [parameter.requires_grad for parameter in self.parameters]
        is_same = len(before) == len(self.parameters) and all(map(is_, before, self.parameters))
        return not is_same or were_trained != self._are_trained

    def _found(self) -> list[nn.Parameter]:
        own = (parameter for module in self.objective.modules for parameter in module.parameters())
        return list(dict.fromkeys(own))

    @cached_property
    def savepoint(self) -> Savepoint:
        """Saves all that a pass may change."""
        return Savepoint(self.objective.modules, self.memory.device, self.objective.calls.functions)

    def check_losses(self, samples: Window, *, at_most: int = MOST_SAMPLES) -> None:
        """Try the losses on a few samples; all is as before afterwards."""
        place, autocast = self.transfer.place, self.precision.autocast
        self.objective.check(samples, place, self.savepoint, autocast, self.parameters, at_most=at_most)

    def clear_gradients(self) -> None:
        """Release every gradient, including those of parameters that the optimizer does not hold."""
        for parameter in self.parameters:
            parameter.grad = None

    def drop_progress(self) -> None:
        """Drop the gradients of a window without an optimizer step, and the scaler's progress with them."""
        for parameter in (*self.parameters, *self._found()):
            parameter.grad = None
        if self.precision.scaler is not None:
            # There is no public way: otherwise the next unscale_() is rejected as the second one.
            self.precision.scaler._per_optimizer_states.clear()

    def loss_scale(self) -> float:
        """Return the factor by which losses are scaled for the backward pass; waits for the device."""
        scaler = self.precision.scaler
        return 1.0 if scaler is None else scaler.get_scale()

    def holds_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        # By identity: comparing a tensor with None takes half a millisecond.
        return any(map(is_not, map(_GRADIENT, self.parameters), repeat(None)))

    def accumulate(self, batch: Any, samples: int, weights: SingleMicroBatch | WindowWeights, into: PartResult) -> None:
        """Run one micro-batch by itself, forward and backward; arguments as for `run` and `loss_passes`."""
        self.run(batch, samples, self.loss_passes(weights, into, Progress()))

    def run(self, batch: Any, samples: int, loss_passes: Iterable[LossPass]) -> None:
        """Run one micro-batch, on the device, forward and backward, adding to the gradients; with `passes`, together.

        Several losses with their own forward passes run one after the other, so that only one graph is alive at a time.
        """
        context = self.precision.autocast()
        with nullcontext() if self.passes is None else self.passes.training_pass(samples):
            for forward, weigh in loss_passes:
                self.stage.phase = Phase.FORWARD
                with context:
                    found = forward(batch, samples)
                total = weigh(found, batch, samples)
                del found  # outputs, which a loss seldom needs for its gradient
                if total is not None:
                    self.backward(total)
                del total  # its graph, before the next one

    def loss_passes(self, weights: SingleMicroBatch | WindowWeights, into: PartResult, at: Progress) -> list[LossPass]:
        """Return how micro-batches run with losses of any form."""
        sources = self.objective.calls.sources
        return [
            (
                partial(self.objective.values, source),
                partial(self._weigh, weights, into, at, is_first=source is sources[0], is_last=source is sources[-1]),
            )
            for source in sources
        ]

    def _weigh(
        self,
        weights: SingleMicroBatch | WindowWeights,
        into: PartResult,
        at: Progress,
        found: tuple[list[LossValue], Any],
        batch: Any,
        samples: int,
        *,
        is_first: bool,
        is_last: bool,
    ) -> Tensor | None:
        """Return what the losses of a pass add to the window's, and note it; None if nothing in them counts."""
        losses, outputs = found
        if is_first:
            weights.enter(at.done, samples, batch)
        if self.keeps_outputs:
            into.outputs.append(_kept(outputs))
        weighted, has_reported = [], False
        for loss in losses:
            if loss.is_reported:
                has_reported = True
            elif (value := self._weighed(loss, weights, into)) is not None:
                weighted.append(value)
                # As it is now: without a factor it may be a buffer that the next micro-batch overwrites.
                is_own = value is not loss.value or samples == into.samples
                seen = value.detach() if is_own else value.detach().clone()
                into.loss(loss.name).append(seen.nan_to_num() if loss.may_be_nan else seen)
        if has_reported and into.deferred_error is None:
            reported.note(losses, samples, weights, into.reported)
        if is_last:
            weights.leave()
        if not weighted:
            return None
        total = weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum()
        if not total.requires_grad:
            raise no_gradient(loss.name for loss in losses if not loss.is_reported)
        return total

    def backward(self, total: Tensor) -> None:
        """Add the gradient of a loss to `.grad`."""
        self.stage.phase = Phase.BACKWARD
        if self.watch is not None:
            self.watch.begin(total)
        (total if self.scale is None else self.scale(total)).backward()  # type: ignore[no-untyped-call]
        if self.watch is not None:
            self.watch.end()

    def _weighed(self, loss: LossValue, weights: SingleMicroBatch | WindowWeights, into: PartResult) -> Tensor | None:
        """Return what a loss adds to the window's; None if nothing in it counts."""
        try:
            value = weights.weigh(loss)
        except (RecheckWindow, InvalidInputError) as error:
            if self.passes is None:
                raise
            if into.deferred_error is None:
                found = error.error if isinstance(error, RecheckWindow) else error
                into.deferred_error = found.with_traceback(None)  # which would keep the graph
            return loss.value.nan_to_num() * 0.0
        if value is None:
            if self.passes is not None:  # others wait for the backward pass
                return loss.value.nan_to_num() * 0.0
            into.loss(loss.name).append(loss.value.new_zeros(()))
            into.skipped_leaves += leaves_of(loss.value)
        return value


class TrainingStep(GradientStep):
    """A gradient step with an optimizer, whose parameters are among `parameters`."""

    optimizer: torch.optim.Optimizer
    optimizer_steps: OptimizerSteps

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        memory: MemoryBackend,
        options: Options,
    ) -> None:
        self.optimizer = optimizer
        super().__init__(objective, precision, memory, options)
        clip = options.clip_grad_norm
        self.optimizer_steps = OptimizerSteps(
            optimizer, precision.scaler, memory, clip_grad_norm=clip, stage=self.stage
        )

    def _found(self) -> list[nn.Parameter]:
        return list(dict.fromkeys([*super()._found(), *self.held()]))

    def held(self) -> list[nn.Parameter]:
        """Return the parameters that the optimizer holds."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with another optimizer from now on."""
        self.optimizer_steps.use(optimizer)
        self.optimizer = optimizer


def _kept(outputs: Any) -> Any:
    if outputs is None:
        raise InvalidInputError(
            "keep='outputs': the closure returned none; return them beside the loss, as in {'loss': loss, 'outputs': "
            "outputs}, or leave keep= out"
        )
    return without_graphs(outputs)


def drop_old_gradients(step: GradientStep, notices: Notices) -> None:
    """Drop gradients that exist before a window, whatever their source, and report it: they belong to no window."""
    if step.holds_gradients():
        notices.say(
            "gradients that were there before a window are dropped (.grad was not None; of two Runners, as for a GAN, "
            "each leaves the other some): an optimizer step uses its window alone"
        )
        step.clear_gradients()
