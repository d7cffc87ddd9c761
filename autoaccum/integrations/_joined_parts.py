"""Makes one result of a batch from those of its parts: means of numbers, and rows in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
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

    Tensors and lists with a row for each sample are put together, tensors of one number and floats are averaged over
    samples, numbers of samples added up, mappings and tuples joined entry by entry. None, text and numbers that are
    equal for all parts stay as they are. Of anything else, a list with the value of each part is returned.

    Args:
        values: What was returned for each part.
        sizes: The samples of each part.
    """
    first, alike = values[0], len({type(value) for value in values}) == 1
    if len(values) == 1:
        return first
    if not alike:
        return list(values)
    if isinstance(first, Mapping) and all(value.keys() == first.keys() for value in values):
        return {key: joined([value[key] for value in values], sizes) for key in first}
    if isinstance(first, list | tuple):
        return _joined_sequences(values, sizes)
    return _joined_tensors(values, sizes) if isinstance(first, Tensor) else _joined_others(values, sizes)


def _joined_sequences(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, list) and not holds_tensor(first) and [*map(len, values)] == [*sizes]:
        return [*chain.from_iterable(values)]
    if len({len(value) for value in values}) > 1:
        return list(values)
    entries = [joined(entry, sizes) for entry in zip(*values, strict=True)]
    return first._make(entries) if hasattr(first, "_make") else type(first)(entries)


def _joined_others(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    first = values[0]
    if isinstance(first, float):
        return sum(value * size for value, size in zip(values, sizes, strict=True)) / sum(sizes)
    if isinstance(first, int) and [*values] == [*sizes]:
        return sum(sizes)
    is_shared = isinstance(first, str | int | None) and all(value == first for value in values)
    return first if is_shared else list(values)


def _joined_tensors(values: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    if not any(value.dim() for value in values):
        return mean(values, sizes)
    lengths = [len(value) if value.dim() else 0 for value in values]
    is_of_rows = lengths == [*sizes] and len({value.shape[1:] for value in values}) == 1
    return torch.cat(list(values)) if is_of_rows else list(values)
