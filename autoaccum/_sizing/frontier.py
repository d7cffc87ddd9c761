"""What is known of the micro-batches that fit, for batches of unlike width. Pure arithmetic.

A micro-batch is a number of samples, and the width of each entry of its batch: the elements of one sample, such as the
tokens of a padded text. One that is no larger in any of these than one that fitted fits as well; one that is no smaller
in any than one that failed does not. Between the two, the bytes that a sample takes are measured for each range of
widths, and extrapolated to the others.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from autoaccum._sizing.offline_search import through

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Widths = tuple[int, ...]
# Ranges of widths differ by this factor.
_RANGE = math.sqrt(2.0)
# The fraction of a prediction that is tried; all of it where as wide a micro-batch of at least half as many samples was
# measured, until so many have failed.
_CERTAIN, _NEAR, _MOST_FAILURES = 0.95, 2, 3
# Memory grows at least in proportion to the width, and at most with its square, as in attention.
_LEAST, _MOST = 1.0, 2.0
# The factor from the largest measured number of samples up to which a prediction is believed.
_FARTHEST = 16
# Points are kept as far as none says the same of a larger or smaller one, and not more of them.
_MOST_POINTS = 128


class Point(NamedTuple):
    """A micro-batch: its number of samples, and the width of each entry."""

    samples: int
    widths: Widths

    def is_within(self, other: Point) -> bool:
        """Whether it is no larger than another in anything."""
        return self.samples <= other.samples and _are_within(self.widths, other.widths)


class Frontier:
    """The micro-batches of one batch structure that are known to fit, and those known not to.

    Attributes:
        fits: The largest that have fitted.
        fails: The smallest that have not.
    """

    def __init__(self) -> None:
        self.fits: list[Point] = []
        self.fails: list[Point] = []
        self._failures = 0
        self._of_widths: dict[Widths, dict[int, int]] = {}  # bytes by samples
        self._of_range: dict[int, tuple[float, int]] = {}  # the most bytes of a sample, and its width

    def note(self, samples: int, widths: Widths, extra_bytes: int | None = None) -> None:
        """Record a micro-batch that fitted.

        Args:
            samples: Its number of samples.
            widths: The elements of a sample, by entry.
            extra_bytes: Its memory beside what was in use before; None if that is not known.
        """
        point = Point(samples, widths)
        if not any(map(point.is_within, self.fits)):
            kept = [one for one in self.fits if not one.is_within(point)]
            self.fits = [*kept[-_MOST_POINTS + 1 :], point]
            self.fails = [one for one in self.fails if not one.is_within(point)]
        if extra_bytes is None or extra_bytes <= 0:
            return
        if widths in self._of_widths or len(self._of_widths) < _MOST_POINTS:
            self._of_widths.setdefault(widths, {})[samples] = extra_bytes
        width = sum(widths)
        within = _range_of(width)
        self._of_range[within] = max(self._of_range.get(within, (0.0, 0)), (extra_bytes / samples, width))

    def fail(self, samples: int, widths: Widths) -> None:
        """Record a micro-batch that ran out of memory."""
        self._failures += 1
        point = Point(samples, widths)
        self.fits = [one for one in self.fits if not point.is_within(one)]  # there was more memory then
        if not any(one.is_within(point) for one in self.fails):
            kept = [one for one in self.fails if not point.is_within(one)]
            self.fails = [*kept[-_MOST_POINTS + 1 :], point]

    def forgive(self) -> None:
        """Forget what has failed: another process may have held the memory."""
        self.fails.clear()

    def surely(self, widths: Widths) -> int:
        """Return the most samples of these widths that are known to fit; 0 if none are."""
        return max((one.samples for one in self.fits if _are_within(widths, one.widths)), default=0)

    def is_measured(self, widths: Widths) -> bool:
        """Whether the memory of samples about as wide was measured."""
        return widths in self._of_widths or _range_of(sum(widths)) in self._of_range

    def largest(self, widths: Widths, free_bytes: int, most: int, *, first: int = 2) -> int:
        """Return the most samples of these widths that fit, as far as is known; at least 1.

        Args:
            widths: The elements of a sample, by entry.
            free_bytes: Bytes that a micro-batch may take.
            most: The most samples of interest.
            first: The samples to begin with where nothing is known.
        """
        sure = self.surely(widths)
        too_many = min((one.samples for one in self.fails if _are_within(one.widths, widths)), default=most + 1)
        predicted = self._predicted(widths, free_bytes)
        size = max(sure, min(first if predicted is None else predicted, too_many - 1))
        return max(1, min(size, most))

    def _predicted(self, widths: Widths, free_bytes: int) -> int | None:
        """Return how many samples of these widths should fit, by their memory; None if none was measured."""
        seen = self._of_widths.get(widths, {})
        line = through(seen)
        if line is not None:
            predicted = min(line.largest_within(free_bytes), _FARTHEST * max(seen))
        elif (each := self._bytes_of_sample(sum(widths))) is not None:
            predicted = int(free_bytes / each)
        else:
            return None
        is_near = bool(seen) and predicted <= _NEAR * max(seen) and self._failures < _MOST_FAILURES
        return predicted if is_near else int(_CERTAIN * predicted)

    def _bytes_of_sample(self, width: int) -> float | None:
        """Return the bytes that a sample of this width takes: those of the nearest range, by the slope to the next."""
        if not self._of_range:
            return None
        nearest, *others = sorted(self._of_range.values(), key=lambda seen: abs(math.log(seen[1] / width)))
        each, there = nearest
        is_beyond = width > max(seen[1] for seen in self._of_range.values())
        if is_beyond or not others:
            exponent = _MOST if width > there else _LEAST
        else:
            next_each, next_there = others[0]
            slope = math.log(next_each / each) / math.log(next_there / there) if next_there != there else _MOST
            exponent = min(_MOST, max(_LEAST, slope))
        return float(each * (width / there) ** exponent)

    # --- to be kept ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, list[list[int]]]:
        """Return the points as JSON values, for `of_state`."""
        return {"fits": _flat(self.fits), "fails": _flat(self.fails)}

    @classmethod
    def of_state(cls, state: object) -> Frontier:
        """Return what a state says; values that no training can have found are left out."""
        frontier = cls()
        if isinstance(state, dict):
            frontier.fits, frontier.fails = _points(state.get("fits")), _points(state.get("fails"))
        return frontier


def _are_within(widths: Widths, others: Widths) -> bool:
    return len(widths) == len(others) and all(map(int.__le__, widths, others))


def _range_of(width: int) -> int:
    return round(math.log(max(width, 1), _RANGE))


def _flat(points: Iterable[Point]) -> list[list[int]]:
    return [[point.samples, *point.widths] for point in points]


def _points(found: object) -> list[Point]:
    rows: Sequence[object] = found[:_MOST_POINTS] if isinstance(found, list) else []
    return [
        Point(row[0], tuple(row[1:]))
        for row in rows
        if isinstance(row, list) and row and all(type(one) is int and one > 0 for one in row)
    ]
