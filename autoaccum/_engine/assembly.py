"""Assembles what training needs from the options of a call: the model on its device, an objective and an optimizer."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from autoaccum._engine import devices, optimizers, precision
from autoaccum._engine.dtensor import refuse_offloaded, refuse_sharded, spread_again
from autoaccum._engine.forward_backward import GradientStep, TrainingStep
from autoaccum._engine.oom_report import OomReport
from autoaccum._loss.calls import Calls
from autoaccum._loss.loss_values import describe
from autoaccum._loss.objective import Objective
from autoaccum._memory.limits import format_bytes
from autoaccum._oom import first_line, is_oom
from autoaccum.errors import DoesNotFitError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from autoaccum._engine.options import Options
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._system.notices import Notices


def assemble(
    model: nn.Module,
    options: Options,
    *,
    memory: MemoryBackend,
    notices: Notices,
    is_one_of_several: bool = False,
) -> TrainingStep:
    """Check and move the model, and assemble a training step.

    Raises:
        InvalidInputError: The model, or an option with it, cannot be used.
        DoesNotFitError: The model, or what is created along with it, does not fit on the device. The model is not
            moved.
    """
    _check_values(model)
    with devices.oom_explained(memory, "what training needs in addition to the model"):
        objective = _objective(model, options, notices)
        spread_again(objective.modules)
        if not is_one_of_several:
            refuse_sharded(objective.modules)
        optimizer = optimizers.resolve(options.optimizer, objective.modules, notices)
        how = precision.resolve(options.precision, memory.device, model, notices)
    if not model.training:
        notices.say(
            "the model is in evaluation mode and stays so; call model.train() for dropout and BatchNorm to train"
        )
    refuse_offloaded(objective.modules)
    _move(objective.modules, optimizer, memory)
    step = TrainingStep(objective, optimizer, how, memory, options)
    _report_oom(step, notices)
    return step


def assemble_without_optimizer(
    model: nn.Module,
    options: Options,
    *,
    memory: MemoryBackend,
    notices: Notices,
    further: Sequence[nn.Module] = (),
    scale: torch.amp.GradScaler | Callable[[Tensor], Tensor] | None = None,
    is_one_of_several: bool = False,
) -> GradientStep:
    """Check and move the model as `assemble` does, and assemble what a gradient needs."""
    _check_values(model)
    with devices.oom_explained(memory, "what a gradient needs in addition to the model"):
        objective = _objective(model, options, notices, further)
        spread_again(objective.modules)
        if not is_one_of_several:
            refuse_sharded(objective.modules)
        how = precision.resolve_without_scaler(options.precision, memory.device, model, notices, scale)
    refuse_offloaded(objective.modules)
    _move(objective.modules, None, memory)
    step = GradientStep(objective, how, memory, options)
    if scale is not None:
        step.scale = scale.scale if isinstance(scale, torch.amp.GradScaler) else _checked(scale)
    _report_oom(step, notices)
    return step


def _objective(model: nn.Module, options: Options, notices: Notices, further: Sequence[nn.Module] = ()) -> Objective:
    calls = Calls(model, options.loss, forward=options.forward, notices=notices, split=options.split, further=further)
    objective = Objective(calls, loss_reduction=options.loss_reduction, notices=notices)
    for module in calls.modules:
        for name, parameter in module.named_parameters():
            if parameter.is_inference():
                raise InvalidInputError(
                    f"model: {name} of {type(module).__name__} was made in torch.inference_mode(), and cannot be "
                    "trained; make the model outside of it, or copy.deepcopy(model) there"
                )
    return objective


def _checked(scale: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that scales a loss, and checks that it can still be differentiated."""

    def scaled(loss: Tensor) -> Tensor:
        found: Any = scale(loss)
        if not isinstance(found, Tensor) or found.numel() != 1 or not found.requires_grad:
            raise InvalidInputError(
                f"scale= returned {describe(found)}, which cannot be backpropagated; return the loss times a factor, "
                "a number with its graph"
            )
        return found

    return scaled


def _report_oom(step: GradientStep, notices: Notices) -> None:
    if (folder := step.options.report_folder) is not None:
        step.witness = OomReport(folder, step, notices).see


def _check_values(model: nn.Module) -> None:
    """Reject a model without values to train."""
    check_shapes(model)
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if value.is_meta:
            raise InvalidInputError(
                f"model: {name} of {type(model).__name__} is on the meta device and has no values; call "
                "model.to_empty(device=...) and initialise it, or load weights with assign=True"
            )


def check_shapes(model: nn.Module) -> None:
    """Reject a model whose parameters have no shape yet."""
    for name, value in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(value):
            raise InvalidInputError(
                f"model: {name} of {type(model).__name__} has no shape before a first forward pass (a lazy module); "
                "run the model on a batch once, then make the optimizer"
            )


def _move(modules: Sequence[nn.Module], optimizer: torch.optim.Optimizer | None, memory: MemoryBackend) -> None:
    homes = {module: home for module in modules if (home := _home(module)) is not None}
    if all(home == memory.device for home in homes.values()):
        return
    failure = ""
    try:
        for module in homes:
            module.to(memory.device)
        if optimizer is not None and optimizer.state:
            # Moves state created on the old device to the parameters' new device.
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
