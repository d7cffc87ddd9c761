"""Resolves and checks the optimizer (an instance, a function or the default), and scales its rates to the batch."""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._arguments import check_call, check_choice, check_positive_int, shown
from autoaccum._records import DeviceScalar
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from torch import nn

    from autoaccum._system.notices import Notices


CALLS_USER_CODE = True  # for own_code.raised_here

MakesOptimizer = Callable[[list["nn.Parameter"]], torch.optim.Optimizer | Sequence[torch.optim.Optimizer]]

# What `fit` takes as `optimizer` by name. Another one changes the training, so nothing chooses it but the user.
NAMES = ("adamw", "sgd")
_EXPONENTS = {"linear": 1.0, "sqrt": 0.5}
# The rates that a scheduler started with; the second belongs to CyclicLR.
SCALED = ("base_lrs", "max_lrs")


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
            evaluates the window itself (LBFGS, SAM) or has modes (schedule-free ones).
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
        _refuse_unsupported(part)
    _check(made, set(parameters), trainable)
    return made


def scaling_factor(rule: str | None, target_batch: int, base_batch: int | None) -> float:
    """Return the factor for learning rates; arguments as for `scale_learning_rate`."""
    if rule is None:
        if base_batch is None:
            return 1.0
        raise InvalidInputError(
            f"base_batch={shown(base_batch)} changes nothing without lr_scaling=; pass lr_scaling='linear' or 'sqrt', "
            "or leave it out"
        )
    check_choice("lr_scaling", rule, tuple(_EXPONENTS))
    if base_batch is None:
        raise InvalidInputError(
            f"lr_scaling={rule!r} needs base_batch, the batch size that the learning rate was chosen for"
        )
    return float((target_batch / check_positive_int("base_batch", base_batch)) ** _EXPONENTS[rule])


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

    The rule is "linear" (Goyal et al. 2017, arXiv:1706.02677) or "sqrt" (Krizhevsky 2014, arXiv:1404.5997). A
    scheduler that was created before goes on from the scaled rates.
    """
    factor = scaling_factor(rule, target_batch, base_batch)
    for group in optimizer.param_groups:
        before = float(group["lr"])
        # Schedulers created after this call start from initial_lr if present; the others belong to OneCycleLR.
        for name in ("lr", "initial_lr", "max_lr", "min_lr"):
            if name in group:
                group[name] = group[name] * factor
        notices.say(f"learning rate: {before:g} -> {float(group['lr']):g} ({rule}, {base_batch} -> {target_batch})")
    # Schedulers created before keep the rates they started with; a scheduler of schedulers keeps its parts'.
    for part in parts_of_scheduler(scheduler):
        for name in SCALED:
            if hasattr(part, name):
                setattr(part, name, [rate * factor for rate in getattr(part, name)])


def learning_rates(optimizer: torch.optim.Optimizer) -> tuple[DeviceScalar | None, ...]:
    """Return the learning rate of each group, without waiting for the device; None for a group that has none."""
    rates = []
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if isinstance(rate, torch.Tensor):
            rate = rate.detach().clone()  # schedulers write into it
        rates.append(None if rate is None else DeviceScalar(rate))
    return tuple(rates)


def parts_of_scheduler(scheduler: Any) -> list[Any]:
    """Return a scheduler and those it is composed of, as in SequentialLR and ChainedScheduler."""
    inner = getattr(scheduler, "_schedulers", ())
    parts = inner if isinstance(inner, list | tuple) else ()
    return [scheduler, *(found for part in parts for found in parts_of_scheduler(part))]


def _named(name: str | None, trainable: list[nn.Parameter], notices: Notices) -> torch.optim.Optimizer:
    if name is not None:
        check_choice("optimizer", name, NAMES)
    if name == "sgd":
        notices.choose("SGD(lr=0.01, momentum=0.9)", "optimizer=")
        return torch.optim.SGD(trainable, lr=0.01, momentum=0.9)
    notices.choose("AdamW(lr=1e-3)", "optimizer=")
    return torch.optim.AdamW(trainable, lr=1e-3)


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


def _refuse_unsupported(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer that takes the loss or gradient of a window at several points, or has modes of its own."""
    name = type(optimizer).__name__
    if all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")):
        raise InvalidInputError(
            f"{name} trains with other weights than it evaluates with, as schedule-free optimizers do, and its train() "
            "and eval() are not called here; call them in a loop of your own, with autoaccum.Accumulator"
        )
    if hasattr(optimizer, "first_step") and hasattr(optimizer, "second_step"):
        raise InvalidInputError(
            f"{name} takes two gradients of the window for each optimizer step (first_step and second_step, as SAM "
            "does), and here it gets one; use the optimizer that it wraps"
        )
    try:
        inspect.signature(type(optimizer).step).bind(optimizer)
    except TypeError as error:
        raise InvalidInputError(
            f"{name}.step() requires a closure that evaluates the loss again, which a window split into micro-batches "
            "does not allow; use a first-order optimizer"
        ) from error
    except ValueError:  # it has no signature
        pass


