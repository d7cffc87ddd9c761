"""Caches the results of micro-batch searches for the next start of the same job, in one small JSON file per job.

A cached result is only a hint, which the next start confirms by a trial. What cannot be read is ignored, and no problem
with files or folders makes training fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from autoaccum._oom import first_line
from autoaccum._sizing.frontier import Frontier
from autoaccum._system import files
from autoaccum._system.launched import folder_of_plans

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from autoaccum._memory.base import MemoryBackend
    from autoaccum._records import Plan, ProbeResult
    from autoaccum._system.notices import Notices

# Files written here are about 1 KiB.
_MOST_BYTES = 1 << 16
_MOST = 1 << 63


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a job, identically in every process that starts it.

    Attributes:
        digest: SHA-256 of the job's description.
        target_batch: Samples per optimizer step, of which no more can fit; None where sizes are tokens with padding, of
            which an optimizer step may have more than its target.
        about: The human-readable part of the description.
    """

    digest: str
    target_batch: int | None
    about: Mapping[str, Any] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Remembered:
    """The result of a search.

    Attributes:
        micro_batch: The largest size that was tried and fitted.
        frontier: What fitted and what did not, as `Frontier.state` has it.
        fastest: The size measured to be the fastest.
        memory: What `save_memory="auto"` saved memory by with these sizes.
    """

    micro_batch: int
    frontier: Mapping[str, Any] = field(default_factory=dict)
    fastest: int | None = None
    memory: tuple[str, ...] = ()


class PlanCache:
    """Stores the results of searches in a folder that all processes of a user share."""

    def __init__(self, notices: Notices) -> None:
        self._notices = notices
        self._folder = folder_of_plans()

    def find(self, key: Key) -> Remembered | None:
        """Return the cached result of a job; None if there is no usable one."""
        if self._folder is None:
            return None
        try:
            found = json.loads(files.read(_path(self._folder, key), _MOST_BYTES))["found"]
            return _understood(found, key.target_batch)
        except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            self._notices.say(
                f"plan cache: {self._folder} holds what cannot be used for this job ({type(error).__name__}: "
                f"{first_line(error)}), so sizes are searched for anew",
                key="plan cache unusable",
            )
        except Exception:  # noqa: BLE001, S110 - there is none, or `keep` will say why none can be there
            pass
        return None

    def announce(self, remembered: Remembered) -> None:
        """Say that a search begins with the result of an earlier one."""
        what = f"a search from {remembered.micro_batch} on, which fitted in an earlier run, as {self._folder} has it"
        self._notices.choose(what, "the environment variable AUTOACCUM_CACHE_DIR, set to nothing")

    def keep(self, key: Key, remembered: Remembered) -> None:
        """Store a result, replacing an earlier one."""
        if self._folder is None:
            return
        try:
            path = _path(self._folder, key)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            data = json.dumps({"about": dict(key.about), "found": asdict(remembered)}, indent=1)
            files.write(path, f"{data}\n".encode(), mode=0o600)
        except Exception as error:  # noqa: BLE001 - a full disk, a name that cannot be one, a ~ of a user without a home
            reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
            self._notices.say(
                f"plan cache: {self._folder} cannot be written to ({reason}), so each start searches for the "
                "micro-batch; set AUTOACCUM_CACHE_DIR to a writable folder",
                key="plan cache folder",
            )

    def forget(self, key: Key) -> None:
        """Delete the cached result of a job."""
        if self._folder is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):  # as in `keep`, which says so
                _path(self._folder, key).unlink()


class CacheEntry:
    """The cached result of one job's search.

    Args:
        memory: The device, whose limit does not count what writing takes.
        cache: Keeps plans between runs; None to keep what is found in this object alone.
        key: Identifies the job; None without a cache.

    Attributes:
        found: What an earlier run has found, or this one; None if nothing is known.
        frontier: What is known to fit.
        saves: What `save_memory="auto"` saves memory by, for which that holds.
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
                cache.announce(self.found)
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
        """Delete the cached plan, which has turned out not to fit, and keep nothing more in this run."""
        if self._cache is not None and self._key is not None:
            self._cache.forget(self._key)
            self._key = None


def _path(folder: Path, key: Key) -> Path:
    return folder.expanduser() / f"plan-{key.digest[:32]}.json"


def _understood(found: Mapping[str, Any], most: int | None) -> Remembered | None:
    """Return the result of a file, without values that no search can have found; None without a size."""

    def number(name: str, most: int) -> int | None:
        value = found.get(name)
        return value if type(value) is int and 0 < value <= most else None

    micro_batch = number("micro_batch", most or _MOST)
    if micro_batch is None:
        return None
    names = found.get("memory")
    memory = tuple(names) if isinstance(names, list) and all(type(name) is str for name in names) else ()
    return Remembered(
        micro_batch,
        Frontier.of_state(found.get("frontier")).state(),
        number("fastest", micro_batch),
        memory,
    )


def digest_of(content: Any) -> str:
    """Return the SHA-256 of JSON values, identical in every process."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
