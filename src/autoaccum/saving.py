"""When a checkpoint is due, where the one to go on from is, and who is told."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum import safe_files
from autoaccum.errors import CheckpointError, InvalidInputError
from autoaccum.records import check_positive_int
from autoaccum.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Mapping
    from os import PathLike

    from autoaccum.checkpoint import Moment
    from autoaccum.notices import Notices
    from autoaccum.position import Position


# By how much less is tried after what did not fit.
_LESS = 0.7
# Of what `note_lack` writes.
_MOST_NOTED_BYTES = 1 << 20
# No window has more.
_MOST_SAMPLES = 2**53


class Saver:
    """Writes the checkpoints of one run.

    Args:
        storage: Where they are.
        every_steps: Windows from one to the next; None: they are not counted.
        every_s: Seconds from one to the next; None: they are not counted.
        resume: As for `fit`.
    """

    def __init__(self, storage: Storage, *, every_steps: int | None, every_s: float | None, resume: bool | str) -> None:
        self._storage = storage
        self._every_steps = every_steps
        self._every_s = every_s
        self._resume = resume
        self._saved: Position | None = None
        self._saved_at = time.monotonic()

    @property
    def folder(self) -> Path:
        """Where checkpoints are."""
        return self._storage.folder

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint of this run; None before the first."""
        return self._storage.newest

    def find(
        self, notices: Notices, known_damage: Mapping[Path, str] | None = None
    ) -> tuple[Path, dict[str, Any]] | None:
        """Return the checkpoint to go on from, its path and what is in it; None for a fresh start, which is said.

        Args:
            notices: Where it is said.
            known_damage: What was found wrong with some of them already.

        Raises:
            CheckpointError: There are some, and none can be read; or there is none, and there must be.
        """
        self._storage.tidy()
        folder = self._storage.folder
        if self._resume is False:
            if older := len(self._storage.found()):
                notices.say(
                    f"training starts anew (resume=False); the first checkpoint that is written replaces the {older} "
                    f"in {folder}"
                )
            return None
        found = self._storage.read_newest(notices, known_damage)
        if found is None and self._resume is True:
            raise CheckpointError(
                f"resume=True, and there is no checkpoint in {folder}; pass the folder of the run to go on with, or "
                "resume='auto', which starts anew where there is none"
            )
        if found is None:
            notices.say(f"training starts anew: there is no checkpoint in {folder} yet")
        return found

    def folder_for_shards(self, moment: Moment) -> Path:
        """Return a new folder for what several ranks write of this moment, each a part."""
        return self._storage.folder_for_shards(moment.windows)

    def remove_others(self) -> None:
        """Remove what ranks have written of checkpoints that are not there (any more)."""
        self._storage.remove_others()

    # --- lack of memory that ended a run ------------------------------------------------------------------------------

    def note_lack(self, micro_batch: int, message: str) -> None:
        """Keep for the next attempt that so many samples at once did not fit, where this process cannot go on."""
        content = {"micro_batch": micro_batch, "message": message}
        unfinished = safe_files.create_beside(self._lack)
        unfinished.write_text(json.dumps(content) + "\n")
        unfinished.replace(self._lack)

    def cap(self, notices: Notices) -> int | None:
        """Return the most samples at once, by what an earlier attempt has noted; None where none has."""
        if self._resume is False:
            self._lack.unlink(missing_ok=True)
        try:
            size = json.loads(safe_files.read(self._lack, _MOST_NOTED_BYTES))["micro_batch"]
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        if type(size) is not int or not 0 < size <= _MOST_SAMPLES:  # nothing that `note_lack` has written
            return None
        cap = max(1, int(size * _LESS))
        notices.say(
            f"micro-batches of at most {cap} samples, since {size} ran out of memory before (delete {self._lack} to "
            "forget it)"
        )
        return cap

    @property
    def _lack(self) -> Path:
        return self._storage.folder / "out-of-memory.json"

    def find_again(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the newest checkpoint of this run, to go back to; None where there is none that is whole."""
        return self._storage.read_back()

    def is_due(self, windows: int) -> bool:
        """Whether one is to be written after so many windows, at this time."""
        by_steps = self._every_steps is not None and windows % self._every_steps == 0
        return by_steps or (self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s)

    def has(self, moment: Moment) -> bool:
        """Whether the newest checkpoint was taken at this moment."""
        return self._saved is moment.position

    def note(self, moment: Moment) -> None:
        """Note that the newest checkpoint was taken at this moment."""
        self._saved, self._saved_at = moment.position, time.monotonic()

    def took(self, path: Path, moment: Moment) -> None:
        """Note that another process of this run has written the checkpoint of this moment."""
        self._storage.took(path)
        self.note(moment)

    def write(self, content: dict[str, Any], moment: Moment) -> Path:
        """Write one and return its path.

        Raises:
            CheckpointError: It could not be written; those before it are as they were.
        """
        path = self._storage.write(content, moment.windows)
        self.note(moment)
        return path


def saver_for(
    checkpoint: str | PathLike[str] | None, steps: int | None, minutes: float | None, resume: bool | str
) -> Saver | None:
    """Check the arguments of `fit` that are about checkpoints; return None where none are asked for.

    Raises:
        InvalidInputError: One of them cannot be used.
    """
    if not isinstance(resume, bool) and resume != "auto":
        raise InvalidInputError(
            f"resume={resume!r} is unknown; choose 'auto' (go on if there is a checkpoint), True (there must be one) "
            "or False (start anew)"
        )
    if steps is not None:
        check_positive_int("checkpoint_steps", steps)
    if minutes is not None and not _is_positive(minutes):
        raise InvalidInputError(f"checkpoint_minutes={minutes!r} must be a positive number, or None")
    if checkpoint is None:
        needing = {"checkpoint_steps": steps is not None, "resume": resume is True}
        for name in (name for name, is_set in needing.items() if is_set):
            raise InvalidInputError(f"{name}= needs a folder for checkpoints; pass checkpoint= too")
        return None
    folder = _folder(checkpoint)
    return Saver(Storage(folder), every_steps=steps, every_s=None if minutes is None else 60.0 * minutes, resume=resume)


def _folder(checkpoint: str | PathLike[str]) -> Path:
    if checkpoint == "":  # which pathlib takes for the current folder
        raise InvalidInputError("checkpoint='' names no folder; pass one for checkpoints, or None for none")
    try:
        return Path(checkpoint).expanduser()
    except TypeError:
        raise InvalidInputError(f"checkpoint={checkpoint!r} is no path; pass the folder for checkpoints") from None
    except RuntimeError as error:  # there is no such user
        raise InvalidInputError(
            f"checkpoint={checkpoint!r} cannot be found ({error}); pass the folder with its whole path"
        ) from None


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value) and value > 0
