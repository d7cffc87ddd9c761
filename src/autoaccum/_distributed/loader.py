"""Loaders of which every rank has the whole, turned into ones that give this rank's part.

Every rank goes through the same order, which rank 0 draws as one process does. Training cuts it into the same windows,
and of each loads its own part; where an epoch stands is the number of its windows, so a run can go on with another
number of ranks, or with one process, which counts the loader's own batches. Evaluation deals out whole batches. Of a
DataLoader over a dataset with indices, what other ranks take is never loaded here; for training nothing else is for
this module.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import random
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from autoaccum._data.batches import count
from autoaccum._data.loader_state import generators_of
from autoaccum._distributed.load_balance import cut
from autoaccum.errors import CheckpointError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from autoaccum._data.loader_state import Position
    from autoaccum._distributed.process_group import Ranks

# What of the loader's own arguments the part has too.
_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context", "generator"),
    *("prefetch_factor", "persistent_workers"),
)


def can_be_sharded(loader: Any) -> bool:
    """Whether a loader's samples can be told apart without loading them."""
    return (
        type(loader) is DataLoader
        and not isinstance(loader.dataset, IterableDataset)
        and loader.batch_sampler is not None
        and hasattr(loader.batch_sampler, "__len__")
    )


class ShardedLoader:
    """Loads this rank's part of every window, in batches that never reach across two windows.

    It keeps its own state, as torchdata's StatefulDataLoader does, and that is the same on every rank.

    Args:
        loader: The whole, on every rank.
        ranks: All ranks.
        target_batch: Samples a window, on all ranks together.
        drops_last: Whether a shorter last window is left out.

    Attributes:
        reached: Windows of this epoch of which the loader's workers may have been asked for a part already.
        generator: The whole's, as are the next two: whose states belong to a position, and who is told of epochs.
        sampler: The whole's.
        batch_sampler: The whole's.
    """

    def __init__(self, loader: DataLoader[Any], ranks: Ranks, target_batch: int, *, drops_last: bool) -> None:
        self.reached = 0
        self._loader = loader
        self._ranks = ranks
        self._target_batch = target_batch
        self._drops_last = drops_last
        self.generator, self.sampler, self.batch_sampler = loader.generator, loader.sampler, loader.batch_sampler
        self._batch_size = loader.batch_size or max(1, target_batch // ranks.size)
        self._generators = generators_of(loader)
        self._part = _part_of(loader, self._asked_for)
        # What the order of the epoch was drawn from, and where in it the next iterator begins.
        self._source: Any = None
        self._begins_at = self._done = 0
        self._samples: int | None = None  # of that epoch
        self._order: list[Any] = []
        self._ends: deque[bool] = deque()
        self._weights: list[tuple[int, tuple[float, ...]]] = [(0, (1.0,) * ranks.size)]

    def __iter__(self) -> Iterator[Any]:
        """Begin an epoch, or go on with that of the state that was loaded."""
        before, is_new = _global_states(), self._source is None
        if is_new:
            self._source = _source_of_rank_0("order", self._generators, self._ranks)
            self._weights = [(0, self._weights[-1][1])]
        batches, after = _drawn(self._loader, self._generators, self._source)
        _check_order(self._ranks, "loader", batches)
        own = [generator.get_state() for generator in self._generators]
        self._order = [index for batch in batches for index in batch]
        self._samples = len(self._order)
        self._done = self.reached = self._begins_at
        self._ends.clear()
        part = iter(self._part)  # draws a seed for its workers
        for generator, state in zip(self._generators, own, strict=True):
            generator.set_state(state)
        if not is_new:
            _set_global_states(before)  # those of the moment from which the run goes on
        elif self._ranks.rank == 0:
            _set_global_states(after)  # as one process leaves them: the orders to come are those of one
        for batch in part:
            self._done += self._ends.popleft()
            yield batch
        self._source, self._samples, self._begins_at, self._done = None, None, 0, 0

    def share_of(self, window: int) -> int:
        """Return how many samples of a window of this epoch are this rank's."""
        bounds = self._bounds(window)
        return bounds[self._ranks.rank + 1] - bounds[self._ranks.rank]

    def share_out(self, weights: Sequence[float], since: int) -> None:
        """Share windows out by other weights.

        Args:
            weights: By rank.
            since: The first window for which they hold, which no rank may have reached.
        """
        self._weights.append((since, tuple(weights)))

    def state_dict(self) -> dict[str, Any]:
        """Return where the epoch stands."""
        return {
            "source": self._source,
            "windows": self._done,
            "weights": list(self._weights),
            "samples": self._samples,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go where a state was taken, by however many ranks; the next iterator begins there.

        Raises:
            CheckpointError: It was taken in the middle of an epoch of another number of samples.
        """
        there = state.get("samples")  # which those before did not tell
        here = None if there is None or state["source"] is None else sum(_sizes(self._loader, state["source"]))
        if here is not None and there != here:
            raise CheckpointError(
                f"the checkpoint was made in the middle of an epoch of {there} samples, and this loader's have {here}; "
                "pass the same loader over the same data"
            )
        self._samples = there
        self._source, self._begins_at, self._done = state["source"], state["windows"], state["windows"]
        alike = all(len(weights) == self._ranks.size for _, weights in state["weights"])
        self._weights = list(state["weights"]) if alike else [(0, (1.0,) * self._ranks.size)]

    def _asked_for(self) -> Iterator[list[Any]]:
        """Yield the indices of this rank's batches; runs ahead of what is yielded where workers load."""
        samples, target = len(self._order), self._target_batch
        windows = samples // target if self._drops_last else math.ceil(samples / target)
        for window in range(self._begins_at, windows):
            self.reached = window + 1
            bounds = self._bounds(window)
            start, stop = bounds[self._ranks.rank], bounds[self._ranks.rank + 1]
            for at in range(start, stop, self._batch_size):
                end = min(stop, at + self._batch_size)
                self._ends.append(end == stop)
                yield self._order[window * target + at : window * target + end]

    def _bounds(self, window: int) -> list[int]:
        samples = min(self._target_batch, len(self._order) - window * self._target_batch)
        weights = next(weights for since, weights in reversed(self._weights) if since <= window)
        return cut(max(0, samples), weights)


class DealtLoader:
    """Validation data of which every rank has the whole; each rank gets every so many-th batch of it.

    Batches are dealt out as they are, so that what a loss or a metric makes of a batch is what one process makes of it.
    Nothing is kept from one evaluation to the next but the loader's own generators.

    Args:
        loader: The whole, on every rank: a DataLoader over a dataset with indices, of which each sample is loaded by
            one rank; of anything else, which has to give the same batches in the same order everywhere, each rank goes
            through all and leaves out what is not its own.
        ranks: All ranks, which are asked here.

    Raises:
        InvalidInputError: Ranks have loaders of other lengths; on every rank.
    """

    def __init__(self, loader: Iterable[Any], ranks: Ranks) -> None:
        self._loader = loader
        self._ranks = ranks
        self._generators = generators_of(loader)
        self._own: list[list[Any]] = []
        self._part = None
        if can_be_sharded(loader):
            self._part = _part_of(loader, lambda: iter(self._own))  # type: ignore[arg-type]
        self._seen = [0, 0]  # batches and samples of the whole, where this rank goes through all of it
        check_lengths(ranks, "val_loader", loader)

    def __iter__(self) -> Iterator[Any]:
        """Begin anew, in an order that rank 0 draws; the global random generators are the caller's to put back."""
        source = _source_of_rank_0("val order", self._generators, self._ranks)
        if self._part is not None:
            order, _ = _drawn(self._loader, self._generators, source)  # type: ignore[arg-type]
            _check_order(self._ranks, "val_loader", order)
            self._own = order[self._ranks.rank :: self._ranks.size]
            return iter(self._part)
        _set(source, self._generators)
        return itertools.islice(self._counted(), self._ranks.rank, None, self._ranks.size)

    def check_end(self) -> None:
        """See, where every rank has gone through all of the data, that it was the same number.

        Raises:
            InvalidInputError: It was not; on every rank.
        """
        if self._part is None:
            said = self._ranks.exchange("val_loader's end", self._seen)
            _refuse_others("val_loader", [f"{samples} samples in {batches} batches" for batches, samples in said])

    def _counted(self) -> Iterator[Any]:
        self._seen = [0, 0]
        for batch in self._loader:
            self._seen[0] += 1
            self._seen[1] += count(batch)
            yield batch


# --- ranks that have to have the same ---------------------------------------------------------------------------------


def check_lengths(ranks: Ranks, name: str, loader: Any) -> None:
    """Refuse loaders of which every rank has to have the whole, but that say they have other numbers of samples.

    Args:
        ranks: All ranks.
        name: Of the argument.
        loader: This rank's.

    Raises:
        InvalidInputError: They do; on every rank.
    """
    kind = "" if can_be_sharded(loader) else f", of a {type(loader).__name__} that every rank goes through"
    _refuse_others(name, ranks.exchange(name, _in_words(_lengths(loader)) + kind))


def _check_order(ranks: Ranks, name: str, batches: Sequence[Sequence[Any]]) -> None:
    """Refuse orders that differ though they were drawn from the same: a sampler that draws from elsewhere.

    Raises:
        InvalidInputError: They do; on every rank.
    """
    order = [index for batch in batches for index in batch]
    # Of other indices than numbers and names nothing is known by which they could be told apart.
    is_told = {int, str}.issuperset(set(map(type, order)))
    digest = hashlib.blake2b(repr(order).encode(), digest_size=8).hexdigest() if is_told else "unknown"
    said = ranks.exchange(f"{name} order", (len(order), digest))
    _refuse_others(name, [f"{samples} samples in an epoch" for samples, _ in said])
    for rank, (_, theirs) in enumerate(said):
        if theirs != said[0][1]:
            raise InvalidInputError(
                f"the {name} of rank {rank} goes through its samples in another order than that of rank 0, so that "
                "some would be used twice and others never; with shard=True a sampler has to draw from torch's, "
                "Python's or NumPy's generator, or from its attribute generator=, and over the same data on all ranks"
            )


def _refuse_others(name: str, said: Sequence[str]) -> None:
    for rank, one in enumerate(said):
        if one != said[0]:
            raise InvalidInputError(
                f"the {name} of rank {rank} has {one}, and that of rank 0 {said[0]}; with shard=True every rank's has "
                "to give all of the data, of which each takes its part"
            )


# --- where one process stands, and where several do -------------------------------------------------------------------


def in_windows(position: Position, loader: DataLoader[Any], target_batch: int) -> Position:
    """Return a position in a loader of everything as a `ShardedLoader` of it takes it up.

    Args:
        position: Of one process, or of several; what is a `ShardedLoader`'s already is returned as it is.
        loader: The whole.
        target_batch: Samples a window.

    Raises:
        CheckpointError: The loader is another one.
    """
    if _is_in_windows(position):
        return position
    if not position.batches:
        return replace(position, loader_state=None)
    assert position.start is not None
    on_host, _, of_python, of_numpy, _ = position.start
    source = (on_host, of_python, of_numpy, list(position.generators))
    sizes = _sizes(loader, source)
    there, here = (position.length, position.batch_size), (len(loader), loader.batch_size)
    if there != here:
        raise CheckpointError(
            "the checkpoint was made in the middle of an epoch with a loader of {} batches of {} samples, and this one "
            "has {} of {}; pass the same loader over the same data".format(*there, *here)
        )
    used = sum(sizes[: position.batches])
    if position.used:
        used += position.used - sizes[position.batches - 1]
    windows, rest = divmod(used, target_batch)
    state = {"source": source, "windows": windows + bool(rest), "weights": [(0, ())]}
    return replace(position, used=0, before_last=None, loader_state=state)


def of_whole(position: Position, loader: Any, target_batch: int) -> Position:
    """Return the position of a `ShardedLoader` as one takes it up that goes through everything by itself.

    Args:
        position: Any position; only a `ShardedLoader`'s is changed.
        loader: The whole.
        target_batch: Samples a window.

    Raises:
        CheckpointError: The loader is another one.
    """
    if not _is_in_windows(position):
        return position
    source, windows = position.loader_state["source"], position.loader_state["windows"]
    if not position.batches:
        return replace(position, loader_state=None)
    if not can_be_sharded(loader):
        raise CheckpointError(
            "the checkpoint was made with a DataLoader over a dataset with indices, and this loader is a "
            f"{type(loader).__name__}; pass the same loader over the same data"
        )
    assert position.start is not None
    *states, own = source
    sizes = _sizes(loader, source)
    left = min(windows * target_batch, sum(sizes))
    batches = used = 0
    while left:
        used, left = min(left, sizes[batches]), max(0, left - sizes[batches])
        batches += 1
    is_whole = not batches or used == sizes[batches - 1]
    start = (states[0], position.start[1], *states[1:], position.start[4])
    return replace(
        position,
        batches=batches,
        used=0 if is_whole else used,
        start=start,
        before_last=None if is_whole else start,
        generators=tuple(own),
        loader_state=None,
    )


def _is_in_windows(position: Position) -> bool:
    state = position.loader_state
    return isinstance(state, dict) and state.keys() - {"samples"} == {"source", "windows", "weights"}


def _sizes(loader: DataLoader[Any], source: Any) -> list[int]:
    """Return how many samples each batch of an epoch has."""
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
    """Return what rank 0's order is drawn from: the states of torch's, Python's and NumPy's generators, and its own."""
    own = (*_global_states(), [one.get_state() for one in generators]) if ranks.rank == 0 else None
    return ranks.exchange_tensors(topic, own)[0]


def _drawn(
    loader: DataLoader[Any], generators: Sequence[torch.Generator], source: Any
) -> tuple[list[list[Any]], tuple[Any, ...]]:
    """Return an epoch's batches of indices as one process draws them, and how that leaves the global generators.

    These are put back; the loader's own are left where it leaves them.
    """
    before = _global_states()
    try:
        _set(source, generators)
        # As a DataLoader does before it asks its sampler: a seed for its workers.
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


def _part_of(loader: DataLoader[Any], asked_for: Callable[[], Iterator[list[Any]]]) -> DataLoader[Any]:
    """Return a loader over the same data, with the same arguments, of other batches."""
    arguments = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
    return DataLoader(loader.dataset, batch_sampler=_Batches(asked_for), **arguments)


def _lengths(loader: Any) -> dict[str, int]:
    """Return how many samples and batches a loader has, as far as it says so."""
    found = {}
    for name, owner in (("samples", getattr(loader, "dataset", None)), ("batches", loader)):
        try:
            found[name] = len(owner)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # the second is what a dataset raises that leaves it open
            continue
    return found


def _in_words(lengths: dict[str, int]) -> str:
    return " in ".join(f"{number} {name}" for name, number in lengths.items()) or "no length"


class _Batches:
    """A batch sampler that asks anew for every epoch what is in it."""

    def __init__(self, asked_for: Callable[[], Iterator[list[Any]]]) -> None:
        self._asked_for = asked_for

    def __iter__(self) -> Iterator[list[Any]]:
        return self._asked_for()
