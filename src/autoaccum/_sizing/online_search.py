"""Learns the largest micro-batch that fits from the first windows of a training. Pure arithmetic.

Any cut gives the same gradient, so the first windows of a run can be the trials. They begin with a few samples; from
what those took comes a size that must fit if memory is a line over the size that does not fall below zero, and so in a
few micro-batches the largest cut that fits. A size that only may fit is tried as the first of a window, where a failure
costs nothing but itself; and what is answered was itself tried, with the gradients of others in place.
"""

from __future__ import annotations

from typing import NamedTuple

from autoaccum._sizing.offline_search import MAX_GROWTH, Line, through

# Small enough to fit almost anywhere. Not one sample: BatchNorm refuses to train on a single value a channel. And where
# a window holds many, as many as make no difference to it.
_FIRST = 2
_MOST_FIRST = 8
_PART_OF_WINDOW = 32
# By how much more than an earlier run has found must surely fit for the search to begin again.
_MUCH_MORE = 1.5
# Windows and failures after which what has been found is taken.
_MOST_WINDOWS = 8
_MOST_FAILURES = 3
# What may fail cleanly is tried up to so far beyond what is predicted to fit.
_TOLERANCE = 1.03
# And where a failure could cost the whole window, one part in so many of what is predicted to fit is left free.
_MARGIN = 20
# How much of a size that failed is tried next: predictions are nearly right, and where they are not, memory is little.
_AFTER_FAILURES = (0.97, 0.75, 0.5)


class _Seen(NamedTuple):
    """What a micro-batch took beyond what was held, the gradients of others included in what was held."""

    size: int
    bytes: int


