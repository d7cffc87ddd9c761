"""Makes one result of a batch from those of its parts: means of numbers, and rows in their order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Number
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from autoaccum._data.nesting import holds_tensor
from autoaccum._loss.loss_weights import Common
from autoaccum._loss.terms import Form, in_full

if TYPE_CHECKING:
    from autoaccum._data.batches import Window
    from autoaccum._loss.loss_weights import LossWeights
    from autoaccum._loss.objective import Objective

_LOSS = "loss"


class Weights:
    """What the parts of a batch weigh in means over it.

    Args:
        sizes: The samples of each part.
        window: The batch; None if there is only one part.
        objective: How its loss is weighted; None if that is not known.

    Attributes:
        sizes: As the argument.
        is_sum: Whether the batch's loss is the sum of the parts' losses.
    """

    def __init__(self, sizes: Sequence[int], window: Window | None, objective: Objective | None) -> None:
        self.sizes = list(sizes)
        self._known: LossWeights | None = None if objective is None else objective.weights
        self.is_sum = self._known is not None and _adds_up(self._known)
        self._window = window
        self._of_loss: list[float] | None = None

    @property
    def of_loss(self) -> list[float]:
        """What each part weighs in the mean loss."""
        if self._of_loss is None:
            self._of_loss = self._weigh()
        return self._of_loss

    @property
    def usual(self) -> list[float]:
        """What each part weighs in a mean of which nothing else is known: its targets that count, or its samples."""
        by_targets = self._known is not None and self._known.counts(_LOSS)
        return self.of_loss if by_targets else list(map(float, self.sizes))

    def _weigh(self) -> list[float]:
        if self._window is None or self._known is None or self.is_sum:
            return list(map(float, self.sizes))
        found, start = [], 0
        for size in self.sizes:
            found.append(float(self._known.of_samples(_LOSS, self._window.part(start, start + size))[1]))
            start += size
        return found


def _adds_up(known: LossWeights) -> bool:
    """Whether the loss of a batch is the sum of its parts' losses, be it divided by a number that the batch carries."""
    forms = known.forms.get(_LOSS, ())
    return known.common is Common.SUM or (bool(forms) and all(form.form is Form.SUM for form in forms))


def mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of some numbers, leaving out those of no weight, which may be NaN."""
    kept = [(value, weight) for value, weight in zip(values, weights, strict=True) if weight]
    if len(kept) < 2:  # noqa: PLR2004 - a single one is its own mean
        return kept[0][0] if kept else values[0]
    total = torch.stack([in_full(value) * weight for value, weight in kept]).sum() / sum(weight for _, weight in kept)
    dtype = values[0].dtype
    return total.to(dtype if dtype.is_floating_point else torch.get_default_dtype())


def joined(values: Sequence[Any], weights: Weights) -> Any:
    """Return the value for a batch of what a function returned for each of its parts.

    Numbers are averaged, or added up if they count samples; tensors and lists with a row for each sample are put
    together, mappings and tuples are joined entry by entry. What is equal for all parts stays as it is. Of anything
    else, a list of all values is returned.

    Args:
        values: What was returned for each part.
        weights: What the parts weigh.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if all(isinstance(value, Tensor) for value in values):
        return _joined_tensors(values, weights)
    if isinstance(first, Mapping) and all(isinstance(one, Mapping) and one.keys() == first.keys() for one in values):
        return {key: joined([value[key] for value in values], weights) for key in first}
    if isinstance(first, list | tuple) and all(type(value) is type(first) for value in values):
        return _joined_sequences(values, weights)
    if isinstance(first, float) and all(isinstance(value, Number) for value in values):
        pairs = zip(values, weights.usual, strict=True)
        return sum(value * weight for value, weight in pairs if weight) / sum(weights.usual)
    return _joined_others(values, weights)


def _joined_others(values: Sequence[Any], weights: Weights) -> Any:
    if all(type(value) is int for value in values) and list(values) == weights.sizes:
        return sum(values)
    return values[0] if _are_equal(values) else list(values)


def _joined_sequences(values: Sequence[Any], weights: Weights) -> Any:
    first = values[0]
    if isinstance(first, list) and not holds_tensor(first) and _are_rows(values, weights):
        return [row for value in values for row in value]
    if any(len(value) != len(first) for value in values):
        return list(values)
    entries = [joined(entry, weights) for entry in zip(*values, strict=True)]
    return first._make(entries) if hasattr(first, "_make") else type(first)(entries)


def _joined_tensors(values: Sequence[Tensor], weights: Weights) -> Any:
    if all(value.dim() == 0 for value in values):
        return mean(values, weights.usual)
    if _are_rows(values, weights) and len({value.shape[1:] for value in values}) == 1:
        return torch.cat(list(values))
    return list(values)


def _are_rows(values: Sequence[Any], weights: Weights) -> bool:
    sizes = [0 if isinstance(value, Tensor) and not value.dim() else len(value) for value in values]
    return sizes == weights.sizes


def _are_equal(values: Sequence[Any]) -> bool:
    try:
        return all(bool(value == values[0]) for value in values)
    except Exception:  # noqa: BLE001 - what cannot be compared is not equal
        return False
