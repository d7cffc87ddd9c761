"""Gives each rank its part of a DataLoader over a map-style dataset, which every rank has.

Every rank follows the same order, drawn by rank 0 as a single process would draw it, and loads its part alone: of every
window in training, whole batches in turn in evaluation and where a target counts tokens.
"""

from __future__ import annotations

import hashlib
import random
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from autoaccum._data.loaders import generators_of
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from autoaccum._distributed.process_group import Ranks

# Arguments of the user's loader that the rank's loader shares.
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers"),
)


def check_can_be_sharded(name: str, loader: Any) -> None:
    """Reject a loader whose samples cannot be selected without loading them, or that ranks have divided already.

    Args:
        name: Name of the argument.
        loader: The loader.

    Raises:
        InvalidInputError: It is such a loader.
    """
    is_map_style = (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and hasattr(loader.batch_sampler, "__len__")
    )
    if not is_map_style:
        raise InvalidInputError(
            f"shard=True takes a torch DataLoader over a dataset with indices, and {name} is a "
            f"{type(loader).__name__} that gives no indices; let each rank's loader yield its own samples, and leave "
            "shard out"
        )
    batch_sampler = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if getattr(sampler, "num_replicas", 1) > 1:
            raise InvalidInputError(
                f"shard=True splits the samples of every rank's {name}, but this one's {type(sampler).__name__} "
                "already does; use only one of them"
            )


