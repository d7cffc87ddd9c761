"""Draws a few batches of a loader and discards them, to time it or to look at them.

Random state, the loader's own generators and its persistent workers are restored. An iterator, which cannot be
restarted, is not used. State inside a dataset cannot be restored.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._data.batches import count
from autoaccum._data.loaders import left_as_it_was
from autoaccum._report.records import LoaderFacts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autoaccum._data.pieces import Split

# Seconds after the first batch: enough for some batches of a loader that keeps up with training, short compared with
# the trials.
_LISTENED_S = 2.0
# Prefetched batches arrive at once and do not show the loader's speed; this many more are timed, if there is time.
_BATCHES = 8


def listen_to(loader: Iterable[Any], split: Split | None = None, *, for_s: float = _LISTENED_S) -> LoaderFacts | None:
    """Time a loader's first batches.

    Args:
        loader: The loader, iterated over from the start.
        split: As for `fit`.
        for_s: Stop this many seconds after the first batch.

    Returns:
        The times; None if the loader is an iterator or has no batch.
    """
    if isinstance(loader, Iterator):
        return None
    with left_as_it_was(loader):
        return _timed(iter(loader), loader, split, for_s)


def first_batches(loader: Iterable[Any], most: int, for_s: float = _LISTENED_S) -> list[Any]:
    """Return at most `most` of a loader's first batches, drawn as in `listen_to`; none if it is an iterator."""
    if isinstance(loader, Iterator):
        return []
    with left_as_it_was(loader):
        batches: list[Any] = []
        first_at = time.perf_counter()
        for batch in loader:
            first_at = first_at if batches else time.perf_counter()
            batches.append(batch)
            if len(batches) == most or time.perf_counter() - first_at > for_s:
                break
        return batches


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


def _timed(batches: Iterator[Any], loader: Any, split: Split | None, for_s: float) -> LoaderFacts | None:
    workers = getattr(loader, "num_workers", None)
    ahead = (workers or 0) * (getattr(loader, "prefetch_factor", None) or 1)
    started = time.perf_counter()
    first = next(batches, None)
    if first is None:
        return None
    first_at = last_at = time.perf_counter()
    sizes = [count(first, split)]
    # Prefetched batches do not count: timing restarts after them.
    counted_from, counted_at = 0, first_at
    while last_at - first_at < for_s and len(sizes) <= ahead + _BATCHES:
        batch = next(batches, None)
        if batch is None:
            break
        sizes.append(count(batch, split))
        last_at = time.perf_counter()
        if len(sizes) == ahead + 1:
            counted_from, counted_at = len(sizes) - 1, last_at
    later = sum(sizes[counted_from + 1 :])
    speed = later / max(last_at - counted_at, 1e-9) if later else None
    return LoaderFacts(len(sizes), sum(sizes), first_at - started, speed, workers)
