"""Grows micro-batches when a failure would end the process: from small sizes, and never near the limit.

Pure arithmetic. Other searches find the limit by running into it; this one extrapolates from smaller sizes.
"""

from __future__ import annotations

from autoaccum._sizing.frontier import through

# The fraction of memory left free, since a line through small sizes says little about rounding and fragmentation.
_LEFT_ALONE = 0.15
# The factors to which a line through smaller sizes is trusted, and by which sizes grow if memory does not rise with
# them.
_AT_MOST = 4
_WITHOUT_LINE = 2


class Growth:
    """Chooses micro-batch sizes from the peaks of earlier ones.

    Args:
        most: The largest size of interest.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held_bytes = 0
        self._peaks: dict[int, float] = {}

    def note(self, size: int, *, held_bytes: int, peak_bytes: int) -> None:
        """Record the memory use of a window.

        Args:
            size: Its largest micro-batch.
            held_bytes: Bytes in use when it began.
            peak_bytes: The highest use during it.
        """
        self._held_bytes = held_bytes
        self._peaks[size] = max(peak_bytes, self._peaks.get(size, 0))

    def next_size(self, size: int, limit_bytes: int) -> int:
        """Return the size for the next window, at least the current one.

        Args:
            size: The current size.
            limit_bytes: The highest permitted peak.
        """
        if not self._peaks:
            return size
        # The memory in use counts as the peak of size 0. Until a second size is known, any fixed cost of a window is
        # therefore attributed to its samples.
        line = through({0: self._held_bytes, **self._peaks})
        if line is None:
            larger = size * _WITHOUT_LINE
        else:
            larger = min(line.largest_within(int(limit_bytes * (1.0 - _LEFT_ALONE))), size * _AT_MOST)
        return max(size, min(larger, self._most))
