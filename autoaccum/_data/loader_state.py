"""Records the position in a loader in a form that a checkpoint can store, and returns a loader to it.

A loader with `state_dict` and `load_state_dict` (torchdata's StatefulDataLoader) restores its position itself where it
can. Any other is fast-forwarded: its epoch is restarted from the same random state, which gives the same order and
worker seeds, and batches are drawn and discarded. The last of them is drawn from the random state before it, so that
transforms draw the same numbers as the first time: a later window may need the rest of it. Either way it is compared
with what was drawn before, so that a loader that comes back to another place, or with other samples, is told of.
"""

from __future__ import annotations

import copy
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import GeneratorType
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakSet

from autoaccum._arguments import listed
from autoaccum._data.batches import count
from autoaccum._data.fingerprint import fingerprint_of
from autoaccum._data.loader_memory import LoaderMemory, data_loaders_in
from autoaccum._data.loaders import (
    can_be_read_once,
    has_state,
    is_kept_between_epochs,
    is_kept_by_its_state,
    samplers_of,
)
from autoaccum._data.random_state import moved
from autoaccum._oom import first_line, is_device_lost, is_oom
from autoaccum.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._data.random_state import RandomState

# What `RandomState.take` returns, never modified.
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
        is_unused: Whether none of the last batch was used: it was drawn to see that it begins the next window.
        closed: Whether no window has followed the last epoch that is complete, including its evaluation.
        start: The random state before the epoch's iterator was created; None before the epoch starts.
        before_last: The random state before the last batch was drawn.
        last: The fingerprint of the last batch.
        memory: What the loader's parts kept before the epoch's iterator was created.
        loader_state: The `state_dict` of a loader that is to come back by it, else None.
        state_at: After how many batches of the epoch that was; -1 if at the end of the epoch before.
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
    last: int | None = None
    memory: dict[str, Any] = field(default_factory=dict)
    loader_state: Any = None
    state_at: int = -1
    length: int | None = None
    batch_size: int | None = None
    samples: int | None = None
    is_unused: bool = False

    @property
    def whole(self) -> int:
        """How many of the batches drawn were used to their end."""
        return self.batches - (self.is_unused or self.used > 0)


