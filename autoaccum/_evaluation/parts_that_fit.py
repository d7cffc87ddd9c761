"""Runs a function, without gradients, on parts of batches that fit, and repeats only parts that run out of memory."""

from __future__ import annotations

from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeVar

from autoaccum._data.batches import Window
from autoaccum._engine.does_not_fit import sample_of
from autoaccum._engine.out_of_memory import Phase, damage_text, resolvable_oom
from autoaccum._records import MemoryEvent
from autoaccum._sizing.backoff import Backoffs, wait_for_memory
from autoaccum._sizing.frontier import widths_between
from autoaccum._sizing.planner import GROWTH_AFTER_FAILURE
from autoaccum.errors import InvalidInputError, StateDamagedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from autoaccum._data.pieces import Split
    from autoaccum._engine.out_of_memory import Witness
    from autoaccum._engine.savepoint import SavedState, Savepoint
    from autoaccum._memory.base import MemoryBackend
    from autoaccum.errors import DoesNotFitError

_T = TypeVar("_T")
# From 3,000 samples to the 100 that fit takes 5 failures; by the factor of training, 13.
_GROWTH_AFTER_FAILURES = 2


class PartsThatFit:
    """The size of parts that fit: whole batches at first, smaller ones after a failure, which later grow back.

    Nothing is searched for: without gradients a whole batch nearly always fits, and a failure costs one part. After a
    failure, sizes are those of training: samples at least as wide as those that failed go in smaller parts. If these
    samples fail again, the number of parts doubles, since a batch may hold many times what fits.

    Args:
        memory: The device.
        savepoint: Of all that functions may change.
        refuse: Returns the error for a sample that does not fit alone, given what the device said and the sample in
            words.
        on_oom: Called each time memory runs out.
    """

    def __init__(
        self,
        memory: MemoryBackend,
        savepoint: Savepoint,
        refuse: Callable[[str, str], DoesNotFitError],
        on_oom: Callable[[MemoryEvent], None],
    ) -> None:
        self._memory = memory
        self._savepoint = savepoint
        self._refuse = refuse
        self._on_oom = on_oom
        self._backoffs = Backoffs()
        self.begin()

    def begin(self, most: int | None = None, witness: Witness | None = None) -> None:
        """Look anew at what the model's passes move, in the next part.

        Args:
            most: The largest size to try; None for whole batches.
            witness: Sees each event of memory, before anything is freed.
        """
        self._most = most
        self._witness = witness
        self._knows_what_moves = False
        self._to_overwrite: SavedState | None = None  # before an earlier part, whose memory is used again

    def end(self) -> None:
        """Free what is kept from part to part: the training needs its memory."""
        self._to_overwrite = None

    def of(self, window: Window, function: Callable[[int, int], _T]) -> Iterator[tuple[int, _T]]:
        """Yield the size of each part of a batch, in order, and what a function of its start and size returns."""
        start = tries = failures = 0
        is_clean, samples = True, window.samples
        most = samples if self._most is None else min(samples, self._most)
        runs = list(chain.from_iterable(window.widths()))
        while start < samples:
            size = min(most, samples - start)
            size = self._backoffs.limit(widths_between(runs, start, start + size), size)
            done = self.attempt(partial(function, start, size), window, size)
            if isinstance(done, MemoryEvent):
                is_clean = False
                if size > 1:
                    widths = widths_between(runs, start, start + size)
                    growth = _GROWTH_AFTER_FAILURES if failures else GROWTH_AFTER_FAILURE
                    self._backoffs.fail(widths, size, target_batch=samples, largest=most, growth=growth)
                elif not wait_for_memory(tries, may_wait=True):
                    raise self._refuse(done.message, sample_of(window, start))
                failures += 1
                tries += size == 1
                continue
            start, tries, failures = start + size, 0, 0
            result = [done]
            del done  # the next part needs its memory
            yield size, result.pop()
        if is_clean and self._memory.fails_cleanly:
            for _, backoff, larger in self._backoffs.succeed(widths for _, widths in runs):
                backoff.grow(larger)

    def of_batch(
        self, batch: Any, split: Split | None, function: Callable[[Any, int], _T]
    ) -> tuple[list[_T], list[int], Window | None]:
        """Return what a function of each part and its size returns; the sizes; and the batch as a window.

        A batch that cannot be cut is a single part, of size 1, and no window.
        """
        try:
            window = Window([batch], split)
        except InvalidInputError:
            whole = self.attempt(partial(function, batch, 1))
            if isinstance(whole, MemoryEvent):
                raise
            return [whole], [1], None
        found = list(self.of(window, lambda start, size: function(window.cut(start, start + size), size)))
        return [done for _, done in found], [size for size, _ in found], window

    def attempt(
        self, function: Callable[[], _T], window: Window | None = None, size: int | None = None
    ) -> _T | MemoryEvent:
        """Call a function; if memory runs out in it, restore everything and return what happened."""
        versions, is_first = _versions_in(window), not self._knows_what_moves
        before: SavedState | None = None
        try:
            if is_first:  # its copies are freed at the end, since the training needs their memory
                before = self._savepoint.save(is_thorough=True)
            else:
                before = self._to_overwrite = self._savepoint.save(self._to_overwrite, copies_all=False)
            done = function()
            if is_first:
                before.learn_moved()
                self._knows_what_moves = True
        except Exception as error:
            has_moved = _versions_in(window) != versions
            event = resolvable_oom(error, Phase.EVALUATE, size, self._witness, has_moved=has_moved)
            if event is None:
                raise
        else:
            return done
        # The handler has ended: inside it the traceback would still pin the activations.
        if before is not None:
            before.restore()
        self._memory.release()
        if before is not None and (damage := before.damage()):
            raise StateDamagedError(f"memory ran out after {damage_text(damage)}")
        self._on_oom(event)
        return event


def _versions_in(window: Window | None) -> list[int]:
    return [] if window is None else [tensor._version for tensor in window.tensors() if not tensor.is_inference()]
