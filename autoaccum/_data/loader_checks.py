"""Compares a DataLoader's settings with how its batches are read."""

from __future__ import annotations

from collections.abc import Sized
from typing import TYPE_CHECKING

from torch.utils.data import DataLoader, SequentialSampler, default_collate

from autoaccum._arguments import check_iterable
from autoaccum._data.splits import ListOfSamples, is_default
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._data.pieces import Piece, Split


def check_loader(name: str, loader: object, split: Split | None) -> None:
    """Check that a loader can be iterated over, and leaves it to the split to collate.

    Args:
        name: The argument that the loader was passed as.
        loader: The loader.
        split: As for `fit`.

    Raises:
        InvalidInputError: It cannot, or collates the samples that the split would collate.
    """
    check_iterable(name, loader)
    if not isinstance(loader, DataLoader) or loader.batch_sampler is None or not isinstance(split, ListOfSamples):
        return
    if loader.collate_fn in (default_collate, split.collate):
        collator = getattr(loader.collate_fn, "__name__", type(loader.collate_fn).__name__)
        raise InvalidInputError(
            f"split={split!r} collates lists of samples, but {name} collates them already, with {collator}; pass "
            "collate_fn=list to the DataLoader"
        )


def unlike_batch_size(loader: object, first: Piece, split: Split | None) -> str | None:
    """Return how the samples counted in a loader's first batch differ from its `batch_size`; None if they do not."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or not is_default(split):
        return None
    counted, made = first.samples, loader.batch_size
    is_all = not isinstance(loader.sampler, Sized) or len(loader.sampler) < made  # of a dataset smaller than a batch
    if counted == made or (counted < made and is_all):
        return None
    return (
        f"the loader makes batches of {made} (batch_size), and its first one counts as {counted} sample"
        f"{'s' if counted > 1 else ''} by the first dimension of its tensors; if those are no samples (time steps, a "
        "row of several sequences), pass split="
    )


def keeps_order(loader: object) -> bool:
    """Whether a loader is a DataLoader that yields its samples in the order of its dataset."""
    sampler = loader.sampler if isinstance(loader, DataLoader) else None
    return isinstance(sampler, SequentialSampler) or getattr(sampler, "shuffle", True) is False
