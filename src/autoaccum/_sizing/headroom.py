"""Monitors device memory across windows: its peak, the headroom, and allocator thrashing."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Plan

# Reading the peak and the allocator's retries costs as much as a small micro-step, so it is done at most this often.
_LOOK_INTERVAL_S = 0.25
# One retry may be due to the first window; new ones in consecutive readings show that the allocator keeps running
# short.
_LOOKS_AT_THRASHING = 2


class Headroom:
    """Measures the memory that windows leave free on a device.

    Args:
        memory: The device.

    Attributes:
        peak_bytes: The highest use among windows that were measured with the current plan; None before.
    """

    def __init__(self, memory: MemoryBackend) -> None:
        self.peak_bytes: int | None = None
        self._memory = memory
        self._plan: Plan | None = None
        self._looked_at = -math.inf
        self._retries: int | None = None
        self._thrashing = 0

    def follow(self, plan: Plan) -> None:
        """Reset the peak if the plan has changed."""
        if plan is self._plan:
            return
        self._plan = plan
        self._memory.reset_peak()
        self.peak_bytes = None
        self._looked_at = -math.inf

    def is_thrashing(self, *, reads_peak: bool) -> bool:
        """Take a reading after a window, if one is due; return whether the allocator is thrashing.

        Args:
            reads_peak: Whether to read the peak; False while other code resets it.
        """
        now = time.perf_counter()
        if now - self._looked_at < _LOOK_INTERVAL_S:
            return False
        self._looked_at = now
        if reads_peak:
            self.peak_bytes = self._memory.peak_bytes()
        return self._keeps_retrying()

    def is_free(self, extra_bytes: int) -> bool:
        """Whether a window could use this much more than earlier ones with this plan."""
        reading = self._memory.reading()
        needed = 0 if self.peak_bytes is None else max(0, self.peak_bytes - reading.used_bytes)
        return reading.free_bytes >= needed + extra_bytes

    def _keeps_retrying(self) -> bool:
        retries = self._memory.alloc_retries()
        risen = self._retries is not None and retries > self._retries
        self._retries = retries
        self._thrashing = self._thrashing + 1 if risen else 0
        return self._thrashing >= _LOOKS_AT_THRASHING
