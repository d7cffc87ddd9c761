"""Grows micro-batches where a failure would end the process: from small sizes, and never near the limit.

Pure arithmetic. Other searches find the limit by running into it; this one extrapolates from smaller sizes.
"""

from __future__ import annotations

from autoaccum._sizing.offline_search import through

# Of the memory there is, so much is left alone: a line through small sizes says little of rounding and fragments.
_LEFT_ALONE = 0.15
# How far a line through smaller sizes is trusted, and by how much sizes grow where memory does not rise with them.
_AT_MOST = 4
_WITHOUT_LINE = 2


class Growth:
    """Chooses micro-batch sizes from the peaks of those before.

    Args:
        most: No size above this is wanted.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held_bytes = 0
        self._peaks: dict[int, float] = {}

    def note(self, size: int, *, held_bytes: int, peak_bytes: int) -> None:
        """Note what a window has shown.

        Args:
            size: Its largest micro-batch.
            held_bytes: What was held when it began.
            peak_bytes: The most that was held while it was worked on.
        """
        self._held_bytes = held_bytes
        self._peaks[size] = max(peak_bytes, self._peaks.get(size, 0))

    def next_size(self, size: int, limit_bytes: int) -> int:
        """Return the size for the next window, at least the present one.

        Args:
            size: The present size.
            limit_bytes: What a peak may reach.
        """
        if not self._peaks:
            return size
        # What is held counts as the peak of no sample at all. Whatever comes once a window, whatever its size, then
        # counts as a sample's too, until a second size is known.
        line = through({0: self._held_bytes, **self._peaks})
        if line is None:
            larger = size * _WITHOUT_LINE
        else:
            larger = min(line.largest_within(int(limit_bytes * (1.0 - _LEFT_ALONE))), size * _AT_MOST)
        return max(size, min(larger, self._most))
