"""What is known of the micro-batches that fit, for batches of unlike width. Pure arithmetic.

A micro-batch is a number of samples, and the width of each entry of its batch: the elements of one sample, such as the
tokens of a padded text. One that is no larger in any of these than one that fitted fits as well; one that is no smaller
in any than one that failed does not. Between the two, the bytes that a sample takes are measured for each range of
widths, and extrapolated to the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Widths = tuple[int, ...]
# So many samples in a row have these widths.
Runs = list[tuple[int, Widths]]
# Ranges of widths differ by this factor.
_RANGE = math.sqrt(2.0)
# Memory grows at least in proportion to the width, and at most with its square, as in attention.
_LEAST, _MOST = 1.0, 2.0
# The fraction of a prediction that is tried, by the factor to the largest measured number of samples: small ones fit
# between existing allocations, and so show less memory than they take. Beyond the last, a prediction is not believed.
_BELIEVED = ((2, 1.0), (4, 0.95), (16, 0.7))
# The same where no samples of these widths were measured, but others.
_OF_OTHERS = 0.95
# Fractions of a size that failed although it was predicted to fit: predictions are nearly right, unless memory is
# scarce. After as many failures, what fitted is enough if it is so close to what failed. Else the middle is tried up to
# two times more: from some size on, kernels may take memory that no smaller one has shown, and keep it.
_AFTER_FAILURES = (0.97, 0.75, 0.5)
_CLOSE, _MORE_FAILURES = 0.7, 2
# The fraction of the largest fitting size above which other sizes are too close to determine the line.
_WELL_BELOW = 0.75
# Points are kept as far as none says the same of a larger or smaller one, and not more of them.
_MOST_POINTS = 128


@dataclass(frozen=True, slots=True)
class Line:
    """Memory as a linear function of the number of samples."""

    fixed_bytes: float
    bytes_per_sample: float

    def at(self, size: int) -> float:
        """Return the bytes at a size."""
        return self.fixed_bytes + self.bytes_per_sample * size

    def largest_within(self, limit_bytes: float) -> int:
        """Return the largest size whose bytes are within the limit, at least 0."""
        return max(0, int((limit_bytes - self.fixed_bytes) / self.bytes_per_sample))


def through(sizes: Mapping[int, float]) -> Line | None:
    """Fit a line to the largest of some sizes and one well below it; None if it does not rise.

    A line through sizes close together would show only how the allocator rounds.

    Args:
        sizes: Bytes by number of samples.
    """
    if len(sizes) < 2:  # noqa: PLR2004 - a line takes two points
        return None
    large = max(sizes)
    well_below = [size for size in sizes if size <= large * _WELL_BELOW]
    small = max(well_below) if well_below else min(sizes)
    slope = (sizes[large] - sizes[small]) / (large - small)
    return Line(sizes[small] - slope * small, slope) if slope > 0 else None


class Point(NamedTuple):
    """A micro-batch: its number of samples, and the width of each entry."""

    samples: int
    widths: Widths

    def is_within(self, other: Point) -> bool:
        """Whether it is no larger than another in anything."""
        return self.samples <= other.samples and are_within(self.widths, other.widths)


class _Measured(NamedTuple):
    """The memory of a sample in a range of widths.

    Attributes:
        bytes: What it takes.
        width: How wide it was.
        is_bound: Whether something else was counted with it.
    """

    bytes: float
    width: int
    is_bound: bool


class Frontier:
    """The micro-batches that are known to fit, and those known not to.

    Attributes:
        fits: The largest that have fitted.
        fails: The smallest that have not.
        failures: How often one has not.
        packs: Whether micro-batches take the memory of their tokens, not of their widest sample's. All is then kept as
            tokens of width 1, and widths are the mean of a micro-batch.
    """

    def __init__(self) -> None:
        self.packs = False
        self.fits: list[Point] = []
        self.fails: list[Point] = []
        self.failures = 0
        self._of_widths: dict[Widths, dict[int, int]] = {}  # bytes by samples
        self._of_range: dict[int, _Measured] = {}

    def note(self, samples: int, widths: Widths) -> None:
        """Record a micro-batch that fitted."""
        point = self._kept(samples, widths)
        if not any(map(point.is_within, self.fits)):
            kept = [one for one in self.fits if not one.is_within(point)]
            self.fits = [*kept[-_MOST_POINTS + 1 :], point]
            self.fails = [one for one in self.fails if not one.is_within(point)]

    def measure(self, samples: int, widths: Widths, extra_bytes: int, *, is_bound: bool = False) -> None:
        """Record the memory of a micro-batch.

        Args:
            samples: Its number of samples.
            widths: The elements of a sample, by entry.
            extra_bytes: Its memory beside what was in use before.
            is_bound: Whether new gradients are counted with it, so that it takes less.
        """
        if extra_bytes <= 0:
            return
        samples, widths = self._kept(samples, widths)
        expected = self.expected_bytes(samples, widths)
        is_news = expected is None or extra_bytes < expected
        if not is_bound or (is_news and widths in self._of_widths):
            if widths in self._of_widths or len(self._of_widths) < _MOST_POINTS:
                self._of_widths.setdefault(widths, {})[samples] = extra_bytes
        elif not is_news:
            return
        seen, width = _Measured(extra_bytes / samples, sum(widths), is_bound), sum(widths)
        before = self._of_range.get(_range_of(width))
        if before is None or before.is_bound or (not is_bound and before.bytes < seen.bytes):
            self._of_range[_range_of(width)] = seen

    def fail(self, samples: int, widths: Widths) -> None:
        """Record a micro-batch that ran out of memory."""
        self.failures += 1
        self.exclude(samples, widths)

    def exclude(self, samples: int, widths: Widths) -> None:
        """Record a micro-batch that is too large, as others have shown."""
        point = self._kept(samples, widths)
        self.fits = [one for one in self.fits if not point.is_within(one)]  # there was more memory then
        if not any(one.is_within(point) for one in self.fails):
            kept = [one for one in self.fails if not point.is_within(one)]
            self.fails = [*kept[-_MOST_POINTS + 1 :], point]

    def forgive(self) -> None:
        """Forget what has failed: another process may have held the memory."""
        self.fails.clear()
        self.failures = 0

    def forget(self) -> None:
        """Forget everything: it was found by another run."""
        self.forgive()
        self.fits.clear()
        self._of_widths.clear()
        self._of_range.clear()

    def begin_anew(self, *, packs: bool) -> None:
        """Forget everything: micro-batches turn out to be packed, or not to be."""
        self.forget()
        self.packs = packs

    def _kept(self, samples: int, widths: Widths) -> Point:
        """Return what is kept of a micro-batch."""
        return Point(samples * sum(widths), (1,)) if self.packs else Point(samples, widths)

    def surely(self, widths: Widths) -> int:
        """Return the most samples of these widths that are known to fit; 0 if none are."""
        each, widths = self._kept(1, widths)
        return max((one.samples for one in self.fits if are_within(widths, one.widths)), default=0) // each

    def too_many(self, widths: Widths) -> int | None:
        """Return the fewest samples of these widths that are known not to fit; None if none are."""
        each, widths = self._kept(1, widths)
        fewest = min((one.samples for one in self.fails if are_within(one.widths, widths)), default=None)
        return None if fewest is None else -(-fewest // each)

    def is_enough(self, widths: Widths) -> bool:
        """Whether the search for more samples of these widths has failed often enough for what it can still gain."""
        is_close = self.surely(widths) >= _CLOSE * (self.too_many(widths) or 0)
        return self.failures >= len(_AFTER_FAILURES) + (0 if is_close else _MORE_FAILURES)

    def sizes(self, widths: Widths) -> list[int]:
        """Return of how many samples of these widths the memory was measured, in order."""
        each, widths = self._kept(1, widths)
        return sorted({max(1, one // each) for one in self._of_widths.get(widths, ())})

    def is_measured(self, widths: Widths) -> bool:
        """Whether the memory of samples about as wide was measured."""
        _, widths = self._kept(1, widths)
        return widths in self._of_widths or _range_of(sum(widths)) in self._of_range

    def line(self, widths: Widths) -> Line | None:
        """The memory of micro-batches of these widths; None if it is not known, or does not rise."""
        each, widths = self._kept(1, widths)
        line = through(self._of_widths.get(widths, {}))
        return None if line is None else Line(line.fixed_bytes, line.bytes_per_sample * each)

    def expected_bytes(self, samples: int, widths: Widths) -> float | None:
        """Return the memory that a micro-batch should take; None if nothing was measured."""
        samples, widths = self._kept(samples, widths)
        line = self.line(widths)
        if line is not None:
            return max(0.0, line.at(samples))
        each = self._bytes_of_sample(widths, with_bounds=False)
        return None if each is None else each * samples

    def largest(self, widths: Widths, free_bytes: float, most: int, *, first: int = 2) -> int:
        """Return the most samples of these widths that fit, as far as is known; at least 1.

        Args:
            widths: The elements of a sample, by entry.
            free_bytes: Bytes that a micro-batch may take.
            most: The most samples of interest.
            first: The samples to begin with where nothing is known.
        """
        sure = self.surely(widths)
        failed = self.too_many(widths)
        each, kept = self._kept(1, widths)
        size = self._predicted(kept, free_bytes)
        size = size if size is None else size // each
        if failed is None:
            size = first if size is None else size
        elif size is None:
            size = min(first, failed // 4)  # nothing has fitted yet
        elif size >= failed:
            if sure and self.is_enough(widths):
                size = sure
            elif sure and self.failures >= len(_AFTER_FAILURES):
                size = (sure + failed) // 2
            elif _BELIEVED[1][0] * max(self.sizes(widths), default=failed) < failed:
                size = math.isqrt(self.sizes(widths)[-1] * failed)  # memory does not follow the line so far
            else:
                size = int(failed * _AFTER_FAILURES[min(self.failures or 1, 3) - 1])
        else:
            size = min(size, int(failed * _AFTER_FAILURES[0]))
        return max(1, min(max(sure, size), most))

    def _predicted(self, widths: Widths, free_bytes: float) -> int | None:
        """Return how many samples of these widths should fit, by their memory; None if none was measured."""
        seen = self._of_widths.get(widths, {})
        line = through(seen)
        if line is not None:
            predicted = line.largest_within(free_bytes)
        elif (each := self._bytes_of_sample(widths)) is not None:
            if not seen:
                return int(_OF_OTHERS * free_bytes / each)
            predicted = int(free_bytes / each)
        else:
            return None
        measured = max(seen)
        near = next((part for factor, part in _BELIEVED if predicted <= factor * measured), _BELIEVED[-1][1])
        return min(int(near * predicted), _BELIEVED[-1][0] * measured)

    def _bytes_of_sample(self, widths: Widths, *, with_bounds: bool = True) -> float | None:
        """Return the bytes that a sample takes: those of the nearest range, by the slope to the next."""
        seen = self._of_widths.get(widths)
        if seen:
            return seen[max(seen)] / max(seen)
        ranges = [one for one in self._of_range.values() if with_bounds or not one.is_bound]
        if not ranges:
            return None
        width = sum(widths)
        nearest, *others = sorted(ranges, key=lambda one: abs(math.log(one.width / width)))
        is_beyond = width > max(one.width for one in ranges)
        if is_beyond or not others:
            exponent = _MOST if width > nearest.width else _LEAST
        else:  # ranges differ in width
            slope = math.log(others[0].bytes / nearest.bytes) / math.log(others[0].width / nearest.width)
            exponent = min(_MOST, max(_LEAST, slope))
        return float(nearest.bytes * (width / nearest.width) ** exponent)

    # --- to be kept ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, list[list[int]]]:
        """Return what is known as JSON values, for `of_state`."""
        found: dict[str, list[list[int]]] = {"packs": [[1]]} if self.packs else {}
        bytes_of = [
            [extra, samples, *widths]
            for widths, sizes in self._of_widths.items()
            for samples, extra in sorted(sizes.items())[-2:]
        ]
        found |= {"fits": _flat(self.fits), "fails": _flat(self.fails), "bytes": bytes_of}
        return {name: rows for name, rows in found.items() if rows}

    @classmethod
    def of_state(cls, state: object) -> Frontier:
        """Return what a state says; values that no training can have found are left out."""
        frontier = cls()
        if isinstance(state, dict):
            frontier.packs = state.get("packs") == [[1]]
            frontier.fits = [Point(samples, tuple(widths)) for samples, *widths in _rows(state.get("fits"))]
            frontier.fails = [Point(samples, tuple(widths)) for samples, *widths in _rows(state.get("fails"))]
            for extra, *point in _rows(state.get("bytes")):
                if len(point) > 1:
                    frontier.measure(point[0], tuple(point[1:]), extra)
        return frontier


def are_within(widths: Widths, others: Widths) -> bool:
    """Whether samples are no wider than others in any entry."""
    return len(widths) == len(others) and all(map(int.__le__, widths, others))


def joined_widths(widths: Widths, others: Widths) -> Widths:
    """Return the widths of a micro-batch that has samples of both."""
    return tuple(map(max, widths, others)) if len(widths) == len(others) else max(widths, others, key=sum)


def widths_between(runs: Runs, start: int, stop: int) -> Widths:
    """Return the widths of a micro-batch from sample `start` to `stop` (exclusive)."""
    found: Widths = ()
    for samples, widths in runs:
        if start < samples and stop > 0:
            found = joined_widths(found, widths) if found else widths
        start, stop = start - samples, stop - samples
    return found or runs[-1][1]


def mean_widths_between(runs: Runs, start: int, stop: int) -> Widths:
    """Return the mean width of samples `start` to `stop` (exclusive), at least 1, as the widths of a micro-batch."""
    elements = taken = 0
    for samples, widths in runs:
        here = max(0, min(stop, samples) - max(start, 0))
        elements, taken = elements + here * sum(widths), taken + here
        start, stop = start - samples, stop - samples
    return (max(1, elements // max(taken, 1)),)


def _range_of(width: int) -> int:
    return round(math.log(max(width, 1), _RANGE))


def _flat(points: Iterable[Point]) -> list[list[int]]:
    return [[point.samples, *point.widths] for point in points]


def _rows(found: object) -> list[list[int]]:
    """Return the rows of a state that are some positive numbers, none of which exceeds what a machine counts."""
    rows: Sequence[object] = found[: 2 * _MOST_POINTS] if isinstance(found, list) else []
    return [
        row
        for row in rows
        if isinstance(row, list) and len(row) > 1 and all(type(one) is int and 0 < one < 1 << 62 for one in row)
    ]
