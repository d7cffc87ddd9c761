"""Finds the micro-batch with the fastest updates by timing whole windows while training goes on.

Pure arithmetic, no torch. Nothing is measured apart: whole windows are run in the cuts that are to be compared, and
how long each took is noted. Every cut gives the same gradient, so a window in a slow cut costs time and nothing else.

The search begins with the largest size and goes down by halves until windows clearly take longer. Then it halves the
gaps between sizes that were run, wherever the sizes around a gap promise something better inside, and in the end
runs the closest few once more. Where two are equally fast, the smaller one needs less memory and is chosen.
"""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The constants are from the simulations in tests/sizing/test_autotune.py, whose curves and noise are described there.

# The first window of a size may be slower (compilation, allocation, autotuning): it alone says nothing.
WINDOWS_TO_JUDGE = 2
# The largest size is run first and more often, which costs nothing but the time the search takes: if its windows after
# the first differ by more than this part, the clock is restless, and every size is run once more before it is judged.
WINDOWS_OF_THE_FIRST = 4
RESTLESS = 0.02
# The closest are run this often, one after another, so that one that was lucky or unlucky once does not decide.
WINDOWS_TO_DECIDE = 4
WINDOWS_TO_DECIDE_WHEN_RESTLESS = 6
CLOSEST = 3
# Windows after which the search ends whatever it has found.
MOST_WINDOWS = 30
# Going down ends where windows take this much longer twice in a row, or so much longer that what each micro-batch
# costs by itself must be the reason, which only gets worse.
SLOWER = 1.1
MUCH_SLOWER = 1.3
# Each size is at most half the one before, and this many reach one sample from any size.
SIZES_GOING_DOWN = 8
# A gap is worth two windows where a size in it could save more than this part of the time.
WORTH_A_LOOK = 0.01
# Sizes nearer to one another than this say how the clock shakes, and nothing about the slope of the curve.
WELL_APART = 1.3
EQUALLY_FAST = 1.02
CLOSE = 1.05

_NOTHING: Mapping[int, float] = MappingProxyType({})


