"""Shrinks micro-batches after a failure and grows them back later. Pure arithmetic, no torch.

A size that failed is tried again after a number of windows that doubles with each of its failures. So a process that
used the same card for a while does not cost speed forever, and a size that never fits costs some twenty micro-batches
in ten thousand windows.
"""

from __future__ import annotations

from autoaccum._sizing.planner import shrink

# A failure costs a micro-batch or a window, so that at this interval it costs at most some percent.
FIRST_WAIT_WINDOWS = 32
# From then on a size that fails every time costs at most one window in five hundred, and a neighbour that leaves is
# noticed after as many. With eight times as long, the simulation with neighbours that come and go at random
# (tests/sizing/test_backoff.py) keeps 0.46 to 0.71 of the best throughput instead of 0.66 to 0.80.
LONGEST_WAIT_WINDOWS = 512
# Between one growth and the next: long enough to see the larger size hold.
CLEAN_WINDOWS = 4


class Backoff:
    """The largest micro-batch to use, window by window.

    Args:
        target_batch: Samples in a window; sizes are chosen so that they cut it evenly.
        largest: The size to begin with, and never to go beyond.

    Attributes:
        size: The size to use now.
    """

    def __init__(self, target_batch: int, largest: int) -> None:
        self.size = largest
        self._target_batch = target_batch
        self._largest = largest
        self._window = 0
        self._waits: dict[int, int] = {}  # by size that failed: windows before it is tried again
        self._due: dict[int, int] = {}  # by size that failed: the window at which that time is over
        self._since = 0  # the window of the last failure, growth or refusal to grow

    @property
    def is_troubled(self) -> bool:
        """Whether memory ran out, or a larger size was taken, not long ago."""
        return bool(self._waits) and self._window - self._since < FIRST_WAIT_WINDOWS

    def fail(self, size: int) -> int | None:
        """Note that `size` ran out of memory; return the size to use now, None where there is none smaller."""
        self._waits[size] = min(2 * self._waits.get(size, FIRST_WAIT_WINDOWS // 2), LONGEST_WAIT_WINDOWS)
        self._due[size] = self._window + self._waits[size]
        self._since = self._window
        smaller = shrink(self._target_batch, size)
        if smaller is not None:
            self.size = min(self.size, smaller)
        return smaller

    def succeed(self) -> int | None:
        """Note a clean window; return a larger size where it is time to try one, else None.

        The caller decides whether there is memory for it, and calls `grow` or `stay`.
        """
        self._window += 1
        if self.size == self._largest and not self._waits:
            return None
        self._forgive()
        larger = self._next_larger()
        if larger is None or self._window - self._since < CLEAN_WINDOWS:
            return None
        waiting = any(size <= larger and due > self._window for size, due in self._due.items())
        return None if waiting else larger

    def grow(self, size: int) -> None:
        """Use another size from now on."""
        self.size = size
        self._since = self._window

    def stay(self) -> None:
        """Keep the size for as long as after a failure: there was no memory for a larger one."""
        self._since = self._window
        self._due[self._next_larger() or self.size] = self._window + FIRST_WAIT_WINDOWS

    def _next_larger(self) -> int | None:
        """Return the size that saves one micro-step, or the largest."""
        if self.size >= self._largest:
            return None
        steps = -(-self._target_batch // self.size)
        return self._largest if steps == 1 else min(self._largest, -(-self._target_batch // (steps - 1)))

    def _forgive(self) -> None:
        """Forget failures of sizes that have held for as long as they had to wait."""
        held = self._window - self._since
        for size in [size for size, wait in self._waits.items() if size <= self.size and held >= wait]:
            del self._waits[size], self._due[size]
