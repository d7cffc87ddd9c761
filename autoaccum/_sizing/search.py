"""Finds the largest micro-batches that fit, in the first windows of a training or by trials before it. Pure arithmetic.

Any cut gives the same gradient, so the first windows of a run serve as trials. They begin with a few samples. The
memory that those take gives a size that must fit if memory is linear in the size and not negative at 0, so a few
micro-batches lead to the largest cut that fits. A size that only might fit is tried first in a window, where a failure
costs nothing else. What is found was itself tried, with gradients in place.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from autoaccum._sizing.frontier import Point

if TYPE_CHECKING:
    from collections.abc import Iterable

    from autoaccum._sizing.frontier import Frontier, Widths

# Small enough to fit almost anywhere. Not one sample: BatchNorm cannot train on a single value per channel. In a window
# of many samples the first micro-batch may be larger, as long as it is a negligible part.
_FIRST = 2
_MOST_FIRST = 8
_PART_OF_WINDOW = 32
# The factor by which sizes grow within a window, where a failure costs what was computed before it.
_GROWTH = 4
# The same where a failure is not clean.
_CAREFUL_GROWTH = 2
# Trials end when the result is at least this fraction of the largest size that could fit.
_PRECISION = 0.97
# The same after the most failures: each trial of a convolutional net leaves memory in oneDNN, so less may fit by now.
_ENOUGH = 0.9
# The factor to a prediction that is tried under a soft limit, to have measured sizes on both sides of it.
_ABOVE = 1.2
# The factor to the predicted answer under a soft limit that must not fit; the limit tolerates half of that.
_CHECKED = 1.06
# The search is repeated if this many times the size found by an earlier run surely fits.
_MUCH_MORE = 1.5
# The fraction of the free memory of which a failed size is tried again.
_MUCH_LESS = 0.5
# Windows and failures after which the search ends with its current result.
_MOST_WINDOWS = 8
_MOST_FAILURES = 3
# If failures are clean, sizes are tried up to this factor above the memory that is free. Under a soft limit, plans of
# fewer micro-batches are tried that are predicted to be further above it, from sizes that may be much smaller.
_TOLERANCE, _SOFT_TOLERANCE = 1.03, 1.08
# If they are not, one sample in so many is left out, since peaks of resident memory are less than what was allocated.
_MARGIN = 34


class Search:
    """Finds the largest cut that fits.

    Args:
        frontier: What an earlier run has found, or nothing. Follows what is found.
        begins_with: The size to begin with in the first window, which has fitted before; None begins small.
        fails_cleanly: Whether sizes slightly above the predicted limit may be tried.
        is_soft: Whether trials run through above the limit, too.

    Attributes:
        frontier: As the argument.
        is_done: Whether the search has ended.
        failed_trials: How often memory ran out in it.
    """

    def __init__(
        self,
        frontier: Frontier,
        *,
        begins_with: int | None = None,
        fails_cleanly: bool = True,
        is_soft: bool = False,
    ) -> None:
        self.frontier = frontier
        self.is_done = False
        self.failed_trials = 0
        self._begins_with = begins_with
        self._has_tried_again = False
        self._is_soft = is_soft
        self._check = 0
        self._is_uneven = False  # memory has steps, so that predictions between measured sizes say little
        self._fails_cleanly = fails_cleanly
        self._leaves_margin = not (fails_cleanly or is_soft)
        self._growth = _GROWTH if fails_cleanly else _CAREFUL_GROWTH
        self._windows = 0
        self._first: Point | None = None  # of this window
        self._last = 0
        self._rest = 0  # the samples that it was cut from
        self._gradient_bytes = 0

    # --- trials -------------------------------------------------------------------------------------------------------

    def next_trial(self, widths: Widths, most: int, free_bytes: int | None) -> int | None:
        """Return the size to try next; None if the largest that fitted is precise enough, or the only one.

        Args:
            widths: The widths of the samples.
            most: The largest size of interest.
            free_bytes: Bytes that a micro-batch may take; None if that is not known.
        """
        frontier = self.frontier
        sure, too_many = frontier.surely(widths), frontier.too_many(widths)
        if self._begins_with is not None and not self.is_done:
            return self._begins_with
        if not sure:
            return min(_FIRST, most) if too_many is None else too_many // 2 or None
        if self.is_done or sure >= most or (too_many is not None and sure >= self._precision * (too_many - 1)):
            return None
        sizes = frontier.sizes(widths)
        is_known = free_bytes is not None and bool(sizes) and sure >= _MOST_FIRST
        size = self._less(frontier.largest(widths, free_bytes or 0, most), widths, most) if is_known else sure
        if too_many in sizes and not self._is_uneven:
            # It ran above a soft limit: between two sizes that were measured, predictions are exact if memory is even.
            self._check = int(_CHECKED * sure) + 1
            return size if sure < _PRECISION * size else self._check if self._check < too_many else None
        if too_many is not None:
            size = self._between(sure, too_many, size if is_known else None)
        elif not is_known:
            size = max(_GROWTH * sure, _MOST_FIRST)
        else:
            size = self._above(sure, size, widths, free_bytes or 0)
        return min(most, size) or None

    @property
    def _precision(self) -> float:
        return _PRECISION if self.frontier.failures < _MOST_FAILURES else _ENOUGH

    def _above(self, sure: int, predicted: int, widths: Widths, free_bytes: int) -> int:
        """Return a size above the largest that fits, where none is known not to fit; 0 for none."""
        if self._is_soft and predicted <= _GROWTH * sure:
            return int(_ABOVE * predicted) + 1  # what is above the limit is measured too
        if predicted > sure:
            return _closing(predicted) if predicted <= _GROWTH * sure and not self._leaves_margin else predicted
        if self._leaves_margin:
            return 0
        sizes, line = self.frontier.sizes(widths), self.frontier.line(widths)
        if line is not None and line.largest_within(free_bytes) >= sure:
            return _closing(sure)
        # More fits than the memory seems to have: twice the last step further.
        return max(_closing(sure), sure + 2 * (sure - (sizes[-2] if len(sizes) > 1 else 0)))

    def tried(self, size: int, widths: Widths, extra_bytes: int | None, *, fits: bool) -> None:
        """Record a trial, which may have been measured also where it ran above a soft limit."""
        confirms = self._begins_with is not None
        if fits:
            self.frontier.note(size, widths)
            self.is_done = confirms
            self._is_uneven = self._is_uneven or size == self._check
        elif confirms:  # what an earlier run has measured does not hold any more
            self.frontier.forget()
            self._begins_with = None
        if extra_bytes is not None:
            self.frontier.measure(size, widths, max(1, extra_bytes))
        if not fits:
            self.frontier.fail(size, widths)

    def _between(self, sure: int, too_many: int, predicted: int | None) -> int:
        """Return a size between one that fits and one that does not: as predicted, or one that could end the search."""
        if predicted is not None and self.frontier.failures < _MOST_FAILURES and not self._is_uneven:
            if sure + max(1, (too_many - sure) // _GROWTH) <= predicted < too_many:
                return predicted
            if predicted <= _closing(sure) < too_many:
                return _closing(sure)
        return (sure + too_many) // 2 if too_many <= _GROWTH * sure else max(sure + 1, math.isqrt(sure * too_many))

    # --- windows ------------------------------------------------------------------------------------------------------

    def next_size(self, rest: int, widths: Widths, free_bytes: int, *, is_first: bool) -> int:
        """Return the size of the next micro-batch."""
        if is_first:
            self._rest = rest
        small = max(_FIRST, min(_MOST_FIRST, rest // _PART_OF_WINDOW))
        if self._begins_with is not None:
            known = self.frontier.surely(widths) or self._largest(widths, rest, free_bytes, first=small)
            size = min(self._begins_with, known)
        elif is_first and not self._windows:
            size = self.frontier.largest(widths, 0, small) if self.failed_trials else small
        else:
            size = self._largest(widths, rest, free_bytes, is_beside=not is_first, first=small)
            if not self._windows:
                size = min(size, self._growth * self._last)
        if self._windows or self._begins_with is not None:
            size = -(-rest // -(-rest // max(size, 1)))  # evenly, as planned
        first = self._first
        if first is not None and self._windows and first.widths == widths and size < first.samples - 1 and size < rest:
            self.frontier.exclude(*first)  # together with gradients it could not be tried
        size = min(max(size, min(_FIRST, self.frontier.largest(widths, free_bytes, rest))), rest)
        if rest - size == 1 and size > 1:  # BatchNorm cannot train on the one that is left
            return rest if size == _FIRST and not self.failed_trials else size - 1
        return size

    def note(
        self, size: int, widths: Widths, extra_bytes: int | None, *, is_first: bool, is_whole: bool, gradient_bytes: int
    ) -> None:
        """Record a micro-batch that fitted.

        Args:
            size: Its number of samples.
            widths: Their widths.
            extra_bytes: Its memory in addition to what was in use before; None if not measured.
            is_first: Whether it was the first of its window, which allocates the gradients.
            is_whole: Whether it was the whole window.
            gradient_bytes: Bytes of the gradients.
        """
        self._gradient_bytes, self._last = gradient_bytes, size
        if extra_bytes is not None:
            self.frontier.measure(size, widths, extra_bytes, is_bound=is_first)
        if is_first:
            self._first = Point(size, widths)
        if is_whole or not is_first:
            self.frontier.note(size, widths)
        first = self._first
        if first is not None and not is_first and first == (size + 1, widths) and self._is_of_even_cut(first.samples):
            self.frontier.note(*first)

    def _is_of_even_cut(self, first: int) -> bool:
        """Whether a micro-batch with one sample less is the second of an even cut, whose larger ones come first."""
        steps = -(-self._rest // first)
        return steps > 1 and first > -(-(self._rest - first) // (steps - 1))

    def fail(self, size: int, widths: Widths) -> bool:
        """Record a micro-batch that ran out of memory; return whether there is a smaller one."""
        if 1 < size <= 2 * _FIRST and not self._has_tried_again and not self.frontier.is_measured(widths):
            # With so few samples, something else probably took the memory for a moment.
            self._has_tried_again = True
            return True
        if self._begins_with is not None:  # what an earlier run has measured does not hold any more
            self._begins_with = None
            self.frontier.forget()
        self.failed_trials += 1
        self.frontier.fail(size, widths)
        self._first = None
        return size > 1

    def end_window(self, groups: Iterable[tuple[int, Widths]], free_bytes: int, *, most: int | None = None) -> None:
        """Record the end of a window; the optimizer's state exists from the first one on.

        Args:
            groups: The samples of the window that can be joined, with the widths of their widest.
            free_bytes: Bytes free between two windows, while no gradients exist.
            most: The most samples allowed in a micro-batch; None for no cap.
        """
        self._windows += 1
        confirms, self._begins_with, self._first = self._begins_with, None, None
        if self._windows == 1 and all(self._seems_to_fit(one, free_bytes) for one in self.frontier.fails):
            self.frontier.forgive()  # something else probably took the memory for a moment
        wanted = [
            (Point(samples, widths), self._largest(widths, min(samples, most or samples), free_bytes))
            for samples, widths in groups
        ]
        if confirms is not None:
            # Less memory may have been free when the earlier size was found.
            known = [max(confirms, self.frontier.surely(group.widths)) for group, _ in wanted]
            if all(size <= _MUCH_MORE * before for (_, size), before in zip(wanted, known, strict=True)):
                self.is_done = True
                return
        if self._windows == 1:
            self.frontier.fits.clear()  # they fitted before the optimizer's state existed
        is_proven = all(
            -(-group.samples // max(self.frontier.surely(group.widths), 1)) <= -(-group.samples // size)
            for group, size in wanted
        )
        are_enough = self.failed_trials >= _MOST_FAILURES and all(
            self.frontier.surely(group.widths) > 0 and self.frontier.is_enough(group.widths) for group, _ in wanted
        )
        self.is_done = self._windows > 1 and (is_proven or are_enough or self._windows >= _MOST_WINDOWS)

    def _seems_to_fit(self, failed: Point, free_bytes: int) -> bool:
        """Whether a micro-batch has failed that takes much less than is free, by all that was measured."""
        expected = self.frontier.expected_bytes(*failed)
        return expected is not None and expected <= _MUCH_LESS * (free_bytes - self._gradient_bytes)

    def _less(self, size: int, widths: Widths, most: int) -> int:
        """Return a predicted size, less the margin where there is one."""
        if not self._leaves_margin or size >= most:
            return size
        return max(self.frontier.surely(widths), size - size // _MARGIN)

    def _largest(
        self, widths: Widths, most: int, free_bytes: int, *, is_beside: bool = False, first: int = _FIRST
    ) -> int:
        """Return the largest size that may fit beside the gradients, which exist already if `is_beside`."""
        free: float = free_bytes if is_beside else free_bytes - self._gradient_bytes
        if self._is_soft and self._windows:
            free *= _SOFT_TOLERANCE
        elif self._fails_cleanly and not is_beside:  # within a window a failure costs what it computed
            free *= _TOLERANCE
        size = self.frontier.largest(widths, max(0.0, free), most, first=first)
        size = self._less(size, widths, most)
        sizes = self.frontier.sizes(widths)
        one_more = sizes[0] + 1 if len(sizes) == 1 and sizes[0] <= _MOST_FIRST else 0
        if size < one_more <= most and one_more < (self.frontier.too_many(widths) or most + 1):
            return one_more  # for few samples, fixed costs may dominate; one more shows
        return size


def _closing(largest: int) -> int:
    """Return the largest size whose failure would end the search."""
    return int(largest / _PRECISION) + 1
