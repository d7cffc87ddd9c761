"""Tries out the saved state of an optimizer and a scheduler on stand-ins that take no memory.

Both accept any state and fail at their next step, when the model has changed already. So a stand-in of the optimizer
steps on meta tensors with the saved state and settings, and a stand-in of the scheduler computes its next rate. What
cannot be tried (a step that needs numbers or a closure, a scheduler of the user's own) is left to the object itself.
"""

from __future__ import annotations

import contextlib
import copy
import math
import warnings
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim import optimizer as optim

from autoaccum._engine.dtensor import is_spread
from autoaccum._engine.optimizer_step import uncompiled
from autoaccum._training.checkpoint_schema import MalformedError, need

if TYPE_CHECKING:
    from collections.abc import Mapping

# Settings by which an optimizer chooses kernels; all compute the same, and stand-ins can do with the plain ones.
_KERNELS = ("foreach", "fused", "capturable", "differentiable")
_NUMBERS = (int, float)
_LARGEST = 2**63


def check_optimizer(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], *, is_same_torch: bool) -> None:
    """Raise `MalformedError` unless an optimizer can resume from a saved state.

    Args:
        optimizer: This run's; nothing of it is changed.
        saved: A `state_dict`, of the right form and with as many groups and parameters.
        is_same_torch: Whether this version of torch wrote it; others have other settings.
    """
    own = optimizer.state_dict()["param_groups"]
    is_torchs = type(optimizer).__module__.startswith("torch.optim")
    for place, (group, now) in enumerate(zip(saved["param_groups"], own, strict=True)):
        _check_group(group, now, f"optimizer: param_groups {place}", needs_all=is_torchs and is_same_torch)
    known = {number for group in own for number in group["params"]}
    for number, values in saved["state"].items():
        is_of_none = is_torchs or isinstance(number, int)  # others may keep more under names
        need(number in known or not is_of_none, f"optimizer: state {number!r}", "is of no parameter")
        need(number not in known or isinstance(values, dict), f"optimizer: state {number!r}", "is not a dictionary")
    is_spread_over_ranks = any(is_spread(one) for group in optimizer.param_groups for one in group["params"])
    if not is_spread_over_ranks and (fresh := _fresh(optimizer)) is not None:
        if is_torchs:
            _check_state(saved, fresh)
        try:
            _stepped(optimizer, saved)
        except Exception as error:
            raise MalformedError(f"optimizer: its state does not serve a step ({_line(error)})") from error


def _check_group(group: Mapping[str, Any], now: Mapping[str, Any], where: str, *, needs_all: bool) -> None:
    need(group["params"] == now["params"], where, "has parameters that are not numbered as torch does")
    for name, value in now.items():
        if name in group:
            _check_alike(group[name], value, f"{where}: {name}", may_be_none=name in _KERNELS)
        else:
            need(not needs_all, where, f"lacks {name}")
    need(not _is_number(group.get("lr")) or float(group["lr"]) >= 0, where, "has a negative lr")


def check_scheduler(
    scheduler: Any, saved: Mapping[str, Any], groups: list[dict[str, Any]], *, is_same_torch: bool
) -> None:
    """Raise `MalformedError` unless a scheduler can resume from a saved state; one of the user's own is left alone.

    Args:
        scheduler: This run's; nothing of it is changed.
        saved: A `state_dict`.
        groups: The optimizer's groups as they were saved.
        is_same_torch: Whether this version of torch wrote it; others have other attributes.
    """
    if type(scheduler).__module__ != lr_scheduler.__name__:
        return
    _check_attributes(scheduler, saved, needs_all=is_same_torch)
    parts, kept = getattr(scheduler, "_schedulers", None), saved.get("_schedulers")
    if parts is not None:
        if type(kept) is not list or len(kept) != len(parts) or not all(isinstance(each, dict) for each in kept):
            raise MalformedError("scheduler: _schedulers is not what its parts are")
        for part, state in zip(parts, kept, strict=True):
            check_scheduler(part, state, groups, is_same_torch=is_same_torch)
        return
    lambdas = getattr(scheduler, "lr_lambdas", None)
    if lambdas is not None:
        # Whatever they compute is the user's own, and may count how often it is asked.
        _check_lambdas(saved.get("lr_lambdas"), lambdas)
    elif getattr(scheduler, "_scale_fn_custom", None) is None:
        _check_rate(scheduler, saved, groups)


