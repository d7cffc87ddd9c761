"""How fast a loader gives batches: a loader in, a few batches drawn and thrown away, its speed out.

Random state, the loader's own generators and its standing workers are as before afterwards. What cannot be begun anew,
such as a generator, is not touched; nor can be put back what a dataset keeps for itself.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from autoaccum._data.batches import count
from autoaccum._data.peeking import left_as_it_was
from autoaccum._report.records import LoaderFacts

if TYPE_CHECKING:
    from collections.abc import Iterable

# Long enough for some batches of a loader that can feed a training, short beside the trials.
_LISTENED_S = 2.0
# What loads ahead gives its first batches at once: they say nothing of its speed. So many more are waited for, if the
# time suffices.
_BATCHES = 8


def listen_to(loader: Iterable[Any], for_s: float = _LISTENED_S) -> LoaderFacts | None:
    """Time a loader's first batches.

    Args:
        loader: Gone through anew, and given up on the way.
        for_s: Seconds after the first batch after which no other is asked for.

    Returns:
        What was found; None where the loader can be gone through only once, or has no batch.
    """
    if isinstance(loader, Iterator):
        return None
    with left_as_it_was(loader):
        return _timed(iter(loader), loader, for_s)


def first_batches(loader: Iterable[Any], most: int, for_s: float = _LISTENED_S) -> list[Any]:
    """Return some of a loader's first batches, to look at.

    Args:
        loader: Gone through anew, and given up on the way.
        most: How many.
        for_s: Seconds after the first one after which no other is asked for.

    Returns:
        The batches; none where the loader can be gone through only once.
    """
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


def first_of(loader: Iterable[Any]) -> Any | None:
    """Return a loader's first batch, as if nobody had asked; None where it can be gone through only once, or has none.

    Args:
        loader: Gone through anew, and given up after one batch.
    """
    if isinstance(loader, Iterator):
        return None
    with left_as_it_was(loader):
        return next(iter(loader), None)


def samples_of(loader: Any, batch: Any) -> int | None:
    """Return the samples that an epoch has, where the loader says so.

    Args:
        loader: Any loader.
        batch: One of its batches, taken for as large as the others where the loader does not say more.
    """
    try:
        if isinstance(loader, torch.utils.data.DataLoader) and loader.batch_size is not None and not loader.drop_last:
            return len(loader.sampler)  # type: ignore[arg-type]
        return len(loader) * count(batch)
    except (TypeError, NotImplementedError):  # no length; the second is what a dataset raises that leaves it open
        return None


def _timed(batches: Iterator[Any], loader: Any, for_s: float) -> LoaderFacts | None:
    workers = getattr(loader, "num_workers", None)
    ahead = (workers or 0) * (getattr(loader, "prefetch_factor", None) or 1)
    started = time.perf_counter()
    first = next(batches, None)
    if first is None:
        return None
    first_at = last_at = time.perf_counter()
    sizes = [count(first)]
    # What was loaded ahead does not count: the clock begins anew behind it.
    counted_from, counted_at = 0, first_at
    while last_at - first_at < for_s and len(sizes) <= ahead + _BATCHES:
        batch = next(batches, None)
        if batch is None:
            break
        sizes.append(count(batch))
        last_at = time.perf_counter()
        if len(sizes) == ahead + 1:
            counted_from, counted_at = len(sizes) - 1, last_at
    later = sum(sizes[counted_from + 1 :])
    speed = later / max(last_at - counted_at, 1e-9) if later else None
    return LoaderFacts(len(sizes), sum(sizes), first_at - started, speed, workers)
