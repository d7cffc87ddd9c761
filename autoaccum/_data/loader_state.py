"""Records the position in a loader in a form that a checkpoint can store, and returns a loader to it.

A loader with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) restores its position itself. Any
other is fast-forwarded: its epoch is restarted from the same random state, which gives the same order and worker seeds,
and batches are drawn and discarded. The random state before the last batch is kept as well, since a later window may
need the rest of that batch: transforms then draw the same numbers as the first time.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from autoaccum._data.batches import count
from autoaccum._data.loaders import generators_of, samplers_of
from autoaccum._data.random_state import set_states, states_of
from autoaccum._oom import first_line, is_device_lost, is_oom
from autoaccum.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._data.random_state import RandomState

# The value of `RandomState.taken`, never modified.
RandomStates = tuple[Any, ...]

# Generators that a call of `fit` has read from: another call, as in a later notebook cell, would miss those batches.
_read_from: WeakSet[Any] = WeakSet()
_SAME = "pass the same loader over the same data"


@dataclass(frozen=True)
class Position:
    """The position of a run in its loader, between two windows.

    Attributes:
        epoch: The epoch, from 1.
        batches: Batches drawn in the epoch; 0 before it starts.
        used: Samples of the last batch that were used; 0 if all were, or none.
        put_back: Whether none of the last batch was used: it was drawn to see that it begins the next window.
        behind: How many batches `loader_state` lies further back, which are drawn again.
        closed: Whether no window has followed the last epoch that is complete, including its evaluation.
        start: The random state before the epoch's iterator was created; None before the epoch starts.
        before_last: The random state before the last batch was drawn, if a part of that batch is left.
        generators: States of the loader's own generators before the epoch's iterator was created.
        loader_state: The `state_dict` of a loader that has one: before the last batch if a part of it is left, else
            after it; or `behind` batches earlier.
        length: `len` of the loader; None if it has none.
        batch_size: `batch_size` of the loader; None if it has none.
        samples: `len` of its dataset; None if it has none.
    """

    epoch: int = 1
    batches: int = 0
    used: int = 0
    closed: bool = True
    start: RandomStates | None = None
    before_last: RandomStates | None = None
    generators: tuple[torch.Tensor, ...] = ()
    loader_state: Any = None
    length: int | None = None
    batch_size: int | None = None
    samples: int | None = None
    put_back: bool = False
    behind: int = 0

    @property
    def whole(self) -> int:
        """How many of the batches drawn were used to their end."""
        return self.batches - (self.put_back or self.used > 0)


class Track:
    """Iterates over a loader, epoch by epoch, and tracks the position in it.

    Keeps no reference to a yielded batch, and propagates errors of the loader unchanged.
    """

    def __init__(self, loader: Iterable[Any], random: RandomState | None, split: Split | None = None) -> None:
        self._split = split
        self._loader: Any = loader
        self._random: Any = random  # None where no position is asked for
        self._keeps_state = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        self._generators = generators_of(loader)
        self._at = Position(closed=False)  # what all positions of an epoch have in common
        if random is not None:
            # Read only once: some loaders have another length in each epoch, and the next process reads that of a new
            # loader.
            size, samples = getattr(loader, "batch_size", None), _length(getattr(loader, "dataset", None))
            size = size if isinstance(size, int) else None
            self._at = Position(closed=False, length=_length(loader), batch_size=size, samples=samples)
        self._is_its_own_iterator = self._is_at_end = False
        self._batches: Iterator[Any] = iter(())
        self._begun: list[Any] = []  # the batch of which a window before has used a part
        self._drawn = 0
        self._before_last: RandomStates | None = None
        # Each with the number of batches drawn before it. Reading one takes as long as loading a small batch (about
        # 140 microseconds for torchdata's), so it is done once a window; batches since are drawn again.
        self._states: list[tuple[int, Any]] = [(0, None)]
        self._state_at_end: Any = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._begun:
            return self._begun.pop()
        if self._random is not None:
            self._before_last = self._random.take()
        try:
            batch = next(self._batches)
        except StopIteration:
            # Kept separately: from this state, a loader starts the next epoch.
            self._state_at_end, self._is_at_end = self._loader_state(), True
            raise
        self._drawn += 1
        return batch

    def begin(self, epoch: int) -> Self:
        """Start an epoch and return its batches."""
        self._at, self._drawn = replace(self._at, epoch=epoch), 0
        for sampler in {id(one): one for one in samplers_of(self._loader)}.values():
            if callable(getattr(sampler, "set_epoch", None)):  # a DistributedSampler's, which counts from 0
                sampler.set_epoch(epoch - 1)
        if self._random is not None:
            if epoch > 1:
                self._start_workers_that_stay()
            self._at = replace(self._at, start=self._random.take(), generators=states_of(self._generators))
        self._batches = iter(self._loader)
        self._is_at_end, self._is_its_own_iterator = False, self._batches is self._loader
        if isinstance(self._loader, GeneratorType):
            _read_from.add(self._loader)
        self._states = [(0, self._loader_state())]
        return self

    def _start_workers_that_stay(self) -> None:
        """Start persistent workers without using random numbers, as if an earlier epoch had started them."""
        loader = self._loader
        if getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", loader) is None:
            random, generators = self._random.take(), states_of(self._generators)
            iter(loader)
            self._random.put_back(random)
            set_states(self._generators, generators)

    def close(self) -> None:
        """Release the epoch's iterator, and with it the worker processes."""
        self._batches, self._begun = iter(()), []

    def after(self, window: Window) -> Position:
        """Return the position after a window that has just been drawn."""
        whole = self._drawn - (window.used is not None)
        if self._states[-1][0] != self._drawn and not self._is_at_end:  # where it would begin the next epoch
            self._states.append((self._drawn, self._loader_state()))
        while len(self._states) > 1 and self._states[1][0] <= whole:
            del self._states[0]
        drawn, state = self._states[0]
        return replace(
            self._at,
            batches=self._drawn,
            used=window.used or 0,
            before_last=self._before_last if whole < self._drawn else None,
            loader_state=state,
            put_back=window.used == 0,
            behind=whole - drawn if self._keeps_state else 0,
        )

    def at_start(self, epoch: int) -> Position:
        """Return the position before an epoch, with the previous one complete."""
        return Position(epoch, generators=states_of(self._generators), loader_state=self._state_at_end)

    def go_to(self, position: Position) -> Self:
        """Return to `position`, and return the epoch's remaining batches.

        If a part of the batch that was drawn last is left, that batch is the first of them. The caller sets the random
        state afterwards; if the epoch has not started, before `begin`.

        Raises:
            CheckpointError: The loader is a different one, yields other batches than before, refuses its state or
                cannot be restarted. It may have been read from, or hold some of the state.
        """
        self._check_that_nothing_is_lost(position)
        self.close()
        if len(position.generators) != len(self._generators):
            raise CheckpointError(
                f"the checkpoint was made with a loader that has {len(position.generators)} random generators of its "
                f"own, and this one has {len(self._generators)}; pass the same loader"
            )
        if position.start is None:  # the epoch has not begun
            if self._keeps_state and position.loader_state is not None:
                # Makes the loader apply the state. The epoch is started by another iterator, since this one has drawn
                # random numbers for an epoch that turns out to be finished.
                self._load(position, lambda: iter(self._loader))
            with _refusals_explained(self._loader):
                set_states(self._generators, position.generators)
            return self
        self._check_that_it_is_the_same(position)
        self._random.put_back(position.start)
        with _refusals_explained(self._loader):
            set_states(self._generators, position.generators)
        self._load(position, lambda: self.begin(position.epoch))  # some apply the state here
        self._at = replace(self._at, start=position.start, generators=position.generators)
        if self._keeps_state:
            self._drawn = position.whole - position.behind
            self._states = [(self._drawn, self._states[0][1])]
        while self._drawn < position.whole:
            self._draw_again(position)
        if position.whole < position.batches:
            self._random.put_back(position.before_last)
            batch = self._draw_again(position)
            if (samples := count(batch, self._split)) <= position.used:
                raise CheckpointError(
                    f"the checkpoint was made after {position.used} samples of batch {position.batches} of epoch "
                    f"{position.epoch}, but now that batch holds {samples}; {_SAME}"
                )
            self._begun.append(batch)
        return self

    def _load(self, position: Position, begin: Callable[[], object]) -> None:
        """Give the loader its state, if it has one, and begin."""
        if not self._keeps_state:
            begin()
            return
        with _refusals_explained(self._loader):
            self._loader.load_state_dict(copy.deepcopy(position.loader_state))
            begin()

    def _check_that_nothing_is_lost(self, position: Position) -> None:
        """Reject going back in a loader that can only go forward: it would skip the batches that were drawn."""
        goes_back = self._is_its_own_iterator and self._drawn > 0 and position.epoch <= self._at.epoch
        was_read = isinstance(self._loader, GeneratorType) and self._loader in _read_from
        is_anothers = was_read and self._drawn == 0 and position.batches > 0
        if (goes_back or is_anothers) and not self._keeps_state:
            raise CheckpointError(
                f"training must resume after batch {position.batches} of epoch {position.epoch}, but the loader, a "
                f"{type(self._loader).__name__}, can be read only once and has been read from; run again with a new "
                "one, or pass a DataLoader or a list, which can be restarted"
            )

    def _check_that_it_is_the_same(self, position: Position) -> None:
        for there, here, what in (
            (position.samples, self._at.samples, "samples in its dataset"),
            (position.length, self._at.length, "batches per epoch"),
            (position.batch_size, self._at.batch_size, "samples per batch"),
        ):
            if there is not None and here is not None and there != here:
                raise CheckpointError(
                    f"the checkpoint was made in the middle of an epoch with a loader of {there} {what}, and this one "
                    f"has {here}; {_SAME}"
                )

    def _draw_again(self, position: Position) -> Any:
        try:
            return next(self)
        except StopIteration:
            raise CheckpointError(
                f"the checkpoint was made after {position.batches} batches of epoch {position.epoch}, but the "
                f"loader now yields only {self._drawn}; {_SAME}"
            ) from None

    def _loader_state(self) -> Any:
        return copy.deepcopy(self._loader.state_dict()) if self._keeps_state and self._random is not None else None


@contextmanager
def _refusals_explained(loader: Any) -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:
        if is_device_lost(error) or is_oom(error):
            raise
        raise CheckpointError(
            f"{type(loader).__name__} refuses its state in the checkpoint ({type(error).__name__}: "
            f"{first_line(error)}); {_SAME}, or resume=False to start from scratch"
        ) from error


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # datasets without a length raise the second
        return None
