"""Finds which of three micro-batch sizes has the fastest optimizer steps, by timing whole windows during training.

Every cut gives the same gradient, so a window with a slow cut costs only time. The largest size, half and a quarter of
it are compared; of equally fast ones the smaller is chosen, as it needs less memory.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoaccum._records import Plan
    from autoaccum._sizing.cutter import Cutter

PLANS = 3
# The first window of a size may be slower (compilation, allocation), and of the others the shortest counts.
WINDOWS = 4
# A size that is so much slower than a larger one shows that smaller ones are slower still.
SLOWER = 1.1
EQUALLY_FAST = 1.02


class Autotune:
    """Chooses the micro-batch size of each window to find the fastest.

    A device whose speed changes during the search or afterwards is not noticed.

    Args:
        target_batch: Samples in a window, which sizes are chosen to cut evenly.
        largest: The largest size that fits, at least 1.

    Attributes:
        size: The micro-batch size to cut the next window with.
        is_stable: Whether `size` is final.
    """

    def __init__(self, target_batch: int, largest: int) -> None:
        counts = [-(-target_batch // max(1, min(largest, target_batch) >> halved)) for halved in range(PLANS)]
        self._sizes = list(dict.fromkeys(-(-target_batch // count) for count in counts))
        self._windows: dict[int, list[float]] = {}
        self.size = self._sizes[0]
        self.is_stable = len(self._sizes) == 1

    def note(self, elapsed_s: float, work: float = 1.0) -> None:
        """Record how long the window cut with `size` took. Has no effect once `is_stable`.

        Args:
            elapsed_s: Seconds, measured after synchronising with the device.
            work: The amount of data in the window, in any unit, if that differs between windows.
        """
        if self.is_stable:
            return
        self._windows.setdefault(self.size, []).append(elapsed_s / work)
        if len(self._windows[self.size]) < WINDOWS:
            return
        times = {size: min(taken[1:]) for size, taken in self._windows.items()}
        best = min(times.values())
        if len(times) < len(self._sizes) and times[self.size] <= best * SLOWER:
            self.size = self._sizes[len(times)]
            return
        self.is_stable = True
        self.size = min(size for size in times if times[size] <= best * EQUALLY_FAST)


class Clock:
    """Compares sizes by the time of windows, once so many windows are done.

    Attributes:
        starts_after: The number of windows; None once it has started, or where it never does.
        fastest: The plan that was chosen; None before.
    """

    def __init__(self, cutter: Cutter, starts_after: int | None) -> None:
        self.starts_after = starts_after
        self.fastest: Plan | None = None
        self._cutter = cutter
        self._tempo: Autotune | None = None
        self._windows = 0
        self._began_at = 0.0
        self._ended_at: float | None = None

    @property
    def is_running(self) -> bool:
        """Whether windows are timed."""
        return self._tempo is not None

    @property
    def is_over(self) -> bool:
        """Whether no window will be timed any more."""
        return self._tempo is None and self.starts_after is None

    def stop(self) -> None:
        """Time no windows any more."""
        self._tempo = self.starts_after = None

    def begin(self) -> None:
        """Record that a window begins."""
        self._began_at, self._ended_at = time.perf_counter(), None

    def wait(self) -> None:
        """Record that the window now waits for other processes."""
        if self._tempo is not None:
            self._cutter.memory.synchronize()
        self._ended_at = time.perf_counter()

    def end(self, *, is_clean: bool) -> bool:
        """Record the end of a window, which was clean if memory did not run out; return whether windows are timed."""
        self._windows += 1
        cutter = self._cutter
        if self._tempo is not None:
            runs = [run for group in cutter.groups for run in group]
            if is_clean and sum(samples for samples, _ in runs) >= cutter.plan.target_batch:
                self._cutter.memory.synchronize()
                work = sum(samples * sum(widths) for samples, widths in runs) / cutter.plan.target_batch
                self._tempo.note((self._ended_at or time.perf_counter()) - self._began_at, work)
            self._follow(self._tempo)
            return True
        if self.starts_after is None or self._windows < self.starts_after or cutter.plan != cutter.target_plan:
            return False
        self.starts_after = None
        self._start()
        return True

    def restart(self) -> None:
        """Compare anew if it is running: the largest size has become smaller."""
        if self._tempo is not None:
            self._start()

    def _start(self) -> None:
        plan = self._cutter.plan
        self._cutter.compared_to = plan.micro_batch
        self._follow(Autotune(plan.target_batch, plan.micro_batch))

    def _follow(self, tempo: Autotune) -> None:
        """Cut the next window as `tempo` asks, or conclude."""
        cutter = self._cutter
        if not tempo.is_stable:
            self._tempo = tempo
            cutter.time(cutter.plan_of(tempo.size))
            return
        self._tempo, before = None, cutter.plan
        cutter.replace_plan(cutter.plan_of(tempo.size))
        if cutter.plan != before:
            cutter.events.planned(cutter.plan, None)
        self.fastest = cutter.plan
