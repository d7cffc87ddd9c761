"""Monitors device memory across windows: its peak, the headroom, and whether it keeps running short."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Plan

# Reading the peak and the allocator's retries costs as much as a small micro-batch, so it is done at most this often.
_LOOK_INTERVAL_S = 0.25
# One retry may be due to the first window; new ones in consecutive readings show that memory keeps running short.
_LOOKS = 2
# Under a soft limit, smaller sizes helped if the peak is at most this part of the one before.
_LESS = 0.98
# The most kinds of windows that are told apart.
_MOST_KINDS = 1024


class Headroom:
    """Measures the memory that windows leave free on a device.

    Memory of the same process that is no part of a window, such as a callback's, counts in peaks. What windows need is
    therefore taken from the windows since the last time that a larger size was found to have no room.

    Attributes:
        peak_bytes: The highest use among windows that were measured with the current plan; None before.
    """

    def __init__(self, memory: MemoryBackend) -> None:
        self.peak_bytes: int | None = None
        self._recent: int | None = None
        self._memory = memory
        self._plan: Plan | None = None
        self._looked_at = -math.inf
        self._retries: int | None = None
        self._held_bytes = 0  # when the window began that is measured
        self._kind: Hashable = ()
        self._extra_bytes: dict[Hashable, int] = {}  # the least that windows of a kind and sizes took beside that
        self._thrashing = 0
        self._excess_bytes: int | None = None  # the peak for which sizes were made smaller, if it is still too high

    def follow(self, plan: Plan) -> None:
        """Begin anew if the plan has changed."""
        if plan is self._plan:
            return
        self._plan = plan
        self._extra_bytes.clear()
        self.peak_bytes = self._retries = None
        self._thrashing = 0  # of larger sizes
        self._renew()

    def measure(self, kind: Hashable = ()) -> None:
        """Measure the window that begins, under a soft limit; `kind` tells windows apart that take unlike memory."""
        self._kind = kind
        self._memory.reset_peak()
        self._held_bytes = self._memory.peak_bytes() or 0

    def shortage(self, sizes: Sequence[int] = (), *, reads_peak: bool) -> str | None:
        """Take a reading after a window, if one is due; return in words that memory keeps running short, or None.

        Under a soft limit one is due after every window that was measured. The peak is not read while other code
        resets it.
        """
        memory, now = self._memory, time.perf_counter()
        if not memory.is_soft and now - self._looked_at < _LOOK_INTERVAL_S:
            return None
        self._looked_at = now
        peak = memory.peak_bytes() if reads_peak else None
        if peak is not None:
            if memory.is_soft:
                # Blocks that the heap has kept from earlier windows can make a peak larger than a step, never smaller.
                key = self._kind, tuple(sizes)
                extra = min(peak - self._held_bytes, self._extra_bytes.get(key, peak))
                if len(self._extra_bytes) >= _MOST_KINDS:  # of texts, nearly every window is of its own kind
                    self._extra_bytes.clear()
                self._extra_bytes[key] = extra
                peak = self._held_bytes + extra
            self._take(peak)
            overrun = memory.describe_overrun(peak)
            if overrun is None:
                self._excess_bytes = None
            # Smaller sizes need not take less: oneDNN keeps memory for each size that it has met.
            elif self._excess_bytes is None or peak < _LESS * self._excess_bytes:
                self._excess_bytes = peak
                return f"a window is above the limit ({overrun})"
        retries = memory.alloc_retries()
        risen = self._retries is not None and retries > self._retries
        self._retries = retries
        self._thrashing = self._thrashing + 1 if risen else 0
        return "the allocator finds no room without giving back its cache" if self._thrashing >= _LOOKS else None

    def note_peak(self) -> None:
        """Take the peak into account, which other code is about to reset."""
        peak = self._memory.peak_bytes()
        if peak is not None:
            self._take(peak)

    def _take(self, peak: int) -> None:
        self._recent = max(self._recent or 0, peak)
        self.peak_bytes = max(self.peak_bytes or 0, peak)

    def is_free(self, extra_bytes: int) -> bool:
        """Whether a window could use this much more than earlier ones with this plan.

        If not, what windows use is measured anew.
        """
        if self._memory.is_soft:
            self._memory.trim()  # what the heap keeps is free
        reading = self._memory.reading()
        needed = 0 if self._recent is None else max(0, self._recent - reading.used_bytes)
        is_free = reading.free_bytes >= needed + extra_bytes
        if not is_free:
            self._renew()
        return is_free

    def _renew(self) -> None:
        """Measure the peak from now on."""
        self._memory.reset_peak()
        self._recent = None
        self._looked_at = -math.inf
