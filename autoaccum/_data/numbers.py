"""Finds the numbers that a batch carries beside its samples, such as a count of its tokens or a temperature.

Such a number is a Python or NumPy number, or a tensor without dimensions: an item of a tuple, or of a mapping that is
the batch itself or an item of a tuple (inputs, targets). It has no samples, so every cut of the batch carries it whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# The keys that lead to a number.
Path = tuple[Any, ...]

# Transformers' name for the number of targets that count in a batch.
ITEMS = "num_items_in_batch"


def numbers_in(batch: Any) -> dict[Path, float]:
    """Return the numbers of a batch, each by its path; synchronises with their device."""
    if isinstance(batch, Mapping):
        return dict(_in_mapping(batch, ()))
    found: dict[Path, float] = {}
    for at, item in enumerate(batch) if isinstance(batch, tuple | list) else ():
        if isinstance(item, Mapping):
            found.update(_in_mapping(item, (at,)))
        elif _is_number(item):
            found[(at,)] = float(item)
    return found


def spelled(path: Path) -> str:
    """Return a path as text for a message."""
    if not isinstance(path[-1], str):
        return f"item {path[-1]} of the batch"
    return repr("/".join(map(str, path)))


def _in_mapping(mapping: Mapping[Any, Any], above: Path) -> Iterator[tuple[Path, float]]:
    for name, value in mapping.items():
        if isinstance(name, str) and _is_number(value):
            yield (*above, name), float(value)
        elif isinstance(value, Mapping):
            yield from _in_mapping(value, (*above, name))


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.is_complex() and value.dtype is not torch.bool
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
