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

_MOST = 2**53


def _count(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MOST


def _positive(value: object) -> bool:
    return _count(value) and value != 0


def _whole(value: object) -> bool:
    return type(value) is int and abs(value) < 1 << 64


def _flag(value: object) -> bool:
    return type(value) is bool


def _real(value: object) -> bool:
    return type(value) is float


def _text(value: object) -> bool:
    return type(value) is str


def _states(value: object) -> bool:
    """Of random generators, which `RandomState.check` knows."""
    return type(value) is tuple


def _tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _anything(_: object) -> bool:
    return True


# A mapping has these entries, a list any number of the one; (None, form) may be None.
_POSITION = {
    "epoch": _positive,
    **dict.fromkeys(("batches", "used"), _count),
    **dict.fromkeys(("closed", "put_back"), _flag),
    **dict.fromkeys(("start", "before_last"), (None, _states)),
    "last": (None, _whole),
    "memory": {},
    "loader_state": _anything,
    "state_at": _whole,
    **dict.fromkeys(("length", "batch_size", "samples"), (None, _count)),
}
_CUTTING = {
    "plan": [_positive],
    "largest": [_positive],
    "frontier": (None, {}),
    **dict.fromkeys(("is_found", "is_timed"), _flag),
    **dict.fromkeys(("compared_to", "oom_events", "skipped_samples"), _count),
    "widths": (None, [_count]),
    "plans": [_anything],
    "asked": lambda value: value == "auto" or _positive(value),
    "memory": (None, [_text]),
    "cap": (None, _positive),
}
_PART = {"random": _states, "position": _POSITION, "cutting": _CUTTING}
_WHOLE = {
    **dict.fromkeys(("windows", "samples"), _count),
    "target_batch": _positive,
    **dict.fromkeys(("counts", "precision", "device"), _text),
    "stopped": (None, {"reason": _text, "epochs": (None, _positive), "max_steps": (None, _positive)}),
    "evaluated": (None, _count),
    "last_val_loss": (None, _real),
    "modules": [{"state": {}, "buffers": {}}],
    "optimizer": {
        "type": _text,
        "parameters": [[_text]],
        "weights": (None, [_tensor]),
        "state": {"state": {}, "param_groups": [{"params": [_count]}]},
    },
    "scheduler": (None, {"type": _text, "state": _anything}),
    "scaler": (None, {}),
    "noise_scale": (None, {"measured": _count, "variance": _real, "squared_norm": _real}),
}


def check_types(content: Mapping[str, Any]) -> None:
    """Check all that `fit` itself keeps.

    Raises:
        KeyError: Something is missing.
        ValueError: A value is of another type, or beyond what a training can reach.
    """
    parts = content["ranks"]
    _check("ranks", parts, (None, [_PART]))
    _check("", content, {**_WHOLE, **(_PART if parts is None else {})})
    for part in (content,) if parts is None else parts:
        for since_and_sizes in part["cutting"]["plans"]:
            since, sizes = since_and_sizes
            _check("cutting.plans", [since, *sizes], [_positive])
            _require("cutting.plans", sizes, sizes)
        position = part["position"]
        left, has_drawn = position["put_back"] or position["used"] > 0, position["batches"] > 0
        if (position["before_last"] is not None) != has_drawn or (has_drawn and position["start"] is None):
            raise ValueError("position: the states of random generators do not go with the batches")
        if not -1 <= position["state_at"] <= position["batches"] - left:
            raise ValueError(f"position.state_at is {position['state_at']}, of {position['batches']} batches")


def _check(name: str, value: Any, form: Any) -> None:
    is_optional = type(form) is tuple
    form = form[1] if is_optional else form
    if is_optional and value is None:
        return
    if type(form) is dict:
        _require(name, value, isinstance(value, Mapping))
        for key, inner in form.items():
            _check(f"{name}.{key}".strip("."), value[key], inner)
    elif type(form) is list:
        _require(name, value, isinstance(value, list | tuple))
        for item in value:
            _check(name, item, form[0])
    else:
        _require(name, value, form(value))


def _require(name: str, value: object, is_right: object) -> None:
    if not is_right:
        raise ValueError(f"{name} is {shown(value)}, of type {type(value).__name__}")


# --- what others keep -------------------------------------------------------------------------------------------------


def check_like(name: str, value: Any, own: Any) -> None:
    """Check a value of an optimizer, a scheduler or a scaler by that which it has in this call.

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
    elif own is None or _flag(own):
        _require(name, value, value is None or _flag(value) or (own is None and _is_number(value)))
    elif _is_number(own):
        _require(name, value, _is_number(value))
    elif isinstance(own, Tensor):
        _require(name, value, isinstance(value, Tensor) and value.shape == own.shape)
    elif type(own) is str:
        _require(name, value, _text(value))


def check_states(optimizer: torch.optim.Optimizer, states: Mapping[Any, Any]) -> None:
    """Check what an optimizer keeps for each parameter.

    PyTorch's keep the same entries for all parameters of a group: numbers, or tensors of the parameter's shape. Of
    others is only known that entries of a name are of one type in a group, where they are there.

    Raises:
        ValueError: They are not.
    """
    number = 0
    for group in optimizer.param_groups:
        kinds: dict[str, type] = {}
        names: set[Any] = set()
        for parameter in group["params"]:
            what, state = f"optimizer.state.{number}", states.get(number, {})
            number += 1
            _require(what, state, isinstance(state, Mapping))
            for name, value in state.items():
                kind = Tensor if isinstance(value, Tensor) else type(value)
                _require(f"{what}.{name}", value, value is None or kinds.setdefault(name, kind) is kind)
                fits = _is_number(value) or (kind is Tensor and value.shape == parameter.shape)
                _require(f"{what}.{name}", value, fits or not _is_plain(optimizer))
            names = names or set(state)
            _require(what, state, not state or set(state) == names or not _is_plain(optimizer))
    _require("optimizer.state", states, states.keys() <= set(range(number)) or not _is_plain(optimizer))


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    kind = type(optimizer)
    return kind.__module__.startswith("torch.optim.") and kind.__name__ not in ("Adafactor", "LBFGS")


def _is_number(value: object) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return type(value) is float or (type(value) is int and abs(value) < 1 << 63)
