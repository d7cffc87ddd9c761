"""Cuts batches of preferences, whose rows are the chosen answers of all samples, then the rejected ones."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ROWS = "input_ids"


class PairedRows:
    """The `Split` of batches from TRL's `DataCollatorForPreference`: `input_ids` (2 N, T), and values (N,) of pairs."""

    def count(self, batch: Mapping[str, Any]) -> int:
        """Return the number of pairs.

        Raises:
            InvalidInputError: The number of rows is odd, or there are none of this form.
        """
        if _ROWS not in batch:
            raise InvalidInputError(
                f"a batch of preferences holds {', '.join(batch)}, and no {_ROWS} with chosen rows and rejected ones "
                "below them, as TRL's newer versions make it; train with TRL 1.16, or pass split= to windowed()"
            )
        rows = len(batch[_ROWS])
        if rows % 2:
            raise InvalidInputError(
                f"a batch of preferences holds {rows} rows, which are no pairs of a chosen and a rejected one; pass "
                "split= for batches of another form"
            )
        return rows // 2

    def cut(self, batch: Mapping[str, Any], sizes: Sequence[int]) -> list[dict[str, Any]]:
        """Return consecutive pairs, one part for each size; tensors of single rows are copied."""
        stops = list(itertools.accumulate(sizes))
        return [self._part(batch, start, stop) for start, stop in zip([0, *stops], stops, strict=False)]

    def join(self, batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return parts as one batch, padded with zeros to the longest."""
        if len(batches) == 1:
            return dict(batches[0])
        shared = [key for key in batches[0] if all(key in batch for batch in batches)]
        return {key: self._joined(key, batches) for key in shared}

    def weight(self, batch: Mapping[str, Any]) -> float:
        """Return what the mean loss of a batch runs over: its pairs. At first all of them have the same loss."""
        return float(self.count(batch))

    def _part(self, batch: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        pairs = self.count(batch)
        return {key: _part_of(value, pairs, start, stop) for key, value in batch.items()}

    def _joined(self, key: str, batches: Sequence[Mapping[str, Any]]) -> Any:
        values = [batch[key] for batch in batches]
        pairs = [self.count(batch) for batch in batches]
        if not isinstance(values[0], Tensor | list) or _length(values[0]) not in (pairs[0], 2 * pairs[0]):
            return values[0]
        halves = [values]
        if _length(values[0]) == 2 * pairs[0]:
            halves = [
                [value[:count] for value, count in zip(values, pairs, strict=True)],
                [value[count:] for value, count in zip(values, pairs, strict=True)],
            ]
        in_order = [value for half in halves for value in half]
        if isinstance(values[0], list):
            return list(itertools.chain.from_iterable(in_order))
        if values[0].dim() > 1:
            longest = max(value.shape[1] for value in in_order)
            in_order = [_padded(value, longest) for value in in_order]
        return torch.cat(in_order)


def _length(value: Any) -> int | None:
    return len(value) if not isinstance(value, Tensor) or value.dim() else None


def _part_of(value: Any, pairs: int, start: int, stop: int) -> Any:
    if not isinstance(value, Tensor | list):
        return value
    length = _length(value)
    if length == pairs:
        return value[start:stop]
    if length != 2 * pairs:
        return value
    if isinstance(value, list):
        return value[start:stop] + value[pairs + start : pairs + stop]
    return torch.cat([value[start:stop], value[pairs + start : pairs + stop]])


def _padded(value: Tensor, length: int) -> Tensor:
    return functional.pad(value, [0, 0] * (value.dim() - 2) + [0, length - value.shape[1]])
