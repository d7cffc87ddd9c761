"""Gives each rank its part of a DataLoader over a map-style dataset, which every rank has.

Every rank follows the same order, drawn by rank 0 as a single process would draw it. Training cuts it into the same
windows on every rank, and each loads its part of every window. A position in an epoch is a number of windows, so a run
can resume with another number of ranks. Evaluation deals out whole batches.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from autoaccum._data.loaders import generators_of
from autoaccum.errors import CheckpointError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

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

    With fewer samples than ranks, the first ranks get one each, so that rank 0, whose position in an epoch represents
    all, always has one.
    """
    if samples < ranks:
        return [min(rank, samples) for rank in range(ranks + 1)]
    return [samples * rank // ranks for rank in range(ranks + 1)]


def shares_by_cost(costs: Sequence[int], ranks: int) -> list[int]:
    """Return the same bounds where samples cost unlike much: as near to equal as whole samples allow.

    Args:
        costs: What each sample costs, such as its tokens.
        ranks: Number of ranks, of which each gets a sample if there are enough.
    """
    samples = len(costs)
    if samples < ranks or not any(costs):
        return equal_shares(samples, ranks)
    before = [0, *itertools.accumulate(costs)]
    bounds, at = [0], 0
    for rank in range(1, ranks):
        wanted = before[-1] * rank / ranks
        while at < samples and abs(before[at + 1] - wanted) <= abs(before[at] - wanted):
            at += 1
        at = max(bounds[-1] + 1, min(at, samples - (ranks - rank)))
        bounds.append(at)
    return [*bounds, samples]


class ShardedLoader:
    """Loads this rank's part of every window, in batches that never span two windows.

    It keeps its own state, as torchdata's StatefulDataLoader does; the state is the same on every rank.

    Args:
        loader: A loader over all of the data, on every rank.
        ranks: All ranks.
        target_batch: Samples per window, over all ranks.
        drop_last: As for `fit`.

    Attributes:
        generator: The generator of `loader`. Its state, and those of the samplers' generators, belong to a position.
        sampler: The sampler of `loader`, which is notified of epochs.
        batch_sampler: The batch sampler of `loader`, which is notified of epochs.
    """

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, target_batch: int, *, drop_last: bool) -> None:
        self._loader = loader
        self._ranks = ranks
        self._target_batch = target_batch
        self._drop_last = drop_last
        self.generator, self.sampler, self.batch_sampler = loader.generator, loader.sampler, loader.batch_sampler
        self._batch_size = loader.batch_size or max(1, target_batch // ranks.size)
        self._generators = generators_of(loader)
        self._part = _part_of(loader, self._asked_for)
        # The random states that the order of the epoch was drawn from, and the window where the next iterator begins.
        self._source: Any = None
        self._begins_at = self._done = 0
        self._samples: int | None = None  # of that epoch
        self._order: list[Any] = []
        self._ends: deque[bool] = deque()

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or continue the one of the state that was loaded."""
        before, is_new = _global_states(), self._source is None
        if is_new:
            self._source = _source_of_rank_0("order", self._generators, self._ranks)
        batches, after = _drawn(self._loader, self._generators, self._source)
        _check_order(self._ranks, "loader", batches)
        self._order = [index for batch in batches for index in batch]
        self._samples = len(self._order)
        self._done = self._begins_at
        self._ends.clear()
        if not is_new:
            after = before  # those of the moment from which the run resumes
        for batch in _begun(self._part, self._generators, after if self._ranks.rank == 0 or not is_new else None):
            self._done += self._ends.popleft()
            yield batch
        self._source, self._samples, self._begins_at, self._done = None, None, 0, 0

    def share_of(self, window: int) -> int:
        """Return how many samples of one of this epoch's windows belong to this rank."""
        bounds = self._bounds(window)
        return bounds[self._ranks.rank + 1] - bounds[self._ranks.rank]

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the epoch."""
        return {"source": self._source, "windows": self._done, "samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume at a saved state, from any number of ranks; the next iterator begins there.

        Raises:
            CheckpointError: The state is from the middle of an epoch with another number of samples.
        """
        there = state["samples"]
        here = None if state["source"] is None else sum(_sizes(self._loader, state["source"]))
        if here is not None and there != here:
            raise CheckpointError(
                f"the checkpoint was made in the middle of an epoch of {there} samples, and this loader's have {here}; "
                "pass the same loader over the same data"
            )
        self._samples = there
        self._source, self._begins_at, self._done = state["source"], state["windows"], state["windows"]

    def _asked_for(self) -> Iterator[list[Any]]:
        """Yield the indices of this rank's batches. With workers, this runs ahead of what is yielded."""
        samples, target = len(self._order), self._target_batch
        windows = samples // target if self._drop_last else math.ceil(samples / target)
        for window in range(self._begins_at, windows):
            bounds = self._bounds(window)
            start, stop = bounds[self._ranks.rank], bounds[self._ranks.rank + 1]
            for at in range(start, stop, self._batch_size):
                end = min(stop, at + self._batch_size)
                self._ends.append(end == stop)
                yield self._order[window * target + at : window * target + end]

    def _bounds(self, window: int) -> list[int]:
        samples = min(self._target_batch, len(self._order) - window * self._target_batch)
        return equal_shares(max(0, samples), self._ranks.size)


class WholeLoader:
    """Gives every rank all of the data, in the order that rank 0 draws.

    Args:
        loader: A loader over all of the data, on every rank, that can be sharded.
        ranks: All ranks.

    Attributes:
        generator: The generator of `loader`. Its state, and those of the samplers' generators, belong to a position.
        sampler: The sampler of `loader`, which is notified of epochs.
        batch_sampler: The batch sampler of `loader`, which is notified of epochs.
        batch_size: That of `loader`.
    """

    def __init__(self, loader: DataLoader[Any], ranks: Ranks) -> None:
        self.generator, self.sampler, self.batch_sampler = loader.generator, loader.sampler, loader.batch_sampler
        self.batch_size = loader.batch_size
        self._loader = loader
        self._ranks = ranks
        self._generators = generators_of(loader)
        self._order: list[list[Any]] = []
        self._all = _part_of(loader, lambda: iter(self._order))

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch."""
        source = _source_of_rank_0("order", self._generators, self._ranks)
        self._order, after = _drawn(self._loader, self._generators, source)
        _check_order(self._ranks, "loader", self._order)
        return _begun(self._all, self._generators, after if self._ranks.rank == 0 else None)


class DealtLoader:
    """Deals out the batches of validation data that every rank has: of n ranks, each gets every n-th batch.

    Batches stay whole, so that a loss or a metric sees the same batches as in a single process. Nothing is kept from
    one evaluation to the next except the state of the loader's own generators.

    Args:
        loader: A loader over all of the data, on every rank, that can be sharded.
        ranks: All ranks, which this constructor communicates with.

    Raises:
        InvalidInputError: The ranks' loaders differ in length. Raised on every rank.
    """

    def __init__(self, loader: DataLoader[Any], ranks: Ranks) -> None:
        self._loader = loader
        self._ranks = ranks
        self._generators = generators_of(loader)
        self._own: list[list[Any]] = []
        self._part = _part_of(loader, lambda: iter(self._own))
        _refuse_others("val_loader", ranks.exchange("val_loader", f"{len(loader)} batches"))

    def __iter__(self) -> Iterator[Any]:
        """Start a new evaluation, in an order that rank 0 draws. The caller restores the global random generators."""
        source = _source_of_rank_0("val order", self._generators, self._ranks)
        order, _ = _drawn(self._loader, self._generators, source)
        _check_order(self._ranks, "val_loader", order)
        self._own = order[self._ranks.rank :: self._ranks.size]
        return iter(self._part)


# --- checks that ranks have the same data -----------------------------------------------------------------------------


def _check_order(ranks: Ranks, name: str, batches: Sequence[Sequence[Any]]) -> None:
    """Reject orders that differ although drawn from the same random states: the sampler has another source.

    Raises:
        InvalidInputError: The orders differ. Raised on every rank.
    """
    order = [index for batch in batches for index in batch]
    # Indices other than integers and strings may have no comparable representation.
    is_told = {int, str}.issuperset(set(map(type, order)))
    digest = hashlib.blake2b(repr(order).encode(), digest_size=8).hexdigest() if is_told else "unknown"
    said = ranks.exchange(f"{name} order", (len(order), digest))
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


def _sizes(loader: DataLoader[Any], source: Any) -> list[int]:
    """Return the number of samples in each batch of an epoch."""
    generators = generators_of(loader)
    before = [generator.get_state() for generator in generators]
    try:
        if len(source[-1]) != len(generators):
            raise CheckpointError(
                f"the checkpoint was made with a loader that has {len(source[-1])} random generators of its own, and "
                f"this one has {len(generators)}; pass the same loader"
            )
        return [len(batch) for batch in _drawn(loader, generators, source)[0]]
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)


# --- the order of an epoch --------------------------------------------------------------------------------------------


def _source_of_rank_0(topic: str, generators: Sequence[torch.Generator], ranks: Ranks) -> Any:
    """Return the states that rank 0 draws its order from: torch's, Python's and NumPy's, and the loader's own."""
    own = (*_global_states(), [one.get_state() for one in generators]) if ranks.rank == 0 else None
    return ranks.exchange_tensors(topic, own)[0]


def _drawn(
    loader: DataLoader[Any], generators: Sequence[torch.Generator], source: Any
) -> tuple[list[list[Any]], tuple[Any, ...]]:
    """Return an epoch's batches of indices as one process draws them, and the resulting global random states.

    The global states are restored; the loader's own generators are left as the loader leaves them.
    """
    before = _global_states()
    try:
        _set(source, generators)
        # A DataLoader also draws a seed for its workers before it asks its sampler.
        torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        assert loader.batch_sampler is not None
        return [list(batch) for batch in loader.batch_sampler], _global_states()
    finally:
        _set_global_states(before)


def _set(source: Any, generators: Sequence[torch.Generator]) -> None:
    *states, own = source
    _set_global_states(states)
    for generator, state in zip(generators, own, strict=True):
        generator.set_state(state)


def _global_states() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)  # noqa: NPY002


def _set_global_states(states: Sequence[Any]) -> None:
    on_host, of_python, of_numpy = states
    torch.set_rng_state(on_host)
    random.setstate(of_python)
    np.random.set_state(of_numpy)  # noqa: NPY002 - the sampler's choice


def _begun(
    loader: DataLoader[Any], generators: Sequence[torch.Generator], states: Sequence[Any] | None
) -> Iterator[Any]:
    """Begin an epoch of a loader, which draws a seed for its workers; leave generators as they were.

    Args:
        loader: The loader.
        generators: The generators of the loader and its samplers.
        states: What to leave the global generators in; None for what the loader leaves. On rank 0 those that one
            process leaves, so that later orders are its own, too.
    """
    own = [generator.get_state() for generator in generators]
    batches = iter(loader)
    for generator, state in zip(generators, own, strict=True):
        generator.set_state(state)
    if states is not None:
        _set_global_states(states)
    return batches


def _part_of(loader: DataLoader[Any], asked_for: Callable[[], Iterator[list[Any]]]) -> DataLoader[Any]:
    """Return a loader over the same data, with the same arguments, but other batches."""
    arguments = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return DataLoader(loader.dataset, batch_sampler=_Batches(asked_for), **arguments)


class _Batches:
    """A batch sampler that asks for its batches in every epoch."""

    def __init__(self, asked_for: Callable[[], Iterator[list[Any]]]) -> None:
        self._asked_for = asked_for

    def __iter__(self) -> Iterator[list[Any]]:
        return self._asked_for()
