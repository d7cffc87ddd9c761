"""Caches the results of micro-batch searches for the next start of the same job, in one small JSON file per job.

A cached result is only a hint, which the next start confirms by a trial, so a `Key` may be coarse. A file that is
missing, damaged or from another job is ignored, and no problem with files or folders makes training fail.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs

from autoaccum._arguments import check_positive_int
from autoaccum._oom import first_line
from autoaccum._system import safe_files
from autoaccum._system.exceptions import contextmanager
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from autoaccum._system.notices import Notices

FOLDER_VARIABLE = "AUTOACCUM_CACHE_DIR"

# Incremented whenever the meaning of a field changes; files from before a field was added lack it.
_FORMAT = 1
_NAME = re.compile(r"plan-[0-9a-f]{32}\.json(\.[^.]+\.unfinished)?")
_UNUSED_S = 90 * 24 * 3600
# Writing takes milliseconds: an older unfinished file was left by a killed process.
_UNFINISHED_S = 3600
_MOST_FILES = 500
# Files written here are about 1 KiB.
_MOST_BYTES = 1 << 16
_MOST = 1 << 63


@dataclass(frozen=True, slots=True)
class Key:
    """Identifies a job, identically in every process that starts it.

    Attributes:
        digest: SHA-256 of the job's description.
        target_batch: Samples per update, of which no more can fit; None where sizes are tokens with padding, of which
            an update may have more than its target.
        about: The human-readable part of the description.
    """

    digest: str
    target_batch: int | None
    about: Mapping[str, str | int | None] = field(compare=False)


@dataclass(frozen=True, slots=True)
class Remembered:
    """The result of a search.

    Attributes:
        micro_batch: The largest size that was tried and fitted.
        fixed_bytes: Peak memory at size 0, extrapolated from a line through the peaks; None if unknown, as for the next
            two.
        bytes_per_sample: Memory per additional sample.
        fastest: The size measured to be the fastest.
        memory: What `memory="auto"` has chosen for these sizes; None without it, or while it was still measuring.
        tried: What it has tried for that, with seconds and bytes, in words; None if nothing.

    Raises:
        InvalidInputError: A value is out of range.
    """

    micro_batch: int
    fixed_bytes: int | None = None
    bytes_per_sample: int | None = None
    fastest: int | None = None
    memory: tuple[str, ...] | None = None
    tried: str | None = None

    def __post_init__(self) -> None:
        if self.memory is not None:
            if not isinstance(self.memory, list | tuple) or not all(type(name) is str for name in self.memory):
                raise InvalidInputError(f"memory={self.memory!r} must be names, or None")
            object.__setattr__(self, "memory", tuple(self.memory))
        if self.tried is not None and (type(self.tried) is not str or not self.tried.isprintable()):
            raise InvalidInputError(f"tried={self.tried!r} must be words, or None")
        check_positive_int("micro_batch", self.micro_batch)
        if self.fastest is not None and check_positive_int("fastest", self.fastest) > self.micro_batch:
            raise InvalidInputError(f"fastest={self.fastest} is more than micro_batch={self.micro_batch}, which fits")
        for name in ("fixed_bytes", "bytes_per_sample"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 <= value < _MOST):
                raise InvalidInputError(f"{name}={value!r} must be a number of bytes, at least 0, or None")


class _UselessError(Exception):
    """A file was not written by this cache, or not for this job."""


def folder_of_plans() -> Path:
    """Return the folder named by AUTOACCUM_CACHE_DIR, or else autoaccum's folder in the user's cache directory."""
    named = os.environ.get(FOLDER_VARIABLE)
    return Path(named) if named else platformdirs.user_cache_path("autoaccum")


class PlanCache:
    """Stores the results of searches in a folder that all processes of a user share.

    Args:
        notices: Reports what is found, and an unusable folder or file, once each.
        folder: The folder, created by the first `keep`; None for the one named by AUTOACCUM_CACHE_DIR, or else
            autoaccum's folder in the user's cache directory.
    """

    def __init__(self, notices: Notices, folder: Path | None = None) -> None:
        self._notices = notices
        self._given = folder

    def find(self, key: Key) -> Remembered | None:
        """Return the cached result of a job; None if there is no usable one."""
        with self._reported("read"):
            path = self._path(key)
            if path.is_symlink():
                raise _UselessError(f"{path} is a link")
            try:
                data = safe_files.read(path, _MOST_BYTES)
            except FileNotFoundError:
                return None
            except safe_files.NotRegularError as error:
                raise _UselessError(f"{path} is damaged ({error})") from None
            remembered = _understood(data, key, path)
            with contextlib.suppress(OSError):  # of a read-only folder
                os.utime(path)  # so that `_tidy` keeps it
            return remembered
        return None

    def tell(self, remembered: Remembered) -> None:
        """Say that a search begins with the result of an earlier one."""
        self._notices.say(
            f"plan cache: a micro-batch of {remembered.micro_batch} fitted in an earlier run of this job, so the "
            "search begins there (cache=False: anew)",
            key="plan cache found",
        )

    def keep(self, key: Key, remembered: Remembered) -> None:
        """Store a result, replacing an earlier one, and delete files that have not been used for long."""
        with self._reported("written to"):
            path = self._path(key)
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            content = {"format": _FORMAT, "key": key.digest, "about": dict(key.about), "found": asdict(remembered)}
            data = json.dumps({**content, "checksum": digest_of(content)}, indent=1)
            safe_files.write(path, f"{data}\n".encode(), mode=0o600)
            _tidy(path)

    def forget(self, key: Key) -> None:
        """Delete the cached result of a job."""
        with self._reported("cleaned up"):
            self._path(key).unlink(missing_ok=True)

    @property
    def _folder(self) -> Path:
        return self._given or folder_of_plans()

    def _path(self, key: Key) -> Path:
        return self._folder.expanduser() / f"plan-{key.digest[:32]}.json"

    @contextmanager
    def _reported(self, done: str) -> Iterator[None]:
        try:
            yield
        except _UselessError as error:
            self._notices.say(f"plan cache: {error}; autoaccum searches for the micro-batch", key="plan cache file")
        # Besides OSError: a null byte in a name, a ~ of a user without a home, no memory left.
        except (OSError, ValueError, RuntimeError, MemoryError) as error:
            reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
            self._notices.say(
                f"plan cache: {self._folder} cannot be {done} ({reason}), so each start searches for the "
                f"micro-batch; set {FOLDER_VARIABLE} to a writable folder",
                key="plan cache folder",
            )


def _tidy(kept: Path) -> None:
    """Delete plans that are old or too many, and unfinished files of killed processes."""
    now_s = time.time()
    plans, useless = [], []
    with os.scandir(kept.parent) as entries:
        for entry in entries:
            if entry.name == kept.name or not _NAME.fullmatch(entry.name):
                continue
            with contextlib.suppress(OSError):  # another process deleted it first
                if entry.is_file(follow_symlinks=False):
                    unused_s = now_s - entry.stat(follow_symlinks=False).st_mtime
                    if not entry.name.endswith(safe_files.UNFINISHED):
                        plans.append((unused_s, entry.path))
                    elif unused_s > _UNFINISHED_S:
                        useless.append(entry.path)
    useless += [path for unused_s, path in sorted(plans)[: _MOST_FILES - 1] if unused_s > _UNUSED_S]
    for path in (*useless, *(path for _, path in sorted(plans)[_MOST_FILES - 1 :])):
        with contextlib.suppress(OSError):
            Path(path).unlink()


def _understood(data: bytes, key: Key, path: Path) -> Remembered:
    """Parse a file's content as the result of this job.

    Raises:
        _UselessError: The file is damaged, or of another format or job.
    """
    try:
        content = json.loads(data)
        checksum, form = content.pop("checksum"), content["format"]
        if type(form) is not int or form != _FORMAT:
            raise _UselessError(f"{path} was written by another version of autoaccum (format {str(form)[:20]})")
        remembered = Remembered(**content["found"])
    except (ValueError, TypeError, AttributeError, LookupError, RecursionError) as error:
        raise _UselessError(f"{path} is damaged ({first_line(error)})") from None
    is_too_large = key.target_batch is not None and remembered.micro_batch > key.target_batch
    if checksum != digest_of(content) or is_too_large:
        raise _UselessError(f"{path} is damaged (it was changed since it was written)")
    if content.get("key") != key.digest:
        raise _UselessError(f"{path} belongs to another job")
    return remembered


def digest_of(content: Any) -> str:
    """Return the SHA-256 of JSON values, identical in every process."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def key_of_command(described: Mapping[str, Any], target_batch: int, about: Mapping[str, str | int | None]) -> Key:
    """Return the key of a job of which only the command is known.

    Args:
        described: What distinguishes it from other jobs, as JSON values.
        target_batch: The largest size that could be cached for it.
        about: The human-readable part of it.
    """
    return Key(digest_of({"command": dict(described)}), target_batch, about)
