"""Finds which of three micro-batch sizes has the fastest optimizer steps, by timing whole windows during training.

Pure arithmetic, no torch. Every cut gives the same gradient, so a window with a slow cut costs only time. The largest
size, half and a quarter of it are compared; of equally fast ones the smaller is chosen, as it needs less memory.
"""

from __future__ import annotations

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