def _check(optimizer: torch.optim.Optimizer, known: set[nn.Parameter], trainable: list[nn.Parameter]) -> None:
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    foreign = held - known
    if foreign or held.isdisjoint(trainable):
        raise InvalidInputError(
            f"the optimizer holds {len(held)} parameters, {len(foreign)} of them not the model's, and "
            f"{len(held.intersection(trainable))} of the {len(trainable)} that the model trains; make it from this "
            "model's parameters, or pass a function: optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-4)"
        )


# --- several optimizers as one ----------------------------------------------------------------------------------------


def name_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of an optimizer's class, such as "AdamW", or of several: "SGD and Adam"."""
    parts = optimizer.parts if isinstance(optimizer, OptimizerList) else [optimizer]
    return " and ".join(dict.fromkeys(type(part).__name__ for part in parts))


class OptimizerList(torch.optim.Optimizer):
    """Steps several optimizers, one after the other."""

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = list(parts)
        held: set[torch.Tensor] = set()
        for part in self.parts:
            own = {parameter for group in part.param_groups for parameter in group["params"]}
            if shared := held & own:
                raise InvalidInputError(
                    f"optimizer=[...]: {len(shared)} parameters are in more than one of the {len(self.parts)} "
                    f"optimizers (the {type(part).__name__} holds them again), and would be updated twice; give each "
                    "parameter to one of them"
                )
            held |= own
        state: defaultdict[Any, Any] = defaultdict(dict)
        for part in self.parts:
            state.update(part.state)
        self.state = state
        # The base's __init__ would make groups and a state of its own; this makes the rest, as for a copy.
        super().__setstate__({"defaults": {}})

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all parts, in order."""
        return [group for part in self.parts for group in part.param_groups]

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        for part, own in zip(self.parts, self._by_part(groups), strict=True):
            part.param_groups = own

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The state that all parts share: each has that of its own parameters in it."""
        return self.parts[0].state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        for part in self.parts:
            part.state = state

    def _by_part(self, groups: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        rest = iter(groups)
        return [list(islice(rest, len(part.param_groups))) for part in self.parts]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refuse: which part would step it is not known."""
        raise InvalidInputError(
            f"a group of {len(list(param_group.get('params', ())))} parameters cannot be added to several "
            "optimizers together; call add_param_group of the one that is to step it"
        )

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step each part."""
        if closure is not None:
            raise InvalidInputError("closure= cannot be given to several optimizers, since each would call it again")
        for part in self.parts:
            part.step()

    def __getstate__(self) -> dict[str, Any]:
        """Return the parts, which hold everything."""
        return {"defaults": self.defaults, "parts": self.parts}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take a copy's parts; or a state and groups for all parts, which become parts of this object alone."""
        if "parts" not in state:
            parts = []
            for part, groups in zip(self.parts, self._by_part(state["param_groups"]), strict=True):
                own = object.__new__(type(part))
                own.__dict__ = {name: value for name, value in vars(part).items() if name != "step"}  # a scheduler's
                own.__setstate__({"state": state["state"], "param_groups": groups})
                parts.append(own)
            state = {"parts": parts}
        super().__setstate__(state)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state into the parts themselves."""
        parts = self.parts
        super().load_state_dict(state_dict)
        loaded, self.parts = self.parts, parts
        for part, new in zip(parts, loaded, strict=True):
            part.__setstate__({"state": new.state, "param_groups": new.param_groups})
