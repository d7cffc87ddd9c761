"""Learns the largest micro-batch that fits from the first windows of a training. Pure arithmetic.

Any cut gives the same gradient, so the first windows of a run serve as trials. They begin with a few samples. The
memory that those take gives a size that must fit if memory is linear in the size and not negative at 0, so a few
micro-batches lead to the largest cut that fits. A size that only might fit is tried first in a window, where a failure
costs nothing else. The result was itself tried, with gradients in place.
"""

from __future__ import annotations

from typing import NamedTuple

from autoaccum._sizing.offline_search import MAX_GROWTH, Line, through

# Small enough to fit almost anywhere. Not one sample: BatchNorm cannot train on a single value per channel. In a window
# of many samples the first micro-batch may be larger, as long as it is a negligible part.
_FIRST = 2
_MOST_FIRST = 8
_PART_OF_WINDOW = 32
# The search is repeated if this many times the size found by an earlier run surely fits.
_MUCH_MORE = 1.5
# Windows and failures after which the search ends with its current result.
_MOST_WINDOWS = 8
_MOST_FAILURES = 3
# If failures are clean, sizes up to this factor above the predicted limit are tried.
_TOLERANCE = 1.03
# Where a failure is not clean, a size is at most this many times one that was measured.
_CAREFUL_GROWTH = 2
# If a failure could cost the whole window, one part in this many of the predicted limit is left free.
_MARGIN = 20
# Fractions of a failed size to try next: predictions are nearly right, unless memory is scarce.
_AFTER_FAILURES = (0.97, 0.75, 0.5)


class _Seen(NamedTuple):
    """The memory of a micro-batch in addition to what was in use before it, including earlier gradients."""

    size: int
    bytes: int


