"""Shrinks micro-batches after a failure and grows them back later.

A size that failed is retried after a number of windows that doubles with each of its failures. A process that shared
the GPU for a while does not reduce speed forever, and a size that never fits costs about twenty micro-batches in ten
thousand windows.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from autoaccum._sizing.frontier import are_within
from autoaccum._sizing.planner import GROWTH_AFTER_FAILURE, shrink

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from autoaccum._sizing.frontier import Widths

# A failure costs a micro-batch or a window, so at this interval it costs a few percent at most.
FIRST_WAIT_WINDOWS = 32
# At this interval a size that fails every time costs at most one window in five hundred, and a neighbour that exits is
# noticed after as many. With an interval eight times as long, the simulation of neighbours that come and go at random
# (tests/sizing/test_backoff.py) keeps 0.46 to 0.71 of the best throughput instead of 0.66 to 0.80.
LONGEST_WAIT_WINDOWS = 512
# Seconds before a sample that failed alone is tried again: a neighbour's peak is over, or its process ends.
WAITS_S = (0.0, 0.2, 0.8)
# Widths whose failures are remembered.
_MOST_WIDTHS = 128
# Windows between two growths: enough to show that the larger size fits.
CLEAN_WINDOWS = 4


def wait_for_memory(tries: int, *, may_wait: bool) -> bool:
    """Wait before a sample that has failed alone is tried again; return whether it is worth it.

    Something else may have taken the memory for a moment: another process, or garbage that is not collected yet.

    Args:
        tries: How often it has failed before.
        may_wait: Whether single samples have fitted before. Otherwise it is tried once more, at once.
    """
    waits_s = WAITS_S if may_wait else WAITS_S[:1]
    if tries >= len(waits_s):
        return False
    time.sleep(waits_s[tries])
    return True


class Backoff:
    """Tracks the largest micro-batch to use.

    Args:
        target_batch: Samples in a window, which sizes are chosen to cut evenly.
        largest: The initial size, and the maximum.

    Attributes:
        size: The size to use now.
    """

    def __init__(self, target_batch: int, largest: int) -> None:
        self.size = largest
        self._target_batch = target_batch
        self._largest = largest
        self._window = 0
        self._waits: dict[int, int] = {}  # by failed size: windows until it is retried
        self._due: dict[int, int] = {}  # by failed size: the window from which it may be retried
        self._since = 0  # the window of the last failure, growth or refusal to grow

    @property
    def is_quiet(self) -> bool:
        """Whether the size stays as it is, unless it fails."""
        return self.size == self._largest and not self._waits

    def fail(self, size: int, growth: float = GROWTH_AFTER_FAILURE) -> int | None:
        """Record that `size` ran out of memory; return the size to use now, or None if there is none smaller.

        The number of micro-batches grows as in `shrink`.
        """
        self._waits[size] = min(2 * self._waits.get(size, FIRST_WAIT_WINDOWS // 2), LONGEST_WAIT_WINDOWS)
        self._due[size] = self._window + self._waits[size]
        self._since = self._window
        smaller = shrink(self._target_batch, size, growth)
        if smaller is not None:
            self.size = min(self.size, smaller)
        return smaller

    def succeed(self) -> int | None:
        """Record a window without failures; return a larger size if it is time to try one, else None.

        The caller checks whether memory suffices for it, and calls `grow` or `stay`.
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
        """Switch to another size."""
        self.size = size
        self._since = self._window

    def stay(self) -> None:
        """Keep the size for as long as after a failure, since memory does not suffice for a larger one."""
        self._since = self._window
        self._due[self._next_larger() or self.size] = self._window + FIRST_WAIT_WINDOWS

    def _next_larger(self) -> int | None:
        """Return the size that saves one micro-batch, or the largest."""
        if self.size >= self._largest:
            return None
        steps = -(-self._target_batch // self.size)
        return self._largest if steps == 1 else min(self._largest, -(-self._target_batch // (steps - 1)))

    def _forgive(self) -> None:
        """Forget failures of sizes that have since fitted for as long as they had to wait."""
        held = self._window - self._since
        for size in [size for size, wait in self._waits.items() if size <= self.size and held >= wait]:
            del self._waits[size], self._due[size]


class Backoffs:
    """The backoffs of all that has failed, by the widths of its samples.

    What fails limits samples that are at least as wide: a wide batch does not make narrow micro-batches smaller.
    """

    def __init__(self) -> None:
        self._by_widths: dict[Widths, Backoff] = {}

    def __len__(self) -> int:
        return len(self._by_widths)

    def clear(self) -> None:
        """Forget all failures."""
        self._by_widths.clear()

    def limit(self, widths: Widths, most: int) -> int:
        """Return the most samples of these widths to use now, at most `most`."""
        return min([most, *(one.size for failed, one in self._by_widths.items() if are_within(failed, widths))])

    def fail(
        self,
        widths: Widths,
        size: int,
        *,
        target_batch: int,
        largest: int,
        growth: float = GROWTH_AFTER_FAILURE,
    ) -> bool:
        """Record that so many samples ran out of memory; return whether there is a smaller size."""
        if widths not in self._by_widths:
            self.begin(widths, target_batch, max(size, largest))
        return self._by_widths[widths].fail(size, growth) is not None

    def begin(self, widths: Widths, target_batch: int, largest: int) -> Backoff:
        """Return a new backoff of samples of these widths."""
        if len(self._by_widths) == _MOST_WIDTHS:
            del self._by_widths[next(iter(self._by_widths))]
        self._by_widths[widths] = backoff = Backoff(target_batch, largest)
        return backoff

    def succeed(self, present: Iterable[Widths]) -> Iterator[tuple[Widths, Backoff, int]]:
        """Record a window without failures; yield backoffs for which it is time to try a larger size, and that size."""
        present = set(present)
        for failed, backoff in list(self._by_widths.items()):
            if any(are_within(failed, widths) for widths in present):
                larger = backoff.succeed()
                if larger is not None:
                    yield failed, backoff, larger
                if backoff.is_quiet:
                    del self._by_widths[failed]
