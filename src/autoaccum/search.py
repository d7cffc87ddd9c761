"""Which size to try next: the trials so far in, a size out. Pure arithmetic.

Peak memory is nearly a line over the micro-batch, so two small trials predict where the limit lies; the prediction is
tried, and the bracket around it closed by bisection. A line that is wrong costs trials, never correctness: only a size
that was itself tried is ever answered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum.records import Trial

# Small enough to fit almost anywhere. Not one sample: BatchNorm refuses to train on a single value a channel.
FIRST_SIZE = 2
SECOND_SIZE = 8
# How far a line through small sizes is trusted, and by how much a search without a line grows.
MAX_GROWTH = 16
GROWTH_WITHOUT_LINE = 4
# At most this part of the largest size that fits: what is nearer says nothing about the line.
WELL_BELOW = 0.75
# The bracket is closed when it is narrower than this part of the answer.
PRECISION = 0.03


@dataclass(frozen=True, slots=True)
class Line:
    """Peak memory as a line over the micro-batch."""

    fixed_bytes: float
    bytes_per_sample: float

    def largest_within(self, limit_bytes: int) -> int:
        """Return the largest size whose peak is within the limit; at least 0."""
        return max(0, int((limit_bytes - self.fixed_bytes) / self.bytes_per_sample))


def line_through(trials: Sequence[Trial]) -> Line | None:
    """Fit a line to the largest size that fits and one well below it; None where it does not rise.

    Peaks that are not known do not count. Through neighbours the line would tell how the allocator rounds.
    """
    known = sorted({t.size: t.peak_bytes for t in trials if t.fits and t.peak_bytes is not None}.items())
    if len(known) < 2:  # noqa: PLR2004 - a line takes two points
        return None
    large, large_peak = known[-1]
    well_below = [point for point in known if point[0] <= large * WELL_BELOW]
    small, small_peak = well_below[-1] if well_below else known[0]
    slope = (large_peak - small_peak) / (large - small)
    return Line(small_peak - slope * small, slope) if slope > 0 else None


def next_size(trials: Sequence[Trial], max_size: int, limit_bytes: int | None) -> int | None:
    """Return the size to try next, or None when the answer (the largest that fits) is near enough.

    Args:
        trials: What was tried so far.
        max_size: No size above this is wanted.
        limit_bytes: What the peak may reach; None if unknown.
    """
    largest = max((t.size for t in trials if t.fits), default=0)
    smallest_failed = min((t.size for t in trials if not t.fits), default=max_size + 1)
    if not trials:
        return min(FIRST_SIZE, max_size)
    if largest == 0:
        return smallest_failed // 2 or None
    failed = smallest_failed <= max_size
    if smallest_failed - largest <= (max(1, int(largest * PRECISION)) if failed else 1):
        return None
    line = line_through(trials)
    predicted = line.largest_within(limit_bytes) if line is not None and limit_bytes is not None else None
    if failed:
        return _within(largest, smallest_failed, predicted, failures=sum(not t.fits for t in trials))
    if predicted is None:
        wanted = SECOND_SIZE if largest < SECOND_SIZE else largest * GROWTH_WITHOUT_LINE
    else:
        wanted = max(predicted, largest + _step_beyond(predicted, largest, trials))
    return min(max_size, wanted, max(largest * MAX_GROWTH, SECOND_SIZE))


def _step_beyond(predicted: int, largest: int, trials: Sequence[Trial]) -> int:
    """Return how far to go at least beyond the largest size that fits.

    A little where the prediction led there, to close the bracket. Where the line proved too low, or prediction after
    prediction gains only a little, twice as far as the last time.
    """
    *_, third, second = sorted([0, 0] + [trial.size for trial in trials if trial.fits and trial.size < largest])
    if second < predicted and third <= largest * WELL_BELOW:
        return max(1, int(largest * PRECISION))
    return 2 * (largest - second)


def _within(largest: int, smallest_failed: int, predicted: int | None, *, failures: int) -> int:
    """Return a size inside the bracket: the predicted one where it lies well inside, else the middle.

    Where the prediction itself was the first to fail it was too high by a little: then a little below that.
    """
    middle = (largest + smallest_failed) // 2
    if predicted is None:
        return middle
    if predicted >= smallest_failed and failures == 1:
        return max(middle, smallest_failed - max(1, int(smallest_failed * PRECISION)))
    near_the_end = largest + max(1, (smallest_failed - largest) // 4)
    return predicted if near_the_end <= predicted < smallest_failed else middle
