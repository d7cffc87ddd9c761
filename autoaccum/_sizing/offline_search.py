"""Chooses the next size to try in a search for the largest micro-batch that fits. Pure arithmetic.

Peak memory is nearly linear in the micro-batch size, so two small trials predict the limit. The prediction is tried,
and the bracket around it closed by bisection. A wrong line costs trials, never correctness: the result is always a size
that was itself tried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from autoaccum._records import Trial

# Small enough to fit almost anywhere. Not one sample: BatchNorm cannot train on a single value per channel.
FIRST_SIZE = 2
SECOND_SIZE = 8
# The factor to which a line through small sizes is trusted at all, the factor to which it is trusted fully, and the
# fraction tried of a prediction from farther away: small sizes fit between existing allocations, and so show less
# memory than they take.
MAX_GROWTH = 16
NEAR = 4
FROM_AFAR = 0.7
# Up to this many failures, a failed prediction is assumed to be only slightly too high.
_TOO_HIGH_BY_A_LITTLE = 2
# The factor by which a search without a line grows.
GROWTH_WITHOUT_LINE = 4
# The fraction of the largest fitting size above which other sizes are too close to determine the line.
WELL_BELOW = 0.75
# The search ends when the result is at least this fraction of the largest size that could fit.
PRECISION = 0.97


@dataclass(frozen=True, slots=True)
class Line:
    """Peak memory as a linear function of the micro-batch size."""

    fixed_bytes: float
    bytes_per_sample: float

    def at(self, size: int) -> float:
        """Return the peak at a size."""
        return self.fixed_bytes + self.bytes_per_sample * size

    def largest_within(self, limit_bytes: int) -> int:
        """Return the largest size whose peak is within the limit, at least 0."""
        return max(0, int((limit_bytes - self.fixed_bytes) / self.bytes_per_sample))


def line_through(trials: Sequence[Trial]) -> Line | None:
    """Fit a line to the largest fitting size and one well below it; None if it does not rise.

    Unknown peaks are ignored. A line through sizes close together would show only how the allocator rounds.
    """
    return through({t.size: t.peak_bytes for t in trials if t.fits and t.peak_bytes is not None})


def through(sizes: Mapping[int, float]) -> Line | None:
    """Fit a line to a mapping from size to bytes, as `line_through` does."""
    if len(sizes) < 2:  # noqa: PLR2004 - a line takes two points
        return None
    large = max(sizes)
    well_below = [size for size in sizes if size <= large * WELL_BELOW]
    small = max(well_below) if well_below else min(sizes)
    slope = (sizes[large] - sizes[small]) / (large - small)
    return Line(sizes[small] - slope * small, slope) if slope > 0 else None


def next_size(trials: Sequence[Trial], max_size: int, limit_bytes: int | None) -> int | None:
    """Return the size to try next; None if the result (the largest that fits) is precise enough.

    Args:
        trials: The trials so far.
        max_size: The largest size of interest.
        limit_bytes: The highest permitted peak; None if unknown.
    """
    largest = max((t.size for t in trials if t.fits), default=0)
    smallest_failed = min((t.size for t in trials if not t.fits), default=max_size + 1)
    if not trials:
        return min(FIRST_SIZE, max_size)
    if largest == 0:
        return smallest_failed // 2 or None
    failed = smallest_failed <= max_size
    if largest >= (smallest_failed - 1) * (PRECISION if failed else 1.0):
        return None
    line = line_through(trials)
    predicted = line.largest_within(limit_bytes) if line is not None and limit_bytes is not None else None
    if failed:
        return _within(largest, smallest_failed, predicted, failures=sum(not t.fits for t in trials))
    if predicted is None:
        wanted = SECOND_SIZE if largest < SECOND_SIZE else largest * GROWTH_WITHOUT_LINE
    else:
        is_far = predicted > largest * NEAR and predicted < max_size
        wanted = (
            int(predicted * FROM_AFAR) if is_far else max(_closing(predicted), _step_beyond(predicted, largest, trials))
        )
    return min(max_size, wanted, max(largest * MAX_GROWTH, SECOND_SIZE))


def _step_beyond(predicted: int, largest: int, trials: Sequence[Trial]) -> int:
    """Return the smallest size worth trying: twice the last step further if the line or steps proved too low."""
    *_, third, second = sorted([0, 0] + [trial.size for trial in trials if trial.fits and trial.size < largest])
    is_low = largest > predicted or third > largest * WELL_BELOW
    return largest + 2 * (largest - second) if is_low else _closing(largest)


def _closing(largest: int) -> int:
    """Return the largest size whose failure would end the search."""
    return int(largest / PRECISION) + 1


def _within(largest: int, smallest_failed: int, predicted: int | None, *, failures: int) -> int:
    """Return a size inside the bracket: the predicted one if it lies well inside, else the middle.

    If the prediction itself failed first, it was too high: by a little if it was near, else by more.
    """
    middle = (largest + smallest_failed) // 2
    if predicted is None:
        return middle
    just_below = int(smallest_failed * PRECISION)
    is_near = smallest_failed <= largest * NEAR
    if predicted >= just_below and failures <= _TOO_HIGH_BY_A_LITTLE:
        return max(middle, just_below) if is_near else int(smallest_failed * FROM_AFAR**2)
    near_the_end = largest + max(1, (smallest_failed - largest) // 4)
    return predicted if near_the_end <= predicted <= just_below else middle
