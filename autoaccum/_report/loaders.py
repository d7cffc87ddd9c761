"""Draws a few batches of a loader and discards them, to look at them.

Random state, the loader's own generators and its persistent workers are restored. An iterator, which cannot be
restarted, is not used, nor is a loader that keeps its place. State inside a dataset cannot be restored.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._data.loaders import can_be_looked_at, left_as_it_was

if TYPE_CHECKING:
    from collections.abc import Iterable

# Seconds after the first batch, short compared with the trials.
_LONGEST_S = 2.0


def first_batches(loader: Iterable[Any], most: int) -> list[Any]:
    """Return at most `most` of a loader's first batches; none if it is an iterator, or keeps its place."""
    found: list[Any] = []
    if not can_be_looked_at(loader):
        return found
    with left_as_it_was(loader):
        ends_s = float("inf")
        for batch in loader:
            found.append(batch)
            ends_s = min(ends_s, time.perf_counter() + _LONGEST_S)
            if len(found) == most or time.perf_counter() > ends_s:
                break
    return found


def samples_of(loader: Any, samples: int) -> int | None:
    """Return the samples of an epoch; None if the loader has no length.

    Args:
        loader: Any loader.
        samples: Those of one batch, assumed to be as large as the others unless the loader gives a length in samples.
    """
    try:
        if isinstance(loader, torch.utils.data.DataLoader) and loader.batch_size is not None and not loader.drop_last:
            return len(loader.sampler)  # type: ignore[arg-type]
        return len(loader) * samples
    except (TypeError, NotImplementedError):  # no length; iterable datasets raise the second
        return None
