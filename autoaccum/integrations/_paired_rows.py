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
                "below them, as TRL's newer versions make it; train with TRL 1.16, or pass split= to auto_accumulate()"
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
        halved, places = _halved(batch, self.count(batch)), [0, *itertools.accumulate(sizes)]
        return [
            dict(batch) | {key: _joined([half[start:stop] for half in halves]) for key, halves in halved.items()}
            for start, stop in itertools.pairwise(places)
        ]

    def join(self, batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return parts as one batch, padded with zeros to the longest."""
        if len(batches) == 1:
            return dict(batches[0])
        found = [_halved(batch, self.count(batch)) for batch in batches]
        whole = {key: value for key, value in batches[0].items() if all(key in batch for batch in batches)}
        for key in whole.keys() & found[0].keys():
            columns = zip(*(halves[key] for halves in found), strict=True)
            whole[key] = _joined([half for column in columns for half in column])
        return whole

    def weight(self, batch: Mapping[str, Any]) -> float:
        """Return what the mean loss of a batch runs over: its pairs. At first all of them have the same loss."""
        return float(self.count(batch))


def _halved(batch: Mapping[str, Any], pairs: int) -> dict[str, list[Any]]:
    """Return what has a row for each pair, as it is, and what has two, in halves: chosen rows and rejected ones."""
    rows = {
        key: value
        for key, value in batch.items()
        if (isinstance(value, Tensor) and value.dim()) or isinstance(value, list)
    }
    for key, value in rows.items():
        if isinstance(value, Tensor) and len(value) not in (pairs, 2 * pairs):
            raise InvalidInputError(
                f"a batch of preferences cannot be cut, since its {key} has {len(value)} rows for {pairs} pairs, as "
                "patches of images have; pass split= to auto_accumulate()"
            )
    halved = {key: [value[:pairs], value[pairs:]] for key, value in rows.items() if len(value) == 2 * pairs}
    return halved | {key: [value] for key, value in rows.items() if len(value) == pairs}


def _joined(parts: list[Any]) -> Any:
    if isinstance(parts[0], list):
        return [*itertools.chain.from_iterable(parts)]
    if parts[0].dim() > 1 and len({part.shape[1] for part in parts}) > 1:
        longest = max(part.shape[1] for part in parts)
        parts = [functional.pad(one, [0, 0] * (one.dim() - 2) + [0, longest - one.shape[1]]) for one in parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)
