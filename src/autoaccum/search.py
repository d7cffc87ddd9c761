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
    """Fit a line to the two largest sizes that fit; None where it does not rise or peaks are not known."""
    known = sorted({t.size: t.peak_bytes for t in trials if t.fits and t.peak_bytes is not None}.items())[-2:]
    if len(known) < 2:  # noqa: PLR2004 - a line takes two points
        return None
    (small, small_peak), (large, large_peak) = known
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
        return _within(largest, smallest_failed, predicted)
    if predicted is None:
        wanted = SECOND_SIZE if largest < SECOND_SIZE else largest * GROWTH_WITHOUT_LINE
    else:
        wanted = max(predicted, largest + 1)
    return min(max_size, wanted, max(largest * MAX_GROWTH, SECOND_SIZE))


def _within(largest: int, smallest_failed: int, predicted: int | None) -> int:
    """Return a size inside the bracket: the predicted one where it lies well inside, else the middle."""
    middle = (largest + smallest_failed) // 2
    near_the_end = largest + max(1, (smallest_failed - largest) // 4)
    if predicted is None:
        return middle
    return predicted if near_the_end <= predicted < smallest_failed else middle
