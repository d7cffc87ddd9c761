"""The smallest part of training: one micro-batch forward and backward, on a model, loss and optimizer put together.

Nothing is caught here. `phase` says what was being done when something failed, so that whoever catches it can tell.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from operator import attrgetter, is_not
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoaccum._arguments import check_positive_number, shown
from autoaccum._data.transfer import Transfer
from autoaccum._engine import devices, optimizers, precision
from autoaccum._engine.dtensor import is_sharded, refuse_sharded
from autoaccum._engine.optimizer_step import Updates
from autoaccum._engine.parameters import Inventory
from autoaccum._engine.phases import Phase, Stage
from autoaccum._loss import reported
from autoaccum._loss.objective import Objective, no_gradient
from autoaccum._loss.weighting import Over
from autoaccum._memory.limits import format_bytes
from autoaccum._oom import first_line, is_oom
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._engine.precision import Precision
    from autoaccum._loss.objective import Factors, Loss, Source
    from autoaccum._loss.terms import Term
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices

_GRADIENT = attrgetter("grad")


class Passes(Protocol):
    """Told of each pass through a model that talks to other processes in it; they begin theirs at the same time."""

    def begin_pass(self) -> None:
        """Wait until all are ready for the next pass, forward and backward.

        Raises:
            torch.OutOfMemoryError: One of them lacks memory for it.
        """

    def begin_evaluation_pass(self) -> None:
        """Wait until all are ready for the next forward pass of an evaluation, which some make with nothing."""

    def end_pass(self) -> None:
        """Note that this process has got through."""

    def evaluate_with_others(self, make_passes: Callable[[Any, int], object]) -> None:
        """Make the forward passes that others still have to make, in evaluation mode and without gradients."""

    def evaluation_failed(self, error: Exception, size: int | None) -> None:
        """See what a failure with so many samples means for the others, who may wait for this process in a pass."""


class Witness(Protocol):
    """Is shown the first lack of memory, while the frames in which it happened are still there."""

    def see(
        self, error: BaseException, *, phase: str, size: int | None, step: int | None = None, is_trial: bool = False
    ) -> None:
        """Look at what is alive."""


@dataclass(slots=True)
class Accumulated:
    """What the micro-batches of a window have given so far.

    Attributes:
        losses: By name, what each micro-batch adds to the window's loss, on the device.
        pair_weights: By name, the weights of (sum, weight) pairs so far.
        reported: What is reported beside the losses, as `reported.note` has it.
    """

    losses: dict[str, list[Tensor]] = field(default_factory=dict)
    pair_weights: dict[str, list[Tensor | float]] = field(default_factory=dict)
    reported: dict[reported.Slot, list[Any]] = field(default_factory=dict)

    def add(self, other: Accumulated) -> None:
        """Add what a further micro-batch has given."""
        for name, values in other.losses.items():
            self.losses.setdefault(name, []).extend(values)
        for name, weights in other.pair_weights.items():
            self.pair_weights.setdefault(name, []).extend(weights)
        for slot, numbers in other.reported.items():
            self.reported.setdefault(slot, []).extend(numbers)


class GradientStep:
    """A model, what to minimise and a precision on one device: all that a gradient takes.

    Args:
        objective: How a batch becomes loss terms.
        precision: In which the forward pass runs.
        memory: The device.

    Attributes:
        parameters: Every parameter of the objective's modules, as of the last `look`.
        has_added: Whether gradients may have been added to since this was last set to False.
        sources_left: Losses with forward passes of their own that the present micro-batch has yet to go through.
        stage: Says what is being done.
        witness: Is shown the first lack of memory before it is let go of; None where nobody asked.
        passes: Is told of each pass; None where the model talks to nobody in it.
    """

    def __init__(self, objective: Objective, precision: Precision, memory: MemoryBackend) -> None:
        self.objective = objective
        self.precision = precision
        self.memory = memory
        self.transfer = Transfer(memory.device)
        self.has_added = False
        self.sources_left = 0
        self.witness: Witness | None = None
        self.passes: Passes | None = None
        self.stage = Stage()
        self._inventory = self._take_stock()
        self.parameters = self._inventory.parameters

    def _take_stock(self) -> Inventory:
        modules = self.objective.modules
        return Inventory(modules, is_fixed=is_sharded(modules))

    @property
    def phase(self) -> Phase:
        """What is being done."""
        return self.stage.phase

    def look(self) -> bool:
        """See which parameters there are now; return whether anything has changed since the last look."""
        has_changed = self._inventory.look()
        self.parameters = self._inventory.parameters
        return has_changed

    def clear_gradients(self) -> None:
        """Let every gradient go, those of parameters that the optimizer does not hold included."""
        for parameter in self.parameters:
            parameter.grad = None

    def abandon(self) -> None:
        """Forget a window that has not become an update: its gradients, and how far the scaler had come with them."""
        self.clear_gradients()
        if self.precision.scaler is not None:
            # Without a public way: otherwise the next unscale_() is refused as the second one.
            self.precision.scaler._per_optimizer_states.clear()

    def holds_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(map(is_not, map(_GRADIENT, self.parameters), itertools.repeat(None)))

    def accumulate(self, batch: Any, samples: int, factors: Factors, into: Accumulated) -> None:
        """Run one micro-batch forward and backward, adding to the gradients.

        Several losses with forward passes of their own are run one after the other, so that one graph is alive at a
        time.

        Args:
            batch: The micro-batch, on the device.
            samples: Its number of samples.
            factors: What its losses are multiplied by.
            into: Where its losses are noted.

        Raises:
            InvalidInputError: What came out is no loss, or has no graph.
        """
        if self.passes is not None:
            self.passes.begin_pass()
        self.sources_left = len(self.objective.sources)
        for source in self.objective.sources:
            self.sources_left -= 1
            self._run(source, batch, samples, factors, into)
        if self.passes is not None:
            self.passes.end_pass()

    def _run(self, source: Source, batch: Any, samples: int, factors: Factors, into: Accumulated) -> None:
        """Run one forward pass and the backward pass of what came out."""
        scaler = self.precision.scaler
        self.stage.phase = Phase.FORWARD
        with self.precision.autocast():
            # Without the outputs, which a loss seldom needs for its gradient.
            terms = self.objective.terms(source, batch, samples)[0]
        weighted: list[Tensor] = []
        has_reported = False
        for term in terms:
            if term.is_reported:
                has_reported = True
                continue
            value = self._weighted(term, factors, into)
            if value is not None:
                into.losses.setdefault(term.name, []).append(value.detach())
                weighted.append(value)
        if has_reported:
            reported.note(terms, samples, factors, self.objective.weighting, into.reported)
        if not weighted:
            return
        total = weighted[0] if len(weighted) == 1 else torch.stack(weighted).sum()
        if not total.requires_grad:
            raise no_gradient(term.name for term in terms if not term.is_reported)
        self.stage.phase = Phase.BACKWARD
        self.has_added = True
        (total if scaler is None else scaler.scale(total)).backward()  # type: ignore[no-untyped-call]

    def _weighted(self, term: Term, factors: Factors, into: Accumulated) -> Tensor | None:
        """Return what a term adds to the window's loss; None where nothing in it counts."""
        factor = factors.named.get(term.name, factors.usual)
        if term.over is Over.PAIR and term.name not in factors.named:
            assert term.weight is not None
            if factors.alone:
                check_weight(term.name, term.weight)
                return term.value / term.weight
            # The window's weight is known only when all of it has been seen: until then one that is near enough.
            into.pair_weights.setdefault(term.name, []).append(term.weight)
            factor = factors.provisional
        if factor == 0.0:
            # The mean over nothing is not a number. Where others wait for the backward pass it is made all the same.
            return None if self.passes is None else term.value.nan_to_num() * 0.0
        return term.value if factor == 1.0 else term.value * factor


