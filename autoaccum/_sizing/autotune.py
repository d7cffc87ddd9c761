"""Finds the micro-batch with the fastest updates by timing whole windows during training.

Pure arithmetic, no torch. There are no separate measurements: training windows are run with the cuts to compare, and
timed. Every cut gives the same gradient, so a window with a slow cut costs only time.

The search starts at the largest size and halves it until windows clearly take longer. It then bisects the gaps between
measured sizes wherever a better size may lie inside, and finally measures the few best again. Of two equally fast
sizes, the smaller one is chosen, as it needs less memory.
"""

from __future__ import annotations

from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

# The constants come from the simulations in tests/sizing/test_autotune.py, which describes their curves and noise.

# The first window of a size may be slower (compilation, allocation, autotuning), so one window is not enough.
WINDOWS_TO_JUDGE = 2
# The largest size is run first and more often, which only lengthens the search. If its windows after the first differ
# by more than this fraction, timing is noisy, and every size is run once more before it is judged.
WINDOWS_OF_THE_FIRST = 4
RESTLESS = 0.02
# The best few are each run this often, so that a single lucky or unlucky window does not decide.
WINDOWS_TO_DECIDE = 4
WINDOWS_TO_DECIDE_WHEN_RESTLESS = 6
CLOSEST = 3
# The search ends after this many windows in any case.
MOST_WINDOWS = 30
# The descent ends when windows take this much longer twice in a row, or so much longer that the fixed cost of each
# micro-batch must be the reason, which only gets worse.
SLOWER = 1.1
MUCH_SLOWER = 1.3
# Each size is at most half the previous one, and this many steps reach one sample from any size.
SIZES_GOING_DOWN = 8
# A gap is worth two windows if a size in it could save more than this fraction of the time.
WORTH_A_LOOK = 0.01
# Sizes closer together than this show timing noise, not the slope of the curve.
WELL_APART = 1.3
EQUALLY_FAST = 1.02
CLOSE = 1.05

_NOTHING: Mapping[int, float] = MappingProxyType({})


class Autotune:
    """Chooses the micro-batch size of each window to find the fastest.

    In simulation (tests/sizing/test_autotune.py; the first window of each size takes 50 % longer on average): if the
    cost of a sample changes smoothly with the size and timing is exact, the result reaches at least 97 % of the
    throughput of the best even cut in all of 2000 runs, after 16 windows on average and never more than 30. If the cost
    jumps, it does so in 99 % of runs; the others have jumps far below sizes that were already slower. If windows take 3
    % longer at random and each tenth 30 %: in 99 %, and 94 % with jumps. If each fifth takes 50 % longer and the others
    6 %: 97 %, and 89 %. All windows in slower cuts together cost as much time as one or two windows with the largest
    size on average, and eight at worst.

    A device whose speed changes during the search or afterwards is not noticed.

    Args:
        target_batch: Samples in a window, which sizes are chosen to cut evenly.
        largest: The largest size that fits, at least 1.
        known: The value of `seconds` from an earlier search in the same training, so that those sizes are not run again
            after resuming, or after `largest` has changed.

    Attributes:
        size: The micro-batch size to cut the next window with.
        is_settled: Whether `size` is final.
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
        """Whether windows of the same size take noticeably different times."""
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
        """The shortest time per unit of work in seconds, by size, of sizes that were run often enough."""
        return {size: min(taken) for size, taken in self._windows.items() if len(taken) >= self._enough_to_judge(size)}

    def note(self, elapsed_s: float, work: float = 1.0) -> None:
        """Record how long the window cut with `size` took. Has no effect once `is_settled`.

        Args:
            elapsed_s: Seconds, measured after synchronising with the device.
            work: The amount of data in the window, in any unit, if that differs between windows.
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
        if times:  # empty if there was only one size
            closest = self._closest(times)
            enough = min(times[size] for size in closest) * EQUALLY_FAST
            self.size = min(size for size in closest if times[size] <= enough)

    def _next(self) -> int | None:
        """Return a size to run: one not yet judged, a promising one or one of the best few. None if there is none."""
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
        """Return the next size of the descent; None if it is not worth continuing."""
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
        """Return the middle of the most promising gap; None if none is promising enough."""
        run = sorted(times)
        enough = min(times.values()) * (1 - WORTH_A_LOOK)
        for _, left, right in sorted((self._promise(times, *gap), *gap) for gap in pairwise(run)):
            inside = [size for size in self._sizes if left < size < right]
            if inside and self._promise(times, left, right) < enough:
                return min(inside, key=lambda size: abs(size * size - left * right))
        return None

    def _promise(self, times: Mapping[int, float], left: int, right: int) -> float:
        """Return a lower bound on the time of sizes between two others, if each step less keeps saving as much.

        The left size and the next one well to its left show the fixed cost of a micro-step. Whatever slows down large
        sizes may begin just before the right size, so at best the line continues all the way. Without a size further
        left, all time is attributed to steps, which is considered only next to the fastest size.
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
        """Return the fastest few, and the smallest of those as fast as the fastest."""
        best = min(times.values())
        quickest = sorted((size for size in times if times[size] <= best * CLOSE), key=lambda size: times[size])
        smallest = min(size for size in quickest if times[size] <= best * EQUALLY_FAST)
        return [smallest, *[size for size in quickest if size != smallest][: CLOSEST - 1]]


def _even_sizes(target_batch: int, largest: int) -> Iterator[int]:
    """Yield the micro-batch sizes of all even cuts, the largest first; for each size only the shortest cut."""
    size = min(largest, target_batch)
    while size:
        size = -(-target_batch // -(-target_batch // size))
        yield size
        size -= 1
