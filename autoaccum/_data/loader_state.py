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

from autoaccum._data.batches import count
from autoaccum._data.fingerprint import fingerprint
from autoaccum._data.loader_memory import LoaderMemory
from autoaccum._data.loaders import is_kept_by_its_state, may_move_in_workers, samplers_of
from autoaccum._oom import first_line, is_device_lost, is_oom
from autoaccum.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from autoaccum._data.batches import Window
    from autoaccum._data.pieces import Split
    from autoaccum._data.random_state import RandomState

# The value of `RandomState.taken`, never modified.
RandomStates = tuple[Any, ...]

# Generators that a call of `fit` has read from: another call, as in a later notebook cell, would miss those batches.
_read_from: WeakSet[Any] = WeakSet()
_SAME = "pass the same loader over the same data"
# Names in a message.
_NAMED = 3


@dataclass(frozen=True)
class Position:
    """The position of a run in its loader, between two windows.

    Attributes:
        epoch: The epoch, from 1.
        batches: Batches drawn in the epoch; 0 before it starts.
        used: Samples of the last batch that were used; 0 if all were, or none.
        put_back: Whether none of the last batch was used: it was drawn to see that it begins the next window.
        closed: Whether no window has followed the last epoch that is complete, including its evaluation.
        start: The random state before the epoch's iterator was created; None before the epoch starts.
        before_last: The random state before the last batch was drawn.
        last: The fingerprint of the last batch.
        memory: Generators and numbers of the loader before the epoch's iterator was created.
        changed: What had changed in the loader by then that `memory` does not hold.
        loader_state: The `state_dict` of a loader that is to come back by it, after `state_at` batches; else None.
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
    changed: tuple[str, ...] = ()
    loader_state: Any = None
    state_at: int = 0
    length: int | None = None
    batch_size: int | None = None
    samples: int | None = None
    put_back: bool = False

    @property
    def whole(self) -> int:
        """How many of the batches drawn were used to their end."""
        return self.batches - (self.put_back or self.used > 0)


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
        self._has_state = all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))
        self._keeps_state = self._has_state and random is not None
        self._memory = LoaderMemory(loader if random is not None else None)
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
        before = None if self._random is None else self._random.take()
        try:
            batch = next(self._batches)
        except StopIteration:
            # Kept separately: from this state, a loader starts the next epoch.
            self._state_at_end, self._is_at_end = self._loader_state(), True
            raise
        self._drawn, self._before_last = self._drawn + 1, before
        if self._random is not None:
            self._last = fingerprint(batch)
        return batch

    def begin(self, epoch: int) -> Self:
        """Start an epoch and return its batches."""
        self._at, self._drawn, self._last = replace(self._at, epoch=epoch), 0, None
        for sampler in {id(one): one for one in samplers_of(self._loader)}.values():
            if callable(getattr(sampler, "set_epoch", None)):  # a DistributedSampler's, which counts from 0
                sampler.set_epoch(epoch - 1)
        if self._random is not None:
            memory, changed = self._memory.take_what_moves(), self._memory.changed()
            self._at = replace(self._at, start=self._random.take(), memory=memory, changed=changed)
        self._batches = iter(self._loader)
        self._is_at_end, self._is_its_own_iterator = False, self._batches is self._loader
        if isinstance(self._loader, GeneratorType):
            _read_from.add(self._loader)
        self._keeps_state = self._has_state and self._random is not None
        state = self._loader_state()
        if self._keeps_state and not is_kept_by_its_state(self._loader, state):
            self._keeps_state, state = False, None
        self._states = [(0, state)]
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
            put_back=window.used == 0,
        )

    def at_start(self, epoch: int) -> Position:
        """Return the position before an epoch, with the previous one complete."""
        memory, changed = self._memory.take_what_moves(), self._memory.changed()
        return Position(epoch, memory=memory, changed=changed, loader_state=self._state_at_end)

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
        new = self._memory.check(position.memory, position.changed)
        self.differences = [f"{_listed(new)} of the loader cannot be restored from this checkpoint"] if new else []
        if position.start is None:
            self._go_to_start(position)
        else:
            self._check_that_it_is_the_same(position)
            self._go_into(position)
        return self

    def _go_to_start(self, position: Position) -> None:
        """Return to the start of an epoch that has not begun."""
        loader = getattr(self._loader, "whole_loader", self._loader)
        stayed = getattr(loader, "persistent_workers", False) and getattr(loader, "_iterator", None) is None
        if position.epoch > 1 and stayed and may_move_in_workers(loader):
            self.differences.append(
                "if the dataset draws random numbers or counts in its workers, the batches differ from those of an "
                "uninterrupted run, since workers that stay (persistent_workers=True) begin anew"
            )
        # Makes the loader apply the state. The epoch is started by another iterator, since this one has drawn random
        # numbers for an epoch that turns out to be finished.
        if not self._load(position, lambda: iter(self._loader)):
            self._start_workers_that_stay(position.epoch)
        self._put_back_memory(position)

    def _go_into(self, position: Position) -> None:
        """Return to a place within an epoch, and draw the last batch again, or all up to it."""
        self._random.put_back(position.start)
        self._put_back_memory(position)
        if was_loaded := self._load(position, lambda: self.begin(position.epoch)):  # some apply the state here
            self._drawn = position.state_at
            self._states = [(self._drawn, self._states[0][1])]
        else:
            self._start_workers_that_stay(position.epoch)
            self.begin(position.epoch)
        self._at = replace(self._at, start=position.start, memory=position.memory, changed=position.changed)
        while self._drawn < position.batches - 1:
            self._draw_again(position)
        if not position.batches:
            return
        self._random.put_back(position.before_last)
        batch = self._draw_again(position)
        if self._last != position.last:
            self._tell_of_another_batch(position, was_loaded=was_loaded)
        if position.whole == position.batches:
            return
        if (samples := count(batch, self._split)) <= position.used:
            raise CheckpointError(
                f"the checkpoint was made after {position.used} samples of batch {position.batches} of epoch "
                f"{position.epoch}, but now that batch holds {samples}; {_SAME}"
            )
        self._begun.append(batch)

    def _tell_of_another_batch(self, position: Position, *, was_loaded: bool) -> None:
        loader = getattr(self._loader, "whole_loader", self._loader)
        stay = position.epoch > 1 and getattr(loader, "persistent_workers", False)
        if getattr(loader, "num_workers", 0) and (was_loaded or stay):
            why = "the random numbers of its workers begin anew, with " + (
                "persistent_workers=True" if stay else f"{type(loader).__name__}; those of a DataLoader do not"
            )
        else:
            why = "it draws from something that none of its parts holds, or its data has changed"
        self.differences.append(
            f"batch {position.batches} of epoch {position.epoch} is not the same as before the interruption, and the "
            f"batches after it may differ from an uninterrupted run too: {why}"
        )

    def _put_back_memory(self, position: Position) -> None:
        with _refusals_explained(self._loader):
            lost = self._memory.put_back(position.memory)
        if names := [*lost, *(name for name in position.changed if name not in position.memory)]:
            self.differences.append(
                f"{_listed(names)} of the loader, which changed during the training, cannot be restored; generators "
                "and numbers that are there from the beginning can"
            )

    def _load(self, position: Position, begin: Callable[[], object]) -> bool:
        """Give the loader its state and begin, if it is to come back by that; return whether it is."""
        if not self._has_state or position.loader_state is None:
            return False
        with _refusals_explained(self._loader):
            self._loader.load_state_dict(copy.deepcopy(position.loader_state))
            begin()
        return True

    def _start_workers_that_stay(self, epoch: int) -> None:
        """Start persistent workers without using random numbers, as an earlier epoch has started them."""
        loader = self._loader
        if epoch == 1 or not getattr(loader, "persistent_workers", False):
            return
        if getattr(loader, "_iterator", loader) is None:
            random, memory = self._random.take(), self._memory.take()
            iter(loader)
            self._random.put_back(random)
            self._memory.put_back(memory)

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


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except (TypeError, NotImplementedError):  # datasets without a length raise the second
        return None