class TrainingStep(GradientStep):
    """What a gradient takes, and an optimizer.

    Args:
        objective: As for `GradientStep`.
        optimizer: Made from the parameters of the objective's modules.
        precision: As for `GradientStep`.
        memory: As for `GradientStep`.
        clip_grad_norm: Norm to which the window's gradient is clipped; None leaves it.

    Attributes:
        parameters: Every parameter of the objective's modules and of the optimizer, as of the last `look`.
        updates: Makes updates from the gradients that accumulate here.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        precision: Precision,
        memory: MemoryBackend,
        *,
        clip_grad_norm: float | None,
    ) -> None:
        self.optimizer = optimizer
        super().__init__(objective, precision, memory)
        self.updates = Updates(optimizer, precision.scaler, memory, clip_grad_norm=clip_grad_norm, stage=self.stage)

    def _take_stock(self) -> Inventory:
        modules = self.objective.modules
        return Inventory(modules, self.optimizer, is_fixed=is_sharded(modules))

    def look(self) -> bool:
        """See which parameters there are now; return whether anything has changed since the last look."""
        has_changed = self._inventory.look(self.optimizer)
        self.parameters = self._inventory.parameters
        return has_changed

    def use(self, optimizer: torch.optim.Optimizer) -> None:
        """Step with another optimizer from now on."""
        self.optimizer = optimizer
        self.updates.use(optimizer)


def check_weight(name: str, weight: float | Tensor) -> None:
    """Refuse a (sum, weight) pair of a window in which nothing counts, where that is known without asking the device.

    Raises:
        InvalidInputError: The weight is 0.
    """
    if (not isinstance(weight, Tensor) or weight.device.type == "cpu") and float(weight) == 0.0:
        raise InvalidInputError(
            f"the (sum, weight) pairs {name!r} of this window have weight 0 together, so their mean does not exist; "
            "leave such samples out"
        )


def assemble(
    model: nn.Module,
    loss: Loss | Sequence[Loss] | None,
    optimizer: torch.optim.Optimizer | optimizers.MakesOptimizer | None,
    *,
    memory: MemoryBackend,
    precision_name: str,
    forward: Callable[[nn.Module, Any], Any] | None,
    loss_reduction: str | None,
    clip_grad_norm: float | None,
    notices: Notices,
    is_one_of_several: bool = False,
) -> TrainingStep:
    """Check what `fit`, `find_micro_batch` and `Runner` have in common, move the model and put a step together.

    Raises:
        InvalidInputError: An argument cannot be used.
        DoesNotFitError: The model itself, or what is made beside it, does not fit on the device; it is where it was.
    """
    check_clip(clip_grad_norm)
    check_model(model)
    with devices.failures_told(memory, "what a training needs beside the model"):
        objective = Objective(model, loss, forward=forward, loss_reduction=loss_reduction, notices=notices)
        if not is_one_of_several:
            refuse_sharded(objective.modules)
        chosen = optimizers.resolve(optimizer, objective.modules, notices)
        how = precision.resolve(precision_name, memory.device, model, notices)
    if not model.training:
        notices.say(
            "the model is in evaluation mode and stays so; call model.train() for dropout and BatchNorm to train"
        )
    _move(objective.modules, chosen, memory)
    return TrainingStep(objective, chosen, how, memory, clip_grad_norm=clip_grad_norm)


def assemble_without_optimizer(
    model: nn.Module,
    loss: Loss | Sequence[Loss] | None,
    *,
    memory: MemoryBackend,
    precision_name: str,
    forward: Callable[[nn.Module, Any], Any] | None,
    loss_reduction: str | None,
    notices: Notices,
) -> GradientStep:
    """Check and move the model as `assemble` does, and put together what a gradient takes.

    Raises:
        InvalidInputError: An argument cannot be used.
        DoesNotFitError: As `assemble`.
    """
    check_model(model)
    with devices.failures_told(memory, "what a gradient needs beside the model"):
        objective = Objective(model, loss, forward=forward, loss_reduction=loss_reduction, notices=notices)
        refuse_sharded(objective.modules)
        how = precision.resolve(precision_name, memory.device, model, notices)
    _move(objective.modules, None, memory)
    return GradientStep(objective, how, memory)


def check_model(model: object) -> None:
    """Refuse what is no model, or one that has no values to train.

    Raises:
        InvalidInputError: It is no module, or its parameters are not there yet.
    """
    if not isinstance(model, nn.Module):
        raise InvalidInputError(f"model={shown(model)} is no torch.nn.Module; pass one, made and not its class")
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(value):
            raise InvalidInputError(
                f"model: {name} of {type(model).__name__} has no shape before a first forward pass (a lazy module); "
                "run the model on a batch once, then make the optimizer"
            )
        if value.is_meta:
            raise InvalidInputError(
                f"model: {name} of {type(model).__name__} is on the meta device and has no values; call "
                "model.to_empty(device=...) and initialise it, or load weights with assign=True"
            )


def check_clip(clip_grad_norm: object) -> None:
    """Check the norm to clip to.

    Raises:
        InvalidInputError: It is no positive number.
    """
    if clip_grad_norm is not None:
        check_positive_number("clip_grad_norm", clip_grad_norm)


def drop_old_gradients(step: GradientStep, notices: Notices) -> None:
    """Let go of gradients that are there before a window, whoever has left them, and say so: they belong to none."""
    if step.holds_gradients():
        notices.say(
            "gradients that were there before a window are dropped (.grad was not None; of two Runners, as for a GAN, "
            "each leaves the other some): an update is made from its window alone"
        )
        step.clear_gradients()


def _move(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None, memory: MemoryBackend) -> None:
    homes = {module: home for module in modules if (home := _home(module)) is not None}
    if all(home == memory.device for home in homes.values()):
        return
    failure = ""
    try:
        for module in homes:
            module.to(memory.device)
        if optimizer is not None and optimizer.state:
            # Casts state that was made on the old device to where its parameters are now.
            optimizer.load_state_dict(optimizer.state_dict())
    except Exception as error:
        if not is_oom(error):
            raise
        failure = first_line(error)
    if failure:
        for module, home in homes.items():
            module.to(home)
        memory.release()
        size = sum(p.numel() * p.element_size() for module in modules for p in module.parameters())
        raise DoesNotFitError(
            f"the model's parameters take {format_bytes(size)}, and {format_bytes(memory.reading().free_bytes)} are "
            f"free on {memory.name} ({failure}); end other processes there, or choose a smaller model or another device"
        )


def _home(module: nn.Module) -> torch.device | None:
    tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
    return None if tensor is None else tensor.device