class OnlineSearch:
    """Learns the largest cut that fits.

    Args:
        most: The most samples that could be in one micro-batch; the cuts of interest are its even ones.
        begins_with: A size that is known to have fitted before, with which to begin; None begins small.
        fitted_before: The largest size of which that is known.
        line: What a micro-batch took then, beyond what was held.
        fails_cleanly: Whether what is not quite predicted to fit may be tried all the same.

    Attributes:
        largest: The largest size that fits for sure; 0 where there is none yet.
        is_done: Whether there is nothing to be learned any more.
    """

    def __init__(
        self,
        most: int,
        *,
        begins_with: int | None = None,
        fitted_before: int = 0,
        line: Line | None = None,
        fails_cleanly: bool = True,
    ) -> None:
        self.largest = 0
        self.is_done = False
        self._most = most
        small = max(_FIRST, min(_MOST_FIRST, most // _PART_OF_WINDOW))
        # Evenly, as it was planned from the size that was found.
        self._next_first = small if begins_with is None else -(-most // -(-most // min(most, begins_with)))
        self._falls_back_to = most
        self._confirms = begins_with is not None
        self._has_tried_again = False
        self._fitted_before = fitted_before
        self._tolerance = _TOLERANCE if fails_cleanly else 1.0
        self._known = line
        self._seen: list[_Seen] = []
        self._smallest_failed = most + 1
        self._too_large = most + 1
        self._cap = most
        self._failures = 0
        self._windows = 0
        self._first: _Seen | None = None  # of this window
        self._first_size = 0
        self._gradient_bytes = 0

    @property
    def so_far(self) -> int:
        """The size that has shown itself to fit, should there be no further window."""
        return self.largest or self._falls_back_to

    @property
    def has_failed(self) -> bool:
        """Whether any size ran out of memory."""
        return self._failures > 0

    @property
    def line(self) -> Line | None:
        """What a micro-batch takes beyond what is held, over its size; None where it is not known or does not rise."""
        seen, first = {one.size: one.bytes for one in self._seen}, self._first
        line = through(seen)
        if line is not None and first is not None and first.size > max(seen) and first.bytes < line.at(first.size):
            # What small ones took may have been a kernel's first time; a large one with all its gradients took less.
            line = through(seen | {first.size: first.bytes}) or Line(0.0, first.bytes / first.size)
        return line or self._known

    def expected_bytes(self, size: int) -> int:
        """Return what a micro-batch will take beyond what is held, as far as can be said; else 0."""
        line = self.line
        return 0 if line is None else max(0, int(line.at(size)))

    def next_size(self, rest: int, free_bytes: int, *, is_first: bool) -> int:
        """Return the size of the next micro-batch.

        Args:
            rest: Samples of the window that are not done.
            free_bytes: What is free now.
            is_first: Whether it is the first of its window.
        """
        if self._confirms:
            size = -(-rest // -(-rest // self._next_first))  # evenly, as it was planned
        else:
            size = self._next_first if is_first else self._surely_fits(free_bytes)
        size = min(max(min(size, self._cap), _FIRST), self._smallest_failed - 1, rest)
        if rest - size == 1 and size > 1:  # BatchNorm would refuse the one that is left alone
            return rest if size == _FIRST and rest < self._smallest_failed else size - 1
        return size

    def note(self, size: int, extra_bytes: int | None, *, is_first: bool, is_whole: bool, gradient_bytes: int) -> None:
        """Note a micro-batch that fitted.

        Args:
            size: Its samples.
            extra_bytes: What it took beyond what was held before; None where it is not counted.
            is_first: Whether it was the first of its window, so that it made the gradients.
            is_whole: Whether it was the whole window.
            gradient_bytes: What the gradients take.
        """
        self._gradient_bytes = gradient_bytes
        if self._failures:
            self._cap = max(self._cap, (size + self._smallest_failed) // 2)
        seen = None if extra_bytes is None else _Seen(size, extra_bytes)
        if is_first:
            self._first, self._first_size = seen, size
        elif seen is not None:
            self._seen.append(seen)
        if is_whole:
            self.largest = max(self.largest, size)
        elif not is_first:
            self.largest = max(self.largest, self._first_size if self._is_second_of_even_cut(size) else size)

    def fail(self, size: int) -> int | None:
        """Note a micro-batch that ran out of memory; return the most that may be tried now, None where nothing is."""
        self._known = None  # what was true of an earlier run
        if size > 1 and size <= 2 * _FIRST and not self._has_tried_again and not self._seen:
            # So few samples: rather something else took the memory for a moment.
            self._has_tried_again = True
            return size
        self._smallest_failed = min(self._smallest_failed, size)
        self._seen = [seen for seen in self._seen if seen.size < size]
        self.largest = min(self.largest, size - 1)
        part = _AFTER_FAILURES[min(self._failures, len(_AFTER_FAILURES) - 1)]
        if self._first is None and not self._seen and not self._confirms:
            part = 1 / 4  # nothing has fitted yet
        self._failures += 1
        self._cap = max(self.largest, int(size * part), 1)
        self._next_first = min(self._next_first, self._cap, self._falls_back_to)
        self._confirms = False
        return None if size == 1 else self._cap

    def end_window(self, free_bytes: int) -> None:
        """Note that a window is done; the optimizer's state exists from the first one on.

        Args:
            free_bytes: What is free between two windows, when no gradient is there.
        """
        self._windows += 1
        beside_gradients = free_bytes - self._gradient_bytes
        # There may have been less memory when it was found than there is now.
        more = self._surely_fits(beside_gradients) > _MUCH_MORE * max(self.largest, self._fitted_before)
        confirmed = self._confirms and self.largest >= self._next_first and (not more or self.largest == self._most)
        if self.largest > 0 and (confirmed or self._windows >= _MOST_WINDOWS):
            self.is_done = True
            return
        proven = self.largest
        if self._windows == 1:
            # It fitted when the optimizer's state was not there yet.
            if self._surely_fits(beside_gradients, of_window=False) < proven < self._most:
                proven = self._surely_fits(beside_gradients, of_window=False)
            self.largest = 0
        steps = -(-self._most // max(proven, 1))
        sure = min(self._surely_fits(beside_gradients, of_window=False), self._most)
        larger = max(-(-self._most // max(steps - 1, 1)), -(-self._most // -(-self._most // sure)))
        if self._first_size > proven:
            self._too_large = min(self._too_large, self._first_size)  # beside gradients it could not be tried
        is_tried = larger > self._cap or larger >= self._too_large or self._failures >= _MOST_FAILURES
        # An even cut into as many steps: nothing larger is of use.
        self._falls_back_to = self._next_first = min(max(proven, 1), -(-self._most // steps))
        if proven < larger and not is_tried and self._may_fit(larger, beside_gradients):
            self._next_first = larger
        else:
            self.is_done = self._windows > 1 and self.largest > 0
        self._confirms = False

    # --- which size ---------------------------------------------------------------------------------------------------

    def _surely_fits(self, free_bytes: int, *, of_window: bool = True) -> int:
        """Return a size for a micro-batch that others stand before."""
        line = self.line
        fits = [self.largest if of_window else 1]
        if of_window and self._first is not None:
            # It had to hold the gradients that it made, so that one more like it takes no more than it did.
            expected = self._first.bytes if line is None else min(self._first.bytes, line.at(self._first.size))
            fits.append(self._first.size if expected <= free_bytes else 1)
        fitting = [seen for seen in (*self._seen, self._first) if seen is not None and seen.bytes <= free_bytes]
        if fitting:
            fits.append(_through_zero(max(fitting), free_bytes))
        if line is not None:
            largest = max(self._seen).size if self._seen else self.largest
            within = line.largest_within(free_bytes)
            fits.append(min(within - within // _MARGIN, 2 * largest))
        elif self._seen and max(self._seen).size <= _MOST_FIRST:
            fits.append(max(self._seen).size + 1)  # of few, much may be what is the same for all sizes; one more tells
        return max(fits)

    def _is_second_of_even_cut(self, size: int) -> bool:
        """Whether what follows the window's first micro-batch is as large as in an even cut: it may be one less."""
        steps = -(-self._most // self._first_size)
        is_even = self._first_size == -(-self._most // steps)
        return is_even and steps > 1 and self._first_size > size >= -(-(self._most - self._first_size) // (steps - 1))

    def _may_fit(self, size: int, free_bytes: int) -> bool:
        line = self.line
        return line is None or line.at(size) <= free_bytes * self._tolerance


def _through_zero(seen: _Seen, free_bytes: int) -> int:
    """Return what fits for sure if what a micro-batch takes is a line that begins at 0 or above, and this one fits."""
    most = MAX_GROWTH * seen.size
    return most if seen.bytes <= 0 else min(most, free_bytes * seen.size // seen.bytes)