class Track:
    """Iterates over a loader, epoch by epoch, and tracks the position in it.

    Keeps no reference to a yielded batch, and propagates errors of the loader unchanged.

    Attributes:
        differences: In what the last return to a position is not exact, in words.
    """

    def __init__(self, loader: Iterable[Any], random: RandomState | None, split: Split | None = None) -> None:
        self._split = split
        self._loader: Any = loader
        self._random: Any = random  # None where no position is asked for
        self._has_state = has_state(loader)
        self._keeps_state = self._has_state and random is not None and is_kept_by_its_state(loader)
        watched = None if random is None else getattr(loader, "whole_loader", loader)
        self._memory, self._data_loaders = LoaderMemory(watched), data_loaders_in(watched)
        self.differences: list[str] = []
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
        self._last: int | None = None
        # Each with the number of batches drawn before it. Reading one takes as long as loading a small batch (about
        # 140 microseconds for torchdata's), so it is done once a window; batches since are drawn again.
        self._states: list[tuple[int, Any]] = [(0, None)]
        self._state_at_end: Any = None

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        if self._begun:
            return self._begun.pop()
        before = None if self._random is None else self._random.capture()
        try:
            batch = next(self._batches)
        except StopIteration:
            # Kept separately: from this state, a loader starts the next epoch.
            self._is_at_end = True
            self._state_at_end = self._loader_state() if is_kept_between_epochs(self._loader) else None
            raise
        self._drawn, self._before_last = self._drawn + 1, before
        if self._random is not None:
            self._last = fingerprint_of(batch)
        return batch

    def begin(self, epoch: int) -> Self:
        """Start an epoch and return its batches."""
        self._at, self._drawn, self._last = replace(self._at, epoch=epoch), 0, None
        for sampler in {id(one): one for one in samplers_of(self._loader)}.values():
            if callable(getattr(sampler, "set_epoch", None)):  # a DistributedSampler's, which counts from 0
                sampler.set_epoch(epoch - 1)
        if self._random is not None:
            self._at = replace(self._at, start=self._random.capture(), memory=self._memory.take_what_moves())
        self._batches = iter(self._loader)
        self._is_at_end, self._is_its_own_iterator = False, self._batches is self._loader
        if isinstance(self._loader, GeneratorType):
            _read_from.add(self._loader)
        # That of the end before stands for the beginning: what a sampler says after its first epoch and before its next
        # batch may be of either.
        self._states = [(0, self._loader_state()) if epoch == 1 else (-1, self._state_at_end)]
        return self

    def close(self) -> None:
        """Release the epoch's iterator, and with it the worker processes."""
        self._batches, self._begun = iter(()), []

    def after(self, window: Window) -> Position:
        """Return the position after a window that has just been drawn."""
        if self._states[-1][0] != self._drawn and not self._is_at_end:  # where it would begin the next epoch
            self._states.append((self._drawn, self._loader_state()))
        while len(self._states) > 1 and self._states[1][0] < self._drawn:  # the last batch is drawn again
            del self._states[0]
        state_at, state = self._states[0]
        return replace(
            self._at,
            batches=self._drawn,
            used=window.used or 0,
            before_last=self._before_last,
            last=self._last,
            loader_state=state,
            state_at=state_at,
            is_unused=window.used == 0,
        )

    def at_start(self, epoch: int) -> Position:
        """Return the position before an epoch, with the previous one complete."""
        return Position(epoch, memory=self._memory.take_what_moves(), loader_state=self._state_at_end)

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
        self._memory.check(position.memory)
        self.differences = []
        self._state_at_end = position.loader_state if position.state_at < 0 else None
        if position.start is None:
            was_loaded, is_same = self._go_to_start(position), True
        else:
            self._check_that_it_is_the_same(position)
            was_loaded = self._go_into(position)
            is_same = self._last == position.last
        self._tell_what_differs(position, is_same=is_same, was_loaded=was_loaded)
        return self

    def _go_to_start(self, position: Position) -> bool:
        """Return to the start of an epoch that has not begun; return whether the loader was given its state."""
        # Makes the loader apply the state. The epoch is started by another iterator, since this one has drawn random
        # numbers for an epoch that turns out to be finished.
        if was_loaded := self._comes_by_its_state(position):
            self._load(position, lambda: iter(self._loader))
        else:
            self._start_workers_that_stay(position.epoch)
        self._put_back_memory(position)
        return was_loaded

    def _go_into(self, position: Position) -> bool:
        """Draw the last batch of an epoch again, and those before it unless the loader is given its state."""
        was_loaded = position.state_at >= 0 and self._comes_by_its_state(position)
        if was_loaded:
            self._put_back_memory(position)
            self._random.restore(position.start)
            self._load(position, lambda: self.begin(position.epoch))
            self._drawn = position.state_at
            self._states = [(self._drawn, self._states[0][1])]
        else:
            self._go_to_start(position)
            self._random.restore(position.start)
            self.begin(position.epoch)
        self._at = replace(self._at, start=position.start, memory=position.memory)
        begun = self._random.capture()
        while self._drawn < position.batches - 1:
            self._draw_again(position)
        if position.batches:
            before: Any = position.before_last
            now = self._random.capture()
            self._random.restore(before)
            batch = self._draw_again(position)
            # Here the loader alone has drawn since the beginning; in the training, a model may have drawn between.
            shifts = (moved(*states) for states in ((begun, now), (before, self._random.capture()), (now, before)))
            is_shifted = any((early or late) and apart for early, late, apart in zip(*shifts, strict=True))
            if is_shifted and self._last == position.last and any(one.num_workers for one in self._data_loaders):
                self.differences.append(
                    "batches that workers had loaded ahead may differ from an uninterrupted run: the loader draws from "
                    "a global generator during the epoch, as the training does; give its sampler one of its own"
                )
            if position.whole < position.batches:
                self._begun.append(batch)
                if (samples := count(batch, self._split)) <= position.used:
                    raise CheckpointError(
                        f"the checkpoint was made after {position.used} samples of batch {position.batches} of epoch "
                        f"{position.epoch}, but now that batch holds {samples}; {_SAME}"
                    )
        return was_loaded

    def _comes_by_its_state(self, position: Position) -> bool:
        return self._has_state and position.loader_state is not None

    def _load(self, position: Position, begin: Callable[[], object]) -> None:
        """Give the loader its state, which some apply when they begin."""
        with _refusals_explained(self._loader):
            self._loader.load_state_dict(copy.deepcopy(position.loader_state))
            begin()

    def _start_workers_that_stay(self, epoch: int) -> None:
        """Start persistent workers without using random numbers, as an earlier epoch has started them."""
        if epoch == 1 or hasattr(self._loader, "whole_loader"):  # such a loader leaves random numbers to the whole one
            return
        random, memory = self._random.capture(), self._memory.capture()
        for loader in self._data_loaders:
            if loader.persistent_workers and loader._iterator is None:
                iter(loader)
        self._random.restore(random)
        self._memory.restore(memory)

    def _put_back_memory(self, position: Position) -> None:
        with _refusals_explained(self._loader):
            lost = self._memory.restore(position.memory)
        if lost:
            self.differences.append(
                f"{listed(lost)} of the loader, which changed during the training, cannot be restored, which makes a "
                "difference unless it is made anew, as a cache is; generators and numbers can"
            )

    def _tell_what_differs(self, position: Position, *, is_same: bool, was_loaded: bool) -> None:
        """Say what a return to a position cannot restore.

        Args:
            position: The position.
            is_same: Whether the last batch is as it was before.
            was_loaded: Whether the loader was given its state.
        """
        has_begun, is_later = position.start is not None, position.epoch > 1
        # What workers do is exact where all batches of new ones are drawn again.
        anew = [one for one in self._data_loaders if one.num_workers]
        if has_begun and was_loaded:
            anew = [one for one in anew if not hasattr(one.dataset, "load_state_dict")]
        else:
            anew = [one for one in anew if one.persistent_workers and is_later]
        cause = "persistent_workers=True" if anew and anew[0].persistent_workers else type(self._loader).__name__
        if not is_same:
            why = "it draws from what none of its parts holds, or its data changed"
            why = f"its workers begin anew ({cause})" if anew else why
            self.differences.append(
                f"batch {position.batches} of epoch {position.epoch} is not the one before the interruption, and later "
                f"ones may differ from an uninterrupted run too: {why}"
            )
        elif anew:
            self.differences.append(
                f"what the dataset draws or counts in its workers, if anything, differs from an uninterrupted run, "
                f"since they begin anew ({cause})"
            )
        if not has_begun and is_later and can_be_read_once(self._loader):
            self.differences.append(
                f"the loader can be read only once: an uninterrupted run would have ended before epoch "
                f"{position.epoch}, and this one reads a new loader in it"
            )

    def _check_that_nothing_is_lost(self, position: Position) -> None:
        """Reject going back in a loader that can only go forward: it would skip the batches that were drawn."""
        goes_back = self._is_its_own_iterator and self._drawn > 0 and position.epoch <= self._at.epoch
        was_read = isinstance(self._loader, GeneratorType) and self._loader in _read_from
        is_anothers = was_read and self._drawn == 0 and position.batches > 0
        if (goes_back or is_anothers) and not self._has_state:
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
        return copy.deepcopy(self._loader.state_dict()) if self._keeps_state else None


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
