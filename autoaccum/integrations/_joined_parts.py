"""Makes one result of a batch from those of its parts: means of numbers, and rows in their order."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.nesting import leaves_of, map_leaves
from autoaccum._loss.loss_values import in_full

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


def mean(values: Sequence[Tensor], weights: Sequence[float], *, loss: Tensor | None = None) -> Tensor:
    """Return the weighted mean of some numbers, leaving out those of no weight, which may be NaN.

    Args:
        values: A number of each part of a batch.
        weights: Their weights.
        loss: The loss of the batch. If it is finite, nothing counts in a part whose number is NaN.
    """
    kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if len(kept) < 2:  # noqa: PLR2004 - a single one is its own mean
        return kept[0][0] if kept else values[0]
    numbers = torch.stack([in_full(value) for value, _ in kept])
    counts = torch.stack([torch.full_like(numbers[0], weight) for _, weight in kept])
    if loss is not None:
        is_empty = is_of_nothing(numbers, loss)
        numbers, counts = numbers.masked_fill(is_empty, 0.0), counts.masked_fill(is_empty, 0.0)
    total = (numbers * counts).sum() / counts.sum()
    dtype = values[0].dtype
    return total.to(dtype if dtype.is_floating_point else torch.get_default_dtype())


def is_of_nothing(numbers: Tensor, loss: Tensor) -> Tensor:
    """Return which numbers are NaN because nothing counts in their parts: the loss of the batch is finite."""
    is_nan = numbers.isnan()
    if loss.device != numbers.device and not is_nan.any():  # numbers on the host do not wait for the device
        return is_nan
    return is_nan & loss.to(numbers.device).isfinite()


def joined(values: Sequence[Any], sizes: Sequence[int], *, loss: Tensor | None = None) -> Any:
    """Return the value for a batch of what a function returned for each of its parts.

    Lists that are as long as their parts have an item for each sample, and are put together, whatever the items are.
    Within all else, values are joined leaf by leaf: tensors with a row for each sample are put together, tensors of one
    number and floats are averaged over samples, numbers of samples added up. None, text and numbers that are equal for
    all parts stay as they are. Of anything else, a list with the value of each part is returned.

    Args:
        values: What was returned for each part.
        sizes: The samples of each part.
        loss: As for `mean`.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if all(isinstance(value, list) for value in values) and [*map(len, values)] == [*sizes]:
        return [*chain.from_iterable(values)]
    inner = frozenset(id(item) for value in values for item in _items_of(value))
    items = [leaves_of(value, inner) for value in values]
    paths = [path for path, _ in items[0]]
    if any([path for path, _ in found] != paths for found in items):
        return list(values)
    columns = [[item for _, item in column] for column in zip(*items, strict=True)]
    if paths == [()]:
        return _joined_leaf(columns[0], sizes, loss)
    whole = iter([joined(column, sizes, loss=loss) for column in columns])
    return map_leaves(lambda _: next(whole), first, inner)


def _items_of(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list | tuple) else ()


def _joined_leaf(column: Sequence[Any], sizes: Sequence[int], loss: Tensor | None) -> Any:
    first = column[0]
    if all(isinstance(leaf, Tensor) for leaf in column):
        if not any(leaf.dim() for leaf in column):
            return mean(column, sizes, loss=loss)
        is_of_rows = [*sizes] == [len(leaf) if leaf.dim() else 0 for leaf in column]
        return torch.cat([*column]) if is_of_rows and len({leaf.shape[1:] for leaf in column}) == 1 else [*column]
    if all(isinstance(leaf, float) for leaf in column):
        return float(mean([torch.tensor(leaf, dtype=torch.float64) for leaf in column], sizes, loss=loss))
    if all(type(leaf) is int for leaf in column) and [*column] == [*sizes]:
        return sum(sizes)
    is_shared = isinstance(first, str | int | None) and all(leaf == first for leaf in column)
    return first if is_shared else [*column]
