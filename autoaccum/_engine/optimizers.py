"""Resolves and checks the optimizer (an instance, a function or the default), and scales its rates to the batch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._arguments import check_call, check_choice, check_positive_int, shown
from autoaccum._engine.eight_bit_adam import AdamW8bit, adamw8bit
from autoaccum._engine.optimizer_list import OptimizerList
from autoaccum._records import DeviceScalar
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import nn

    from autoaccum._system.notices import Notices

CALLS_USER_CODE = True  # for own_code.raised_here

MakesOptimizer = Callable[[list["nn.Parameter"]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]

# What `fit` takes as `optimizer` by name. Another one changes the training, so nothing chooses it but the user.
NAMES = ("adamw", "adamw8bit")
_SCALINGS: dict[str, Callable[[float], float]] = {"linear": lambda ratio: ratio, "sqrt": math.sqrt}


def resolve(
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | MakesOptimizer | str | None,
    modules: Iterable[nn.Module],
    notices: Notices,
) -> torch.optim.Optimizer:
    """Return the optimizer to step with.

    Args:
        optimizer: One; a list of several; a function of the list of trainable parameters that makes one or several; one
            of `NAMES`; or None for AdamW(lr=1e-3).
        modules: The model, and losses that are modules.
        notices: Reports the choice.

    Raises:
        InvalidInputError: No parameter needs a gradient, the optimizer holds parameters that are not the model's, or it
            evaluates the window itself (LBFGS, SAM).
    """
    parameters = list(dict.fromkeys(parameter for module in modules for parameter in module.parameters()))
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        raise InvalidInputError(
            "the model has no parameters, so there is nothing to train; assign layers to attributes of the module, and "
            "lists of them as torch.nn.ModuleList"
        )
    if not trainable:
        raise InvalidInputError(
            f"none of the model's {len(parameters)} parameters needs a gradient, so there is nothing to train; set "
            "requires_grad_(True) on those that should learn"
        )
    if optimizer is None or isinstance(optimizer, str):
        return _named(optimizer, trainable, notices)
    made = _made(optimizer, trainable)
    for part in made.parts if isinstance(made, OptimizerList) else [made]:
        _refuse_one_that_evaluates(part)
    _check(made, set(parameters), trainable)
    return made


def is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer, or one of several, is what `adamw8bit` makes."""
    parts = optimizer.parts if isinstance(optimizer, OptimizerList) else [optimizer]
    return any(isinstance(part, AdamW8bit) or type(part).__name__ == AdamW8bit.__name__ for part in parts)


def check_scaling(rule: str | None, target_batch: int, base_batch: int | None) -> None:
    """Check the arguments `lr_scaling` and `base_batch`.

    Raises:
        InvalidInputError: One of them cannot be used, or has no effect without the other.
    """
    if rule is not None:
        scaling_factor(rule, target_batch, base_batch)
    elif base_batch is not None:
        raise InvalidInputError(
            f"base_batch={shown(base_batch)} changes nothing without lr_scaling=; pass lr_scaling='linear' or 'sqrt', "
            "or leave it out"
        )


def scaling_factor(rule: str, target_batch: int, base_batch: int | None) -> float:
    """Return the factor for learning rates; arguments as for `scale_learning_rate`.

    Raises:
        InvalidInputError: The rule is unknown or `base_batch` is missing.
    """
    check_choice("lr_scaling", rule, tuple(_SCALINGS))
    if base_batch is None:
        raise InvalidInputError(
            f"lr_scaling={rule!r} needs base_batch, the batch size that the learning rate was chosen for"
        )
    return _SCALINGS[rule](target_batch / check_positive_int("base_batch", base_batch))


def scale_learning_rate(
    optimizer: torch.optim.Optimizer,
    rule: str,
    *,
    target_batch: int,
    base_batch: int | None,
    notices: Notices,
    scheduler: Any = None,
) -> None:
    """Multiply every group's learning rate once, for a batch size other than the one it was chosen for.

    Args:
        optimizer: Its groups are changed.
        rule: "linear" (Goyal et al. 2017, arXiv:1706.02677) or "sqrt" (Krizhevsky 2014, arXiv:1404.5997).
        target_batch: Samples per update.
        base_batch: Samples per update that the learning rate was chosen for.
        notices: Reports the change.
        scheduler: A scheduler created before this call; it continues from the scaled rates.

    Raises:
        InvalidInputError: The rule is unknown or `base_batch` is missing.
    """
    factor = scaling_factor(rule, target_batch, base_batch)
    for group in optimizer.param_groups:
        before = group["lr"]
        group["lr"] = before * factor
        # Schedulers created after this call start from initial_lr if present; the others belong to OneCycleLR.
        for name in ("initial_lr", "max_lr", "min_lr"):
            if name in group:
                group[name] = group[name] * factor
        notices.say(
            f"learning rate: {float(before):g} -> {float(group['lr']):g} ({rule}, {base_batch} -> {target_batch})"
        )
    # Schedulers created before keep the rates they started with; a scheduler of schedulers keeps its parts'.
    for part in parts_of_scheduler(scheduler):
        for name in ("base_lrs", "max_lrs"):  # the second belongs to CyclicLR
            if hasattr(part, name):
                setattr(part, name, [rate * factor for rate in getattr(part, name)])


