"""What the cache holds of one job: read when its sizes are about to be searched for, and written with what is found."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from autoaccum._sizing.cache import Remembered
from autoaccum._sizing.offline_search import Line

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
        saves: What `memory="auto"` has chosen for the job; None without it, or while it is still measuring.

    Attributes:
        found: What an earlier run has found, or this one; None if nothing is known.
    """

    def __init__(
        self,
        memory: MemoryBackend,
        cache: PlanCache | None = None,
        key: Key | None = None,
        saves: tuple[str, ...] | None = None,
    ) -> None:
        self._saves = saves
        self._tried: str | None = None
        self._memory = memory
        self._cache = cache
        self._key = key
        self._followed: tuple[ProbeResult | None, Plan | None] = None, None
        self.found: Remembered | None = None
        if cache is not None and key is not None and saves is None:
            self.found = cache.find(key)
            if self.found is not None:
                cache.tell(self.found)

    @property
    def experience(self) -> dict[str, Any]:
        """What an earlier run tells of the first sizes, as options of `SizingOptions`."""
        found = self.found
        if found is None:
            return {}
        # The fixed part differs between runs.
        line = Line(0.0, found.bytes_per_sample) if found.bytes_per_sample else None
        return {"begins_with": found.fastest or found.micro_batch, "fitted_before": found.micro_batch, "line": line}

    def follow(self, result: ProbeResult | None, fastest: Plan | None) -> None:
        """Cache what a search and autotuning have found, each once."""
        (result_before, fastest_before), self._followed = self._followed, (result, fastest)
        if result is not None and result is not result_before:
            self.note(result)
        if fastest is not None and fastest is not fastest_before:
            self.note_fastest(fastest)

    def note(self, result: ProbeResult) -> None:
        """Cache the result of a search."""
        before = self.found
        if before is not None and result.micro_batch <= before.micro_batch and all(one.fits for one in result.trials):
            return  # the cached size is confirmed; an even cut may use a little less
        self._keep(Remembered(result.micro_batch, result.fixed_bytes, result.bytes_per_sample))

    def note_fastest(self, fastest: Plan) -> None:
        """Cache the plan that autotuning has chosen."""
        found = self.found
        if found is not None and fastest.micro_batch <= found.micro_batch:
            self._keep(replace(found, fastest=fastest.micro_batch))

    def note_tried(self, tried: str | None) -> None:
        """Keep what `memory="auto"` has tried with what is found from now on, in words."""
        self._tried = tried

    def forget(self) -> None:
        """Delete the cached plan, which has turned out not to fit."""
        if self._cache is not None and self._key is not None:
            self._cache.forget(self._key)
            self._key = None

    def take(self, found: Remembered | None) -> None:
        """Cache what a search has found whose results were not cached."""
        if found is not None:
            self._keep(found)

    def _keep(self, remembered: Remembered) -> None:
        tried = self._tried or remembered.tried or (None if self.found is None else self.found.tried)
        remembered = replace(remembered, memory=self._saves, tried=tried)
        self.found = remembered
        if self._cache is not None and self._key is not None:
            with self._memory.lifted():
                self._cache.keep(self._key, remembered)