class OnlineSearch:
    """Finds the largest cut that fits.

    Args:
        most: The most samples that could be in one micro-batch; only its even cuts are of interest.
        begins_with: An initial size that is known to have fitted before; None begins small.
        fitted_before: The largest size known to have fitted before.
        line: The memory of a micro-batch then, in addition to what was in use.
        fails_cleanly: Whether sizes slightly above the predicted limit may be tried.
        is_even: Whether windows can be cut into equal parts, so that one that could not be tried beside gradients in a
            window cannot be in the next. Samples of unlike length are cut into parts that differ.

    Attributes:
        largest: The largest size proven to fit; 0 before there is one.
        is_done: Whether the search has ended.
    """

    def __init__(
        self,
        most: int,
        *,
        begins_with: int | None = None,
        fitted_before: int = 0,
        line: Line | None = None,
        fails_cleanly: bool = True,
        is_even: bool = True,
    ) -> None:
        self.largest = 0
        self.is_done = False
        self._most = most
        small = max(_FIRST, min(_MOST_FIRST, most // _PART_OF_WINDOW))
        # Cut evenly, as the plan from the earlier size was.
        self._next_first = small if begins_with is None else -(-most // -(-most // min(most, begins_with)))
        self._falls_back_to = most
        self._confirms = begins_with is not None
        self._has_tried_again = False
        self._fitted_before = fitted_before
        self._tolerance = _TOLERANCE if fails_cleanly else 1.0
        self._growth = MAX_GROWTH if fails_cleanly else _CAREFUL_GROWTH
        self._is_even = is_even
        self._known = line
        self._seen: dict[_Seen, None] = {}  # each once, newest last: a window may have thousands of micro-batches
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
        """The size that has proved to fit, in case no further window follows."""
        return self.largest or self._falls_back_to

    @property
    def has_failed(self) -> bool:
        """Whether any size ran out of memory."""
        return self._failures > 0

    @property
    def line(self) -> Line | None:
        """The memory of a micro-batch in addition to what is in use; None if unknown or not rising with the size."""
        seen, first = {one.size: one.bytes for one in self._seen}, self._first
        line = through(seen)
        if line is not None and first is not None and first.size > max(seen) and 0 < first.bytes < line.at(first.size):
            # Small sizes may include a kernel's first-time cost, if a large one with all its gradients took less.
            line = through(seen | {first.size: first.bytes}) or Line(0.0, first.bytes / first.size)
        return line or self._known

    def expected_bytes(self, size: int) -> int:
        """Return the predicted memory of a micro-batch in addition to what is in use; 0 if there is no prediction."""
        line = self.line
        return 0 if line is None else max(0, int(line.at(size)))

    def next_size(self, rest: int, free_bytes: int, *, is_first: bool) -> int:
        """Return the size of the next micro-batch.

        Args:
            rest: Samples of the window that remain.
            free_bytes: Bytes free now.
            is_first: Whether the micro-batch is the first of its window.
        """
        if self._confirms:
            size = -(-rest // -(-rest // self._next_first))  # evenly, as planned
        else:
            size = self._next_first if is_first else self._surely_fits(free_bytes)
        size = min(max(min(size, self._cap), _FIRST), self._smallest_failed - 1, rest)
        if rest - size == 1 and size > 1:  # BatchNorm cannot train on the one that is left
            return rest if size == _FIRST and rest < self._smallest_failed else size - 1
        return size

    def note(self, size: int, extra_bytes: int | None, *, is_first: bool, is_whole: bool, gradient_bytes: int) -> None:
        """Record a micro-batch that fitted.

        Args:
            size: Its number of samples.
            extra_bytes: Its memory in addition to what was in use before; None if not measured.
            is_first: Whether it was the first of its window, which allocates the gradients.
            is_whole: Whether it was the whole window.
            gradient_bytes: Bytes of the gradients.
        """
        self._gradient_bytes = gradient_bytes
        if self._failures:
            self._cap = max(self._cap, (size + self._smallest_failed) // 2)
        seen = None if extra_bytes is None else _Seen(size, extra_bytes)
        if is_first:
            self._first, self._first_size = seen, size
        elif seen is not None:
            self._seen.pop(seen, None)
            self._seen[seen] = None
        if is_whole:
            self.largest = max(self.largest, size)
        elif not is_first:
            self.largest = max(self.largest, self._first_size if self._is_second_of_even_cut(size) else size)

    def fail(self, size: int) -> int | None:
        """Record a micro-batch that ran out of memory; return the largest size to try now, None if there is none."""
        self._known = None  # it was only an earlier run's
        if size > 1 and size <= 2 * _FIRST and not self._has_tried_again and not self._seen:
            # With so few samples, something else probably took the memory for a moment.
            self._has_tried_again = True
            return size
        self._smallest_failed = min(self._smallest_failed, size)
        self._seen = {seen: None for seen in self._seen if seen.size < size}
        if size <= self.largest:
            # Less memory is left than when it fitted, so smaller sizes that fitted then prove nothing either.
            self.largest = 0
        part = _AFTER_FAILURES[min(self._failures, len(_AFTER_FAILURES) - 1)]
        if self._first is None and not self._seen and not self._confirms:
            part = 1 / 4  # nothing has fitted yet
        self._failures += 1
        self._cap = max(self.largest, int(size * part), 1)
        self._next_first = min(self._next_first, self._cap, self._falls_back_to)
        self._confirms = False
        return None if size == 1 else self._cap

    def end_window(self, free_bytes: int) -> None:
        """Record the end of a window; the optimizer's state exists from the first one on.

        Args:
            free_bytes: Bytes free between two windows, while no gradients exist.
        """
        self._windows += 1
        beside_gradients = free_bytes - self._gradient_bytes
        # Less memory may have been free when the earlier size was found.
        more = self._surely_fits(beside_gradients) > _MUCH_MORE * max(self.largest, self._fitted_before)
        confirmed = self._confirms and self.largest >= self._next_first and (not more or self.largest == self._most)
        if self.largest > 0 and (confirmed or self._windows >= _MOST_WINDOWS):
            self.is_done = True
            return
        proven = self.largest
        if self._windows == 1:
            # It fitted before the optimizer's state existed.
            if self._surely_fits(beside_gradients, of_window=False) < proven < self._most:
                proven = self._surely_fits(beside_gradients, of_window=False)
            self.largest = 0
        steps = -(-self._most // max(proven, 1))
        sure = min(self._surely_fits(beside_gradients, of_window=False), self._most)
        larger = max(-(-self._most // max(steps - 1, 1)), -(-self._most // -(-self._most // sure)))
        if self._is_even and self._first_size > proven:
            self._too_large = min(self._too_large, self._first_size)  # together with gradients it could not be tried
        is_tried = larger > self._cap or larger >= self._too_large or self._failures >= _MOST_FAILURES
        # An even cut into as many steps: a larger size would have no benefit.
        self._falls_back_to = self._next_first = min(max(proven, 1), -(-self._most // steps))
        if proven < larger and not is_tried and self._may_fit(larger, beside_gradients):
            self._next_first = larger
        else:
            self.is_done = self._windows > 1 and self.largest > 0
        self._confirms = False

    # --- which size ---------------------------------------------------------------------------------------------------

    def _surely_fits(self, free_bytes: int, *, of_window: bool = True) -> int:
        """Return a size for a micro-batch that is not the first of its window."""
        line = self.line
        fits = [self.largest if of_window else 1]
        if of_window and self._first is not None:
            # The first one's memory included the gradients, so another one of its size takes no more.
            expected = self._first.bytes if line is None else min(self._first.bytes, line.at(self._first.size))
            fits.append(self._first.size if expected <= free_bytes else 1)
        fitting = [seen for seen in (*self._seen, self._first) if seen is not None and seen.bytes <= free_bytes]
        if fitting:
            fits.append(_through_zero(max(fitting), free_bytes, self._growth))
        if line is not None:
            largest = max(self._seen).size if self._seen else self.largest
            within = line.largest_within(free_bytes)
            fits.append(min(within - within // _MARGIN, 2 * largest))
        elif self._seen and max(self._seen).size <= _MOST_FIRST:
            fits.append(max(self._seen).size + 1)  # for few samples, fixed costs may dominate; one more shows
        return max(fits)

    def _is_second_of_even_cut(self, size: int) -> bool:
        """Whether the micro-batch after the window's first is as large as in an even cut, or one sample less."""
        steps = -(-self._most // self._first_size)
        is_even = self._first_size == -(-self._most // steps)
        return is_even and steps > 1 and self._first_size > size >= -(-(self._most - self._first_size) // (steps - 1))

    def _may_fit(self, size: int, free_bytes: int) -> bool:
        line = self.line
        return line is None or line.at(size) <= free_bytes * self._tolerance


def _through_zero(seen: _Seen, free_bytes: int, growth: int) -> int:
    """Return a size that surely fits if memory is linear in the size and at least 0 at size 0, and `seen` fits."""
    most = growth * seen.size
    return most if seen.bytes <= 0 else min(most, free_bytes * seen.size // seen.bytes)
