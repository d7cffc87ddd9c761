"""Checks that the values in a checkpoint are of the types that were written, before any of them is used.

A checksum tells damage, not who wrote a file. What `fit` itself keeps is known to the last value. What optimizers and
schedulers keep is judged by their own `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoaccum._arguments import shown

# Of numbers: none beyond what a training can reach.
_COUNT, _POSITIVE = range(2**53), range(1, 2**53)
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
