"""Checks that the values in a checkpoint are of the types that were written, before any of them is used.

A checksum tells damage, not who wrote a file. What `fit` itself keeps is known to the last value. What optimizers,
schedulers and modules keep is theirs: it is compared with what those of this call keep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autoaccum._arguments import shown

if TYPE_CHECKING:
    import torch

# Of numbers: none beyond what a training can reach.
_COUNT, _POSITIVE = range(2**53), range(1, 2**53)
# What PyTorch's optimizers keep as numbers; all else is of the parameter's shape.
_NUMBERS = frozenset({"step", "eta", "mu", "mu_product"})
# A form is a type, a range of numbers, a list of any number of a form, or a mapping with these; (form,) may be None.
_POSITION = {
    "epoch": _POSITIVE,
    **dict.fromkeys(("batches", "used"), _COUNT),
    **dict.fromkeys(("closed", "is_unused"), bool),
    **dict.fromkeys(("start", "before_last"), (tuple,)),  # of generators, which `RandomState.check` knows
    "last": (_COUNT,),
    "memory": {},
    "loader_state": object,
    "state_at": range(-1, 2**53),
    **dict.fromkeys(("length", "batch_size", "samples"), (_COUNT,)),
}
_CUTTING: dict[str, Any] = {
    "plan": [_POSITIVE],
    "largest": [_POSITIVE],
    "frontier": ({},),
    **dict.fromkeys(("is_found", "is_timed"), bool),
    **dict.fromkeys(("compared_to", "oom_events", "skipped_samples"), _COUNT),
    "widths": ([_COUNT],),
    "plans": [object],
    "asked": int | str,
    "memory": ([str],),
    "cap": (_POSITIVE,),
}
_PART = {"random": tuple, "position": _POSITION, "cutting": _CUTTING}
_WHOLE = {
    **dict.fromkeys(("windows", "samples"), _COUNT),
    "target_batch": _POSITIVE,
    **dict.fromkeys(("counts", "precision", "device"), str),
    "stopped": ({"reason": str, "epochs": (_POSITIVE,), "max_steps": (_POSITIVE,)},),
    "evaluated": (_COUNT,),
    "last_val_loss": (float,),
    "modules": [{"state": {}, "buffers": {}}],
    "optimizer": {
        "type": str,
        "parameters": [[str]],
        "weights": ([Tensor],),
        "state": {"state": {}, "param_groups": [{"params": [_COUNT]}]},
    },
    "scheduler": ({"type": str, "state": object},),
    "scaler": ({},),
    "noise_scale": ({"measured": _COUNT, "variance": float, "squared_norm": float},),
}


def check_types(content: Mapping[str, Any]) -> None:
    """Check all that `fit` itself keeps.

    Raises:
        KeyError: Something is missing.
        ValueError: A value is of another type, or beyond what a training can reach.
    """
    parts = content["ranks"]
    _check("ranks", parts, ([_PART],))
    _check("", content, {**_WHOLE, **(_PART if parts is None else {})})
    for part in (content,) if parts is None else parts:
        for since, sizes in part["cutting"]["plans"]:
            _check("cutting.plans", [since, *sizes], [_POSITIVE])
            _require("cutting.plans", sizes, sizes)
        position = part["position"]
        left, has_drawn = position["is_unused"] or position["used"] > 0, position["batches"] > 0
        if (position["before_last"] is not None) != has_drawn or (has_drawn and position["start"] is None):
            raise ValueError("position: the states of random generators do not go with the batches")
        if not -1 <= position["state_at"] <= position["batches"] - left:
            raise ValueError(f"position.state_at is {position['state_at']}, of {position['batches']} batches")


def _check(name: str, value: Any, form: Any) -> None:
    if isinstance(form, tuple):
        if value is not None:
            _check(name, value, form[0])
    elif isinstance(form, dict):
        _require(name, value, isinstance(value, Mapping))
        for key, inner in form.items():
            _check(f"{name}.{key}".strip("."), value[key], inner)
    elif isinstance(form, list):
        _require(name, value, isinstance(value, list | tuple))
        for item in value:
            _check(name, item, form[0])
    elif isinstance(form, range):
        _require(name, value, type(value) is int and value in form)
    else:
        _require(name, value, isinstance(value, form))


def _require(name: str, value: object, is_right: object) -> None:
    if not is_right:
        raise ValueError(f"{name} is {shown(value)}, of type {type(value).__name__}")


# --- what others keep -------------------------------------------------------------------------------------------------


def check_like(name: str, value: Any, own: Any) -> None:
    """Check a value of one of PyTorch's optimizers, schedulers or scalers by that which it has in this call.

    Raises:
        ValueError: It is of another kind. A switch that is None here may be set there, and the reverse.
    """
    if isinstance(own, Mapping):
        _require(name, value, isinstance(value, Mapping))
        for key in own.keys() & value.keys():
            check_like(f"{name}.{key}", value[key], own[key])
    elif isinstance(own, list | tuple):
        _require(name, value, isinstance(value, list | tuple) and (not own or len(value) == len(own)))
        for item, one in zip(value, own, strict=False):
            check_like(name, item, one)
    elif own is None or type(own) is bool:
        _require(name, value, value is None or type(value) is bool or (own is None and _is_number(value)))
    elif _is_number(own):
        _require(name, value, _is_number(value))
    elif isinstance(own, Tensor):
        _require(name, value, isinstance(value, Tensor) and value.shape == own.shape)
    elif type(own) is str:
        _require(name, value, type(value) is str)


def check_states(optimizer: torch.optim.Optimizer, states: Mapping[Any, Any]) -> None:
    """Check what an optimizer keeps for each parameter; of others than PyTorch's is only known that it has names.

    PyTorch's keep the same entries for all parameters of a group: numbers, or tensors of the parameter's shape.

    Raises:
        ValueError: It is of another kind.
    """
    is_plain = is_of_torch(optimizer) and type(optimizer).__name__ not in ("Adafactor", "LBFGS")
    number = 0
    for group in optimizer.param_groups:
        common: dict[Any, bool] = {}  # entries, and whether they are tensors
        for parameter in group["params"]:
            what, state = f"optimizer.state.{number}", states.get(number, {})
            number += 1
            _require(what, state, isinstance(state, Mapping))
            if not is_plain:
                continue
            for name, value in state.items():
                is_like_it = isinstance(value, Tensor) and value.shape == parameter.shape
                _require(f"{what}.{name}", value, is_like_it or (name in _NUMBERS and _is_number(value)))
            entries = {name: isinstance(value, Tensor) for name, value in state.items()}
            common = common or entries
            _require(what, state, entries in ({}, common))
    _require("optimizer.state", states, not is_plain or states.keys() <= set(range(number)))


def is_of_torch(thing: object) -> bool:
    """Whether an optimizer or a scheduler is PyTorch's, and holds nothing of the user's whose form may change."""
    return type(thing).__module__.startswith("torch.") and not hasattr(thing, "lr_lambdas")


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)