def equal_shares(samples: int, ranks: int) -> list[int]:
    """Return where each rank's share of some samples begins, and where the last one ends: `ranks + 1` integers.

    With fewer samples than ranks, the first ranks get one each.
    """
    if samples < ranks:
        return [min(rank, samples) for rank in range(ranks + 1)]
    return [samples * rank // ranks for rank in range(ranks + 1)]


class DealtLoader:
    """Deals out the batches of a loader: of n ranks, each gets every n-th batch.

    Args:
        name: The argument that the loader was, for messages.
        loader: A loader over all of the data, on every rank, that can be sharded.
        ranks: All ranks, which this constructor communicates with.

    Attributes:
        generator: The generator of `loader`. Its state, and those of the samplers' generators, belong to a position.
        sampler: The sampler of `loader`, which is notified of epochs.
        batch_sampler: The batch sampler of `loader`, which is notified of epochs.

    Raises:
        InvalidInputError: The loader cannot be sharded, or the ranks' loaders differ in length, which is raised on
            every rank.
    """

    def __init__(self, name: str, loader: DataLoader[Any], ranks: Ranks) -> None:
        check_can_be_sharded(name, loader)
        self.generator, self.sampler, self.batch_sampler = loader.generator, loader.sampler, loader.batch_sampler
        self._name = name
        self._loader = loader
        self._ranks = ranks
        self._generators = generators_of(loader)
        self._own: list[list[Any]] = []  # the indices of this rank's batches, in this epoch
        arguments = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        self._part: DataLoader[Any] = DataLoader(loader.dataset, batch_sampler=self._own, **arguments)
        _refuse_others(name, ranks.exchange("loader", f"{len(loader)} batches"))

    def __len__(self) -> int:
        """Return the number of batches, over all ranks."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch in an order that rank 0 draws; raises InvalidInputError on every rank if orders differ."""
        own = (*_global_states(), [one.get_state() for one in self._generators]) if self._ranks.rank == 0 else None
        order, after = self._drawn(self._ranks.exchange_tensors("order", own)[0])
        _check_order(self._ranks, self._name, order)
        self._own[:] = self._dealt(order)
        left = [generator.get_state() for generator in self._generators]
        batches = iter(self._part)  # which draws a seed for its workers
        for generator, state in zip(self._generators, left, strict=True):
            generator.set_state(state)
        if self._ranks.rank == 0:  # as one process leaves them, so that later orders are its own, too
            _set_global_states(after)
        return batches

    def _dealt(self, order: list[list[Any]]) -> list[list[Any]]:
        """Return this rank's batches of an epoch's batches of indices."""
        return order[self._ranks.rank :: self._ranks.size]

    def _drawn(self, source: Any) -> tuple[list[list[Any]], tuple[Any, ...]]:
        """Return an epoch's batches of indices as one process draws them, and the resulting global random states.

        The global states are restored; the loader's own generators are left as the loader leaves them.
        """
        before = _global_states()
        *states, own = source
        try:
            _set_global_states(states)
            for generator, state in zip(self._generators, own, strict=True):
                generator.set_state(state)
            # A DataLoader also draws a seed for its workers before it asks its sampler.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            assert self.batch_sampler is not None
            return [list(batch) for batch in self.batch_sampler], _global_states()
        finally:
            _set_global_states(before)


class ShardedLoader(DealtLoader):
    """Loads this rank's part of every window, in batches that never span two windows.

    Args:
        loader: As for `DealtLoader`.
        ranks: As for `DealtLoader`.
        target_batch: Samples per window, over all ranks.
        drop_last: As for `fit`.
    """

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, target_batch: int, *, drop_last: bool) -> None:
        super().__init__("loader", loader, ranks)
        self._target_batch = target_batch
        self._drop_last = drop_last
        self._most = loader.batch_size or max(1, target_batch // ranks.size)
        self._windows: list[list[list[Any]]] = []
        self._drawn_batches = 0

    def __iter__(self) -> Iterator[Any]:
        """As for `DealtLoader`."""
        batches = super().__iter__()
        self._drawn_batches = 0
        return self._counted(batches)

    def shares_left(self) -> list[int]:
        """Return how many samples this rank has of each of this epoch's windows that nothing was drawn of yet."""
        drawn, left = self._drawn_batches, []
        for window in self._windows:
            if drawn <= 0:
                left.append(sum(map(len, window)))
            drawn -= len(window)
        return left

    def _counted(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._drawn_batches += 1
            yield batch

    def _dealt(self, order: list[list[Any]]) -> list[list[Any]]:
        indices, target, most = list(chain.from_iterable(order)), self._target_batch, self._most
        self._windows = []
        for start in range(0, len(indices), target):
            window = indices[start : start + target]
            if len(window) == target or not self._drop_last:
                bounds = equal_shares(len(window), self._ranks.size)
                own = window[bounds[self._ranks.rank] : bounds[self._ranks.rank + 1]]
                self._windows.append([own[at : at + most] for at in range(0, len(own), most)])
        return list(chain.from_iterable(self._windows))


def _check_order(ranks: Ranks, name: str, batches: Sequence[Sequence[Any]]) -> None:
    """Reject orders that differ although drawn from the same random states: the sampler has another source.

    Raises:
        InvalidInputError: The orders differ. Raised on every rank.
    """
    order = list(chain.from_iterable(batches))
    # Indices other than integers and strings may have no comparable representation.
    is_told = {int, str}.issuperset(set(map(type, order)))
    digest = hashlib.blake2b(repr(order).encode(), digest_size=8).hexdigest() if is_told else "unknown"
    said = ranks.exchange("epoch order", (len(order), digest))
    _refuse_others(name, [f"{samples} samples in an epoch" for samples, _ in said])
    for rank, (_, theirs) in enumerate(said):
        if theirs != said[0][1]:
            raise InvalidInputError(
                f"the {name} of rank {rank} yields its samples in a different order than that of rank 0, so that "
                "some would be used twice and others never; with shard=True a sampler has to draw from torch's, "
                "Python's or NumPy's generator, or from its attribute generator=, and over the same data on all ranks"
            )


def _refuse_others(name: str, said: Sequence[str]) -> None:
    for rank, one in enumerate(said):
        if one != said[0]:
            raise InvalidInputError(
                f"the {name} of rank {rank} has {one}, and that of rank 0 {said[0]}; with shard=True every rank's "
                "loader must give all of the data, and each rank takes its part"
            )


def _global_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002


def _set_global_states(states: Sequence[Any]) -> None:
    on_host, of_python, of_numpy = states
    torch.set_rng_state(on_host)
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002 - the sampler's choice
