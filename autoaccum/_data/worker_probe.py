"""Finds out whether a DataLoader's dataset draws random numbers or counts in worker processes.

Nobody can read or set what a worker has drawn, so where workers begin anew it matters whether they draw at all. One
sample is loaded in a worker of its own, which then compares.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from autoaccum._data.loader_memory import LoaderMemory
from autoaccum._data.random_state import RandomState

if TYPE_CHECKING:
    from collections.abc import Iterator


def may_move_in_workers(loader: DataLoader[Any]) -> bool:
    """Whether a dataset or its collator may leave a worker other than they found it; True if that cannot be told.

    An iterable dataset may, since it may do so at its end.
    """
    if isinstance(loader.dataset, IterableDataset):
        return True
    try:
        probe = DataLoader(
            _Probe(loader),
            batch_size=None,
            num_workers=1,
            timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn,
            multiprocessing_context=loader.multiprocessing_context,
            generator=torch.Generator(),  # and not the global one
        )
        return any(probe)
    except Exception:  # noqa: BLE001 - the dataset's own: it may have no sample 0, or miss what only its loader sets
        return True


class _Probe(Dataset[bool]):
    """Has one item: whether loading a sample moves anything.

    Args:
        loader: The loader whose dataset is used, as it would use it.
    """

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._parts = {"dataset": loader.dataset, "collate_fn": loader.collate_fn}
        self._collates = loader.batch_sampler is not None

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> bool:
        dataset: Any = self._parts["dataset"]
        collate: Any = self._parts["collate_fn"]
        random, memory = RandomState(torch.device("cpu")), LoaderMemory(self._parts)
        before = random.take(), memory.take()
        if not self._collates:
            collate(dataset[index])
        elif hasattr(dataset, "__getitems__"):
            collate(dataset.__getitems__([index]))
        else:
            collate([dataset[index]])
        return list(_plain(before)) != list(_plain((random.take(), memory.take())))


def _plain(node: Any) -> Iterator[Any]:
    """Yield what nested states hold, as values that can be compared."""
    if isinstance(node, dict):
        yield from _plain(list(node.items()))
    elif isinstance(node, list | tuple):
        for part in node:
            yield from _plain(part)
    elif isinstance(node, Tensor | np.ndarray):
        yield node.tolist()
    else:
        yield node
