"""Gives each rank its part of a DataLoader over a map-style dataset, which every rank has.

Rank 0 draws the order of an epoch as a single process would, and sends it to all. Each rank then loads its part alone:
of every window in training, whole batches in turn in evaluation and where a target counts tokens.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from autoaccum._distributed.process_group import Ranks

# Arguments of the user's loader that the rank's loader shares.
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers"),
)
# What samplers that give each rank its own samples call the number of ranks.
_COUNTS_OF_RANKS = ("num_replicas", "world_size", "_world_size", "num_processes")

# Where two random draws are expected to have so many samples in common, they have one.
_MANY = 16


def equal_shares(samples: int, ranks: int) -> list[int]:
    """Return where each rank's share of some samples begins, and where the last one ends: `ranks + 1` integers.

    With fewer samples than ranks, the first ranks get one each.
    """
    if samples < ranks:
        return [min(rank, samples) for rank in range(ranks + 1)]
    return [samples * rank // ranks for rank in range(ranks + 1)]


class DealtLoader:
    """Deals out a loader: of n ranks, each gets its part of every window, or every n-th batch.

    Args:
        name: What the user calls the loader.
        loader: The loader, of all samples.
        ranks: All ranks.
        target_batch: Number of samples of a window, of which each rank loads its part in batches that never span two
            windows; None for every n-th batch.
        drop_last: Whether a window of fewer samples is left out.

    Attributes:
        whole_loader: `loader`. What it and its parts keep belongs to a position.
        generator: The generator of `loader`.
        sampler: The sampler of `loader`, which is notified of epochs.
        batch_sampler: The batch sampler of `loader`, which is notified of epochs.
        share: The samples of this rank in the window that the last batch belongs to; without windows, in that batch.

    Raises:
        InvalidInputError: The loader gives no indices, ranks have divided it already, or the ranks' loaders differ in
            length, which is raised on every rank.
    """

    def __init__(
        self,
        name: str,
        loader: DataLoader[Any],
        ranks: Ranks,
        target_batch: int | None = None,
        *,
        drop_last: bool = False,
    ) -> None:
        _check_can_be_sharded(name, loader)
        self.generator, self.sampler, self.batch_sampler = loader.generator, loader.sampler, loader.batch_sampler
        self.whole_loader, self.share = loader, 0
        self._name, self._ranks = name, ranks
        self._target_batch, self._drop_last = target_batch, drop_last
        self._own: list[list[Any]] = []  # the indices of this rank's batches, in this epoch
        arguments = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        self._part: DataLoader[Any] = DataLoader(loader.dataset, batch_sampler=self._own, **arguments)
        samples = f" of {len(loader.dataset)} samples" if hasattr(loader.dataset, "__len__") else ""
        said = ranks.exchange("loader", f"{len(loader)} batches{samples}")
        for rank, one in enumerate(said):
            if one != said[0]:
                raise InvalidInputError(
                    f"the {name} of rank {rank} has {one}, and that of rank 0 {said[0]}; with shard_data=True every "
                    "rank's loader must give all of the data, and each rank takes its part"
                )

    def __len__(self) -> int:
        """Return the number of batches, over all ranks."""
        return len(self.whole_loader)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, on all ranks together."""
        assert self.batch_sampler is not None
        generator = self.generator or torch.default_generator
        # A DataLoader also draws a seed for its workers before it asks its sampler.
        torch.empty((), dtype=torch.int64).random_(generator=generator)
        mine = [list(batch) for batch in self.batch_sampler]
        order = self._ranks.from_rank_0("order", mine)
        self._check_is_whole(chain.from_iterable(mine), chain.from_iterable(order))
        dealt = self._dealt(order)
        self._own[:] = [indices for indices, _ in dealt]
        state = generator.get_state()
        batches = iter(self._part)  # which draws a seed once more
        generator.set_state(state)
        return self._noting_shares(batches, [share for _, share in dealt])

    def _noting_shares(self, batches: Iterator[Any], shares: list[int]) -> Iterator[Any]:
        for batch, self.share in zip(batches, shares, strict=True):
            yield batch

    def _check_is_whole(self, mine: Iterable[Any], order: Iterable[Any]) -> None:
        """Refuse a sampler that gives each rank samples of its own, by what it gives this rank and rank 0."""
        if self._ranks.rank == 0:
            return
        own, data = set(map(_spelled, mine)), self.whole_loader.dataset
        expected = len(own) ** 2 / (len(data) if hasattr(data, "__len__") else len(own) or 1)
        if expected >= _MANY and own.isdisjoint(map(_spelled, order)):
            raise InvalidInputError(
                f"shard_data=True splits the samples of every rank's {self._name}, but the sampler gives rank "
                f"{self._ranks.rank} no sample that rank 0 has, so it already does; use only one of them"
            )

    def _dealt(self, order: list[list[Any]]) -> list[tuple[list[Any], int]]:
        """Return this rank's batches of an epoch's batches of indices, each with its share."""
        rank, size, target = self._ranks.rank, self._ranks.size, self._target_batch
        if target is None:
            return [(batch, len(batch)) for batch in order[rank::size]]
        indices, most = list(chain.from_iterable(order)), self.whole_loader.batch_size or max(1, target // size)
        dealt = []
        for start in range(0, len(indices), target):
            window = indices[start : start + target]
            if len(window) == target or not self._drop_last:
                first, end = equal_shares(len(window), size)[rank : rank + 2]
                dealt += [(window[at : min(at + most, end)], end - first) for at in range(first, end, most)]
        return dealt


def _spelled(index: Any) -> str:
    return repr(index.tolist() if hasattr(index, "tolist") else index)


def _check_can_be_sharded(name: str, loader: Any) -> None:
    is_map_style = (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and hasattr(loader.batch_sampler, "__len__")
    )
    if not is_map_style:
        raise InvalidInputError(
            f"shard_data=True takes a torch DataLoader over a dataset with indices, and {name} is a "
            f"{type(loader).__name__} that gives no indices; let each rank's loader yield its own samples, and leave "
            "shard_data out"
        )
    for sampler in (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None)):
        if any(getattr(sampler, counts, 1) not in (1, None) for counts in _COUNTS_OF_RANKS):
            raise InvalidInputError(
                f"shard_data=True splits the samples of every rank's {name}, but this one's {type(sampler).__name__} "
                "already does; use only one of them"
            )
