"""What a loader is: whether it can be read, whether twice, in which order, and what brings it back."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sized
from contextlib import contextmanager
from types import GeneratorType
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    default_collate,
)

from autoaccum._arguments import check_iterable
from autoaccum._data.loader_memory import generators_of
from autoaccum._data.random_state import RandomState
from autoaccum._data.splits import ListOfSamples, is_default
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from autoaccum._data.pieces import Piece, Split


def check_loader(name: str, loader: object, split: Split | None) -> None:
    """Check that a loader can be iterated over, and leaves it to the split to collate."""
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


def can_be_read_once(loader: Any) -> bool:
    """Whether a loader certainly yields its batches only once; a user's class may restart in `__iter__`."""
    own = isinstance(loader, Iterator) and type(loader).__module__ in ("builtins", itertools.__name__)
    return own or isinstance(loader, GeneratorType)


def can_be_looked_at(loader: Any) -> bool:
    """Whether iteration over a loader can be started, abandoned and started again.

    False for a loader that is its own iterator, and for one that keeps its position (torchdata's StatefulDataLoader),
    which continues where it stopped.
    """
    return not isinstance(loader, Iterator) and not hasattr(loader, "load_state_dict")


@contextmanager
def left_as_it_was(loader: Any) -> Iterator[None]:
    """Restore random state, the generators of the loader and its parts, and persistent workers.

    What these keep otherwise, or in files, is not restored.
    """
    random = RandomState(torch.device("cpu"), further=generators_of(loader))
    states = random.capture()
    standing = getattr(loader, "_iterator", None)
    if standing is not None:
        loader._iterator = None
    try:
        yield
    finally:
        if hasattr(loader, "_iterator"):
            loader._iterator = standing  # workers started here end with their iterator
        random.restore(states)


def samplers_of(loader: Any) -> tuple[Any, ...]:
    """Return the sampler, the batch sampler and its own sampler of a DataLoader, None for those it has not."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    return getattr(loader, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)


def has_state(loader: Any) -> bool:
    """Whether a loader has a state; one that Accelerate has prepared may have the methods and none."""
    is_callable = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
    return is_callable and getattr(loader, "use_stateful_dataloader", True) is not False


def is_kept_by_its_state(loader: Any) -> bool:
    """Whether the `state_dict` of a loader brings it back exactly; else its epoch is to be read again.

    Of torchdata's StatefulDataLoader, it does for iterable data with a state, and for data with indices, if no
    generator was passed and samplers have a state too: it asks the others for another iterator, which may draw again.
    It counts batches twice when it returns to a place in iterable data without a state, and reads them again as well.
    """
    if is_kept_between_epochs(loader):
        return True
    held = (loader.dataset, loader.collate_fn, loader.generator)
    if isinstance(loader.dataset, IterableDataset) or generators_of(held):
        return False
    sampler = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
    if _is_torchdatas(sampler) and isinstance(sampler, BatchSampler):
        sampler = sampler.sampler
    return (
        callable(getattr(sampler, "state_dict", None))
        or _is_torchdatas(sampler)
        or isinstance(sampler, SequentialSampler | DistributedSampler)
    )


def is_kept_between_epochs(loader: Any) -> bool:
    """Whether the `state_dict` that a loader has at the end of an epoch is needed to begin the next one.

    That of a StatefulDataLoader is needed for iterable data alone: samplers might begin where they have ended.
    """
    if not any(kind.__module__.startswith("torchdata.stateful_dataloader") for kind in type(loader).__mro__):
        return True
    return isinstance(loader.dataset, IterableDataset) and hasattr(loader.dataset, "state_dict")


def _is_torchdatas(sampler: Any) -> bool:
    return type(sampler).__module__.startswith("torchdata.")
