"""Finds the longest sample of a dataset whose lengths can be seen before training, so that it is tried first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from autoaccum._data.by_length import CannotBeOrderedError, length_of
from autoaccum._data.padding import checked_lengths
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._data.padding import Lengths

# What datasets call the lengths of their samples.
_NAMES = ("lengths", "length")


class Longest(NamedTuple):
    """The longest sample of a dataset.

    Attributes:
        place: Its index in the dataset.
        length: Its length in columns.
    """

    place: int
    length: int

    @property
    def text(self) -> str:
        """Its name, for messages."""
        return f"sample {self.place} of the dataset, {self.length:,} columns long"


def longest_of(loader: Any, lengths: Lengths | None) -> Longest | None:
    """Return the longest sample of a loader's dataset; None if its lengths cannot be seen without loading samples.

    They are those of an attribute or a column of the dataset, named by `lengths`, or "lengths" or "length"; or of the
    samples themselves where the dataset is a list of them.

    Args:
        loader: The loader.
        lengths: As for `fit`.
    """
    if not isinstance(loader, torch.utils.data.DataLoader) or loader.collate_fn is None:
        return None
    try:
        found = _lengths_in(loader.dataset, len(loader.dataset), lengths)  # type: ignore[arg-type]
    except TypeError:  # a dataset without a length
        return None
    if not found:
        return None
    index = max(range(len(found)), key=found.__getitem__)
    return Longest(index, found[index])


def batch_of(loader: Any, index: int) -> Any:
    """Return a batch of one sample, as the loader would collate it."""
    return loader.collate_fn([loader.dataset[index]])


def _lengths_in(dataset: Any, samples: int, lengths: Lengths | None) -> Sequence[int]:
    """Return the lengths of a dataset's samples; empty if they cannot be seen."""
    for name in (lengths,) if isinstance(lengths, str) else _NAMES:
        try:
            found: list[int] = checked_lengths(_column(dataset, name), samples).tolist()
        except InvalidInputError:
            continue  # there is none, or it is another thing of that name
        return found
    if isinstance(dataset, list | tuple) and lengths is None:
        try:
            return [length_of(sample) for sample in dataset]
        except CannotBeOrderedError:
            return ()
    return ()


def _column(dataset: Any, name: str) -> Any:
    """Return the lengths that a dataset has under a name; None if it has none."""
    if name in (getattr(dataset, "column_names", None) or ()):
        return dataset[name]
    return getattr(dataset, name, None)