def _check_attributes(scheduler: Any, saved: Mapping[str, Any], *, needs_all: bool) -> None:
    for name in saved:
        is_method = name == "optimizer" or callable(getattr(type(scheduler), str(name), None))
        need(not is_method, f"scheduler: {name}", "is not a state of one")
    for name, value in scheduler.state_dict().items():
        if name in saved and name not in ("_schedulers", "lr_lambdas"):
            _check_alike(saved[name], value, f"scheduler: {name}")
        else:
            need(name in saved or not needs_all, "scheduler", f"lacks {name}")


def _check_lambdas(kept: Any, own: list[Any]) -> None:
    is_list = type(kept) is list and len(kept) == len(own)
    if not is_list or not all(each is None or isinstance(each, dict) for each in kept):
        raise MalformedError("scheduler: lr_lambdas is not what its functions are")


# --- of the same kind -------------------------------------------------------------------------------------------------


def _check_alike(there: Any, here: Any, where: str, *, may_be_none: bool = False) -> None:
    """Check that a saved setting is of the same kind as this run's."""
    if here is None or (there is None and may_be_none):
        return
    if isinstance(here, bool) or isinstance(there, bool):
        need(isinstance(there, bool) and isinstance(here, bool), where, "is neither true nor false")
    elif _is_number(here):
        need(_is_number(there), where, "is not a number")
        need(math.isfinite(there) or not math.isfinite(here), where, "is not finite")
        need(abs(there) < _LARGEST or not math.isfinite(there), where, "is too large")
    elif isinstance(here, list | tuple):
        need(isinstance(there, list | tuple) and len(there) == len(here), where, f"has not {len(here)} entries")
        for place, (one, other) in enumerate(zip(there, here, strict=True)):
            _check_alike(one, other, f"{where} {place}")
    elif isinstance(here, Counter):
        need(isinstance(there, Counter) and all(map(_is_whole, (*there, *there.values()))), where, "is not a counter")
    elif isinstance(here, dict):
        need(isinstance(there, dict) and here.keys() <= there.keys(), where, "lacks some of its keys")
        for name in here:
            _check_alike(there[name], here[name], f"{where} {name}", may_be_none=True)
    elif isinstance(here, str | bytes):
        need(type(there) is type(here), where, f"is not a {type(here).__name__}")


def _is_number(value: Any) -> bool:
    is_scalar = isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()
    return is_scalar or (isinstance(value, _NUMBERS) and not isinstance(value, bool))


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _LARGEST


# --- an optimizer's step on shapes ------------------------------------------------------------------------------------