def learning_rates(optimizer: torch.optim.Optimizer) -> tuple[DeviceScalar | None, ...]:
    """Return the learning rate of each group, without waiting for the device; None for a group that has none."""
    groups = optimizer.param_groups
    if len(groups) == 1 and isinstance(rate := groups[0].get("lr"), float):
        return (DeviceScalar(rate),)
    return tuple(map(_rate, groups))


def _rate(group: dict[str, Any]) -> DeviceScalar | None:
    rate = group.get("lr")
    if rate is None:
        return None
    # Schedulers write into a rate that is a tensor.
    return DeviceScalar(rate.detach().clone() if isinstance(rate, torch.Tensor) else rate)


def parts_of_scheduler(scheduler: Any) -> list[Any]:
    """Return a scheduler and those it is composed of, as in SequentialLR and ChainedScheduler."""
    inner = getattr(scheduler, "_schedulers", ())
    parts = inner if isinstance(inner, list | tuple) else ()
    return [scheduler, *(found for part in parts for found in parts_of_scheduler(part))]


def _named(name: str | None, trainable: list[nn.Parameter], notices: Notices) -> torch.optim.Optimizer:
    if name is not None:
        check_choice("optimizer", name, NAMES)
    made = adamw8bit(trainable) if name == "adamw8bit" else torch.optim.AdamW(trainable, lr=1e-3)
    package = type(made).__module__.partition(".")[0]
    by = {"autoaccum": ", by torchao", "bitsandbytes": ", by bitsandbytes"}.get(package, "")
    notices.say(f"optimizer: {type(made).__name__}(lr=1e-3){by} (optimizer={name!r})")
    return made


def _made(given: Any, trainable: list[nn.Parameter]) -> torch.optim.Optimizer:
    made = given
    if not isinstance(given, torch.optim.Optimizer) and callable(given):
        check_call("optimizer", given, "parameters")
        made = given(trainable)
    if isinstance(made, list | tuple) and made and all(isinstance(part, torch.optim.Optimizer) for part in made):
        return made[0] if len(made) == 1 else OptimizerList(made)
    if not isinstance(made, torch.optim.Optimizer):
        raise InvalidInputError(
            f"optimizer={shown(given)} is neither a torch.optim.Optimizer, nor a list of them, nor a function of the "
            "parameters that returns one or several; pass such as torch.optim.Adam(model.parameters(), lr=1e-3)"
        )
    return made


def _refuse_one_that_evaluates(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose update takes the loss or gradient of the window at several points.

    Raises:
        InvalidInputError: It is one.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise InvalidInputError(
            "LBFGS evaluates the loss several times an update, which a window cut into micro-batches does not allow; "
            "use a first-order optimizer"
        )
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise InvalidInputError(
            f"{name} takes two gradients of the window for each update (first_step and second_step, as SAM does), and "
            "an update here is made from one; use the optimizer that it wraps"
        )
    if _needs_closure(optimizer):
        raise InvalidInputError(
            f"{name}.step() requires a closure that evaluates the loss again, which a window cut into micro-batches "
            "does not allow; use a first-order optimizer"
        )


def _needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError:
        return True
    except ValueError:  # it has no signature
        return False
    return False


def _check(optimizer: torch.optim.Optimizer, known: set[nn.Parameter], trainable: list[nn.Parameter]) -> None:
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    foreign = held - known
    if foreign or held.isdisjoint(trainable):
        raise InvalidInputError(
            f"the optimizer holds {len(held)} parameters, {len(foreign)} of them not the model's, and "
            f"{len(held.intersection(trainable))} of the {len(trainable)} that the model trains; make it from this "
            "model's parameters, or pass a function: optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-4)"
        )