class Autotune:
    """The micro-batch that makes updates fastest, from one window to the next.

    What holds, by simulation with a first window of each size that takes half as long again on average
    (tests/sizing/test_autotune.py): where a sample's cost changes smoothly with the size, and a window always takes
    what it took before, the size has at least 97 % of the throughput of the best even cut: in all of 2000 runs, in 16
    windows on average and never more than 30. Where the cost jumps, in 99 %; the others are jumps far below sizes that
    were already slower. Where windows take 3 % longer at random and each tenth 30 %: in 99 %, and 94 % with jumps.
    Where each fifth takes 50 % longer and the others 6 %: 97 %, and 89 %. The windows in slower cuts take, all
    together, as long as one or two windows with the largest size on average, and as eight at worst.

    It does not notice that the device becomes another one while it searches, or afterwards.

    Args:
        target_batch: Samples in a window; sizes are chosen so that they cut it evenly.
        largest: The largest size that fits, at least 1.
        known: What `seconds` said in an earlier search in the same training, so that those sizes are not run again:
            after a resumption, or where `largest` has become another.

    Attributes:
        size: The micro-batch with which the next window should be cut.
        is_settled: Whether that is the answer.
    """

    def __init__(self, target_batch: int, largest: int, *, known: Mapping[int, float] = _NOTHING) -> None:
        self._sizes = list(_even_sizes(target_batch, largest))
        self._target_batch = target_batch
        self._windows = {size: [taken] * WINDOWS_TO_DECIDE for size, taken in known.items() if size in self._sizes}
        self._left = MOST_WINDOWS
        self.size = self._sizes[0]
        self.is_settled = False
        self._choose()

    @property
    def _is_restless(self) -> bool:
        """Whether windows of one and the same size take different times."""
        later = self._windows.get(self._sizes[0], [])[1:WINDOWS_OF_THE_FIRST]
        return bool(later) and max(later) > min(later) * (1 + RESTLESS)

    def _enough_to_judge(self, size: int) -> int:
        if size == self._sizes[0]:
            return WINDOWS_OF_THE_FIRST
        return WINDOWS_TO_JUDGE + self._is_restless

    @property
    def _enough_to_decide(self) -> int:
        return WINDOWS_TO_DECIDE_WHEN_RESTLESS if self._is_restless else WINDOWS_TO_DECIDE

    @property
    def seconds(self) -> Mapping[int, float]:
        """The least seconds that a window took for each unit of work, by size; sizes that were run often enough."""
        return {size: min(taken) for size, taken in self._windows.items() if len(taken) >= self._enough_to_judge(size)}

    def note(self, elapsed_s: float, work: float = 1.0) -> None:
        """Note how long the window took that was cut with `size`; nothing changes any more once it is settled.

        Args:
            elapsed_s: Seconds, the device waited for.
            work: How much data the window held, in any unit, where that differs from window to window.
        """
        assert elapsed_s >= 0
        assert work > 0
        if self.is_settled:
            return
        self._windows.setdefault(self.size, []).append(elapsed_s / work)
        self._left -= 1
        self._choose()

    def _choose(self) -> None:
        """Choose the size of the next window, or settle."""
        wanted = self._next() if len(self._sizes) > 1 and self._left > 0 else None
        if wanted is not None:
            self.size = wanted
            return
        self.is_settled = True
        times = self.seconds
        if times:  # none where there was nothing to choose between
            closest = self._closest(times)
            enough = min(times[size] for size in closest) * EQUALLY_FAST
            self.size = min(size for size in closest if times[size] <= enough)

    def _next(self) -> int | None:
        """Return a size to run because it is not judged yet, promises something or is among the closest; else None."""
        times = self.seconds
        if self.size in self._windows and self.size not in times:
            return self.size
        if not times:
            return self._sizes[0]
        closest = self._closest(times)
        needed = {size: max(0, self._enough_to_decide - len(self._windows[size])) for size in closest}
        kept = sum(needed.values()) if len(closest) > 1 else 0
        if self._left >= kept + self._enough_to_judge(self._sizes[-1]):
            wanted = self._further_down(times) or self._between(times)
            if wanted is not None:
                return wanted
        if len(closest) == 1:
            return None
        least_run = max(closest, key=lambda size: needed[size])
        return least_run if needed[least_run] > 0 else None

    def _going_down(self) -> Iterator[int]:
        factor = max(2.0, self._sizes[0] ** (1 / (SIZES_GOING_DOWN - 1)))
        size = self._sizes[0]
        yield size
        while size > self._sizes[-1]:
            size = next((other for other in self._sizes if other <= size / factor), self._sizes[-1])
            yield size

    def _further_down(self, times: Mapping[int, float]) -> int | None:
        """Return the next size on the way down, None where it is not worth going on."""
        best, slower = float("inf"), 0
        for size in self._going_down():
            if size not in times:
                return size
            slower = slower + 1 if times[size] > best * SLOWER else 0
            if slower > 1 or times[size] > best * MUCH_SLOWER:
                return None
            best = min(best, times[size])
        return None

    def _between(self, times: Mapping[int, float]) -> int | None:
        """Return the middle of the gap that promises most, None where none promises enough."""
        run = sorted(times)
        enough = min(times.values()) * (1 - WORTH_A_LOOK)
        for _, left, right in sorted((self._promise(times, *gap), *gap) for gap in pairwise(run)):
            inside = [size for size in self._sizes if left < size < right]
            if inside and self._promise(times, left, right) < enough:
                return min(inside, key=lambda size: abs(size * size - left * right))
        return None

    def _promise(self, times: Mapping[int, float], left: int, right: int) -> float:
        """Return the least seconds that a size between two others might take: if each step less goes on saving.

        The left size and the next one well to its left show what a step costs. This is the fixed cost of a
        micro-step, and what makes large sizes slower may well begin just before the right size: so at best the line
        goes on all the way. Without a size further left a step is all that costs time, which is looked at only
        beside the quickest size.
        """
        steps = {size: -(-self._target_batch // size) for size in times}
        if left > min(times):
            other = max((size for size in times if size * WELL_APART <= left), default=min(times))
            slope = (times[other] - times[left]) / (steps[other] - steps[left])
        elif min(times[left], times[right]) == min(times.values()):
            slope = times[left] / steps[left]
        else:
            slope = 0.0
        return min(times[left], times[right], times[left] - slope * (steps[left] - steps[right]))

    def _closest(self, times: Mapping[int, float]) -> list[int]:
        """Return the quickest few, and the smallest of those that are as quick as the quickest."""
        best = min(times.values())
        quickest = sorted((size for size in times if times[size] <= best * CLOSE), key=lambda size: times[size])
        smallest = min(size for size in quickest if times[size] <= best * EQUALLY_FAST)
        return [smallest, *[size for size in quickest if size != smallest][: CLOSEST - 1]]


def _even_sizes(target_batch: int, largest: int) -> Iterator[int]:
    """Yield the micro-batch sizes of all even cuts, the largest first; of those with one size only the shortest cut."""
    size = min(largest, target_batch)
    while size:
        size = -(-target_batch // -(-target_batch // size))
        yield size
        size -= 1
