"""A simulated device with an allocator that keeps what is freed."""

from dataclasses import replace

import autoaccum


class Cached(autoaccum.Simulated):
    """A device whose allocator keeps what is freed, as that of a GPU does: its limit and its peaks count that too."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self._held_bytes = 0

    def _held(self):
        ledger = self._ledger
        self._held_bytes = max(self._held_bytes, ledger.peak_bytes if ledger else 0)
        return self._held_bytes

    def reading(self):
        found = super().reading()
        return replace(found, used_bytes=self._held(), free_bytes=found.used_bytes + found.free_bytes - self._held())

    def reset_peak(self):
        self._held()
        super().reset_peak()

    def peak_bytes(self):
        return self._held() if self._ledger else None

    def peak_in_use_bytes(self):
        return super().peak_bytes()

    def trim(self):
        self._held_bytes = self._ledger.live_bytes if self._ledger else 0

    def release(self):
        super().release()
        self.trim()

    @property
    def most(self):
        return self._held()