def _fresh(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """Return a stand-in for a fresh optimizer of this kind that has stepped; None where it cannot without numbers."""
    if optim._global_optimizer_pre_hooks or optim._global_optimizer_post_hooks:
        return None  # they would take the stand-in for an optimizer of the training
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return None  # its saved state has a form of its own, as of bitsandbytes
    with contextlib.suppress(Exception):
        return _stepped(optimizer, {"state": {}, "param_groups": optimizer.state_dict()["param_groups"]})
    return None


def _stepped(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> torch.optim.Optimizer:
    """Return a stand-in with a saved state that has stepped; whatever that raises, the training would meet."""
    made = _stand_in(optimizer, saved)
    with warnings.catch_warnings(), torch.no_grad(), uncompiled(optimizer):
        warnings.simplefilter("ignore")
        type(made).step(made)
    return made


def _check_state(saved: Mapping[str, Any], fresh: torch.optim.Optimizer) -> None:
    """Check that the saved state of each parameter is of the kind that a step makes."""
    for group, kept in zip(fresh.param_groups, saved["param_groups"], strict=True):
        for number, parameter in zip(kept["params"], group["params"], strict=True):
            made, values = fresh.state.get(parameter, {}), saved["state"].get(number, {})
            for name in made.keys() & values.keys():
                _check_value(name, values[name], made[name], f"optimizer: state {number}: {name}")


def _check_value(name: str, there: Any, here: Any, where: str) -> None:
    if name == "step":
        # Some versions of torch keep it as a tensor, some as a number.
        need(_is_number(there) and 0 <= float(there) < _LARGEST, where, "is not a count of steps")
    elif isinstance(here, Tensor):
        need(isinstance(there, Tensor) and there.shape == here.shape, where, f"is not of shape {tuple(here.shape)}")
        need(there.is_floating_point() == here.is_floating_point(), where, f"is of {there.dtype}")
        need(there.is_complex() == here.is_complex(), where, f"is of {there.dtype}")


def _stand_in(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> torch.optim.Optimizer:
    made = object.__new__(type(optimizer))
    hooks = {name: type(value)() for name, value in vars(optimizer).items() if name.endswith("_hooks")}
    made.__dict__ = {**vars(optimizer), **hooks, "defaults": dict(optimizer.defaults)}
    made.__dict__.pop("step", None)  # a scheduler's, which notes on the real one that it has stepped
    state: dict[Any, Any] = defaultdict(dict)
    groups = []
    for group, kept in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        settings = {name: _without_numbers(value) for name, value in kept.items() if name != "params"}
        settings |= {name: False for name in _KERNELS if name in settings}
        parameters = [_shape_of(parameter) for parameter in group["params"]]
        for number, parameter in zip(kept["params"], parameters, strict=True):
            if number in saved["state"]:
                values = saved["state"][number]
                state[parameter] = {n: _without_numbers(value) for n, value in values.items()}
        groups.append({**settings, "params": parameters})
    made.__setstate__({"state": state, "param_groups": groups})  # which adds what another torch did not know
    return made


def _shape_of(parameter: Tensor) -> nn.Parameter:
    made = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
    if made.requires_grad:
        made.grad = torch.empty_like(made)
    return made


def _without_numbers(value: Any) -> Any:
    """Return a value with tensors of the same shapes; single numbers (counts of steps, rates) are kept, on the host."""
    if isinstance(value, Tensor):
        return value.detach().to("meta") if value.dim() else value.detach().to("cpu", copy=True)
    if type(value) in (list, tuple):
        return type(value)(_without_numbers(item) for item in value)
    if type(value) is dict:
        return {name: _without_numbers(item) for name, item in value.items()}
    return copy.copy(value)


# --- a scheduler's next rate ------------------------------------------------------------------------------------------


def _check_rate(scheduler: Any, saved: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
    """Compute the learning rate at the saved place; whatever that raises, the training would meet."""
    made = object.__new__(type(scheduler))
    optimizer = object.__new__(torch.optim.Optimizer)
    optimizer.__dict__ = {"param_groups": [dict(group) for group in groups], "defaults": {}, "state": {}}
    made.__dict__ = {**vars(scheduler), "optimizer": optimizer}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            type(made).load_state_dict(made, dict(saved))
            if isinstance(made, lr_scheduler.ReduceLROnPlateau):
                made.step(1.0)
                return
            made._get_lr_called_within_step = True
            made._is_initial = False
            for rate in made.get_lr():
                float(rate)
    except Exception as error:
        raise MalformedError(f"scheduler: its state gives no learning rate ({_line(error)})") from error


def _line(error: Exception) -> str:
    text = str(error).strip()
    with contextlib.suppress(IndexError):
        return f"{type(error).__name__}: {text.splitlines()[0]}"
    return type(error).__name__
