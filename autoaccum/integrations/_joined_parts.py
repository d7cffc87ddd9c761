"""Makes one result of a batch from those of its parts: means of numbers, and rows in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import torch
from torch import Tensor

from autoaccum._data.nesting import holds_tensor
from autoaccum._loss.terms import in_full


def mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of some numbers, leaving out those of no weight, which may be NaN."""
    kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if len(kept) < 2:  # noqa: PLR2004 - a single one is its own mean
        return kept[0][0] if kept else values[0]
    total = torch.stack([in_full(value) * weight for value, weight in kept]).sum() / sum(weight for _, weight in kept)
    dtype = values[0].dtype
    return total.to(dtype if dtype.is_floating_point else torch.get_default_dtype())


def joined(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return the value for a batch of what a function returned for each of its parts.

    Numbers are averaged, or added up if they count samples; tensors and lists with a row for each sample are put
    together, mappings and tuples are joined entry by entry. What is equal for all parts stays as it is. Of anything
    else, a list of all values is returned.

    Args:
        values: What was returned for each part.
        sizes: The samples of each part.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if all(isinstance(value, Tensor) for value in values):
        return _joined_tensors(values, sizes)
    if isinstance(first, Mapping) and all(isinstance(one, Mapping) and one.keys() == first.keys() for one in values):
        return {key: joined([value[key] for value in values], sizes) for key in first}
    if isinstance(first, list | tuple) and all(type(value) is type(first) for value in values):
        return _joined_sequences(values, sizes)
    if isinstance(first, float) and all(isinstance(value, Number) for value in values):
        pairs = zip(values, sizes, strict=True)
        return sum(value * weight for value, weight in pairs if weight) / sum(sizes)
    return _joined_others(values, sizes)


def _joined_others(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    if all(type(value) is int for value in values) and list(values) == list(sizes):
        return sum(values)
    return values[0] if _are_equal(values) else list(values)


def _joined_sequences(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, list) and not holds_tensor(first) and _are_rows(values, sizes):
        return [row for value in values for row in value]
    if any(len(value) != len(first) for value in values):
        return list(values)
    entries = [joined(entry, sizes) for entry in zip(*values, strict=True)]
    return first._make(entries) if hasattr(first, "_make") else type(first)(entries)


def _joined_tensors(values: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    if all(value.dim() == 0 for value in values):
        return mean(values, sizes)
    if _are_rows(values, sizes) and len({value.shape[1:] for value in values}) == 1:
        return torch.cat(list(values))
    return list(values)


def _are_rows(values: Sequence[Any], sizes: Sequence[int]) -> bool:
    return list(sizes) == [0 if isinstance(value, Tensor) and not value.dim() else len(value) for value in values]


def _are_equal(values: Sequence[Any]) -> bool:
    try:
        return all(bool(value == values[0]) for value in values)
    except Exception:  # noqa: BLE001 - what cannot be compared is not equal
        return False
