"""What the cache holds of one job: read when its sizes are about to be searched for, and written with what is found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoaccum._sizing.cache import Remembered
from autoaccum._sizing.frontier import Frontier

if TYPE_CHECKING:
    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Plan, ProbeResult
    from autoaccum._sizing.cache import Key, PlanCache


class CacheEntry:
    """The cached result of one job's search.

    Args:
        memory: The device, whose limit does not count what writing takes.
        cache: Keeps plans between runs; None to keep what is found in this object alone.
        key: Identifies the job; None without a cache.

    Attributes:
        found: What an earlier run has found, or this one; None if nothing is known.
        frontier: What is known to fit.
        saves: What `memory="auto"` saves memory by, for which that holds.
    """

    def __init__(self, memory: MemoryBackend, cache: PlanCache | None = None, key: Key | None = None) -> None:
        self._memory = memory
        self._cache = cache
        self._key = key
        self._kept: tuple[ProbeResult | None, Plan | None] = None, None
        self.found: Remembered | None = None
        if cache is not None and key is not None:
            self.found = cache.find(key)
            if self.found is not None:
                cache.tell(self.found)
        self.saves = () if self.found is None else self.found.memory
        self.frontier = Frontier.of_state(None if self.found is None else self.found.frontier)

    @property
    def experience(self) -> dict[str, Any]:
        """What an earlier run tells of the first sizes, as options of `SizingOptions`."""
        found = self.found
        begins_with = None if found is None else found.fastest or found.micro_batch
        return {"begins_with": begins_with, "frontier": self.frontier}

    def use(self, saves: tuple[str, ...]) -> None:
        """Forget what was found with something else that saves memory."""
        if saves != self.saves:
            self.saves, self.found, self.frontier = saves, None, Frontier()

    def keep(self, result: ProbeResult | None = None, fastest: Plan | None = None) -> None:
        """Cache what a search has found, and the plan that autotuning has chosen, each once."""
        known, (result_before, fastest_before) = self.found, self._kept
        self._kept = result or result_before, fastest or fastest_before
        if result is not None and result is not result_before:
            is_confirmed = known is not None and result.micro_batch <= known.micro_batch  # even sizes may be a bit less
            if not is_confirmed or not all(one.fits for one in result.trials):
                known = Remembered(result.micro_batch, self.frontier.state(), memory=self.saves)
        if fastest is not None and fastest is not fastest_before and known and fastest.micro_batch <= known.micro_batch:
            known = replace(known, fastest=fastest.micro_batch)
        if known is None or known is self.found:
            return
        self.found = known
        if self._cache is not None and self._key is not None:
            with self._memory.lifted():
                self._cache.keep(self._key, known)

    def forget(self) -> None:
        """Delete the cached plan, which has turned out not to fit."""
        if self._cache is not None and self._key is not None:
            self._cache.forget(self._key)
            self._key = None
