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
    from collections.abc import Callable, Iterable

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
    workers = getattr(loader, "num_workers", None)
    ahead = (workers or 0) * (getattr(loader, "prefetch_factor", None) or 1)
    drawn = _drawn(loader, ahead + _BATCHES + 1, for_s, lambda batch: count(batch, split))
    if not drawn:
        return None
    # Prefetched batches do not count: timing restarts after them.
    timed = drawn[ahead:] if len(drawn) > ahead else drawn
    later = sum(samples for samples, _ in timed[1:])
    speed = later / max(timed[-1][1] - timed[0][1], 1e-9) if later else None
    return LoaderFacts(len(drawn), sum(samples for samples, _ in drawn), drawn[0][1], speed, workers)


def first_batches(loader: Iterable[Any], most: int) -> list[Any]:
    """Return at most `most` of a loader's first batches, drawn as in `listen_to`; none if it is an iterator."""
    return [batch for batch, _ in _drawn(loader, most, _LISTENED_S, lambda batch: batch)]


def _drawn(loader: Iterable[Any], most: int, for_s: float, of: Callable[[Any], Any]) -> list[tuple[Any, float]]:
    """Return what a function returns for each batch drawn, and the seconds at which that came."""
    found: list[tuple[Any, float]] = []
    if isinstance(loader, Iterator):
        return found
    with left_as_it_was(loader):
        started = time.perf_counter()
        for batch in loader:
            found.append((of(batch), time.perf_counter() - started))
            if len(found) == most or found[-1][1] - found[0][1] > for_s:
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
