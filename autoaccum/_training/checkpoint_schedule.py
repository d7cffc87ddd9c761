"""Decides when a checkpoint is due and which one to resume from."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import check_path, check_positive_int, check_positive_number, is_one_of, shown
from autoaccum._system import files
from autoaccum._system.lease import Lease
from autoaccum._training.checkpoint_files import Storage
from autoaccum.errors import CheckpointError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike
    from pathlib import Path

    from autoaccum._data.loader_state import Position
    from autoaccum._system.notices import Notices
    from autoaccum._training.checkpoint_contents import Moment


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
        self._lease = Lease(storage.folder)
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

    # --- whose folder it is -------------------------------------------------------------------------------------------

    def taking_folder(self, notices: Notices) -> Iterator[float]:
        """Take the lease on the folder, waiting while another process trains there; yield the seconds to pause.

        Raises:
            CheckpointInUseError: Another process trains there and does not end.
            CheckpointError: The folder cannot be written to.
        """
        yield from self._lease.taking(notices.say)
        self._storage.guard = self._lease.check

    def check_folder(self) -> None:
        """Check that this process still holds the lease on the folder, if it took one.

        Raises:
            CheckpointInUseError: Another process has taken it over.
        """
        self._storage.guard()

    def release_folder(self) -> None:
        """Release the lease on the folder."""
        self._lease.release()

    # --- what there is ------------------------------------------------------------------------------------------------

    def find(
        self, notices: Notices, known_damage: Mapping[Path, str] | None = None
    ) -> tuple[Path, dict[str, Any]] | None:
        """Return the path and the content of the checkpoint to resume from; None for a fresh start, which is reported.

        Args:
            notices: Reports it.
            known_damage: Damage that is known already, by file.

        Raises:
            CheckpointError: None can be read; or there is none, and `resume=True` requires one.
        """
        self._storage.tidy()
        folder = self._storage.folder
        if self._resume is False:
            self._lack.unlink(missing_ok=True)
            if older := len(self._storage.found()):
                notices.say(
                    "training starts from scratch (resume=False); the first checkpoint that is written replaces the "
                    f"{older} in {folder}"
                )
            return None
        found = self._storage.read_newest(notices, known_damage)
        if found is None and self._resume is True:
            raise CheckpointError(
                f"resume=True, and there is no checkpoint in {folder}; pass the folder of the run to go on with, or "
                "resume='auto', which starts from scratch where there is none"
            )
        if found is None:
            notices.say(f"training starts from scratch: there is no checkpoint in {folder} yet")
        return found

    def folder_for_shards(self, moment: Moment) -> Path:
        """Return a new folder for the parts that several ranks write of this moment."""
        return self._storage.folder_for_shards(moment.windows)

    def remove_others(self) -> None:
        """Remove parts that ranks wrote for checkpoints that no longer exist."""
        self._storage.remove_others()

    # --- lack of memory that ended a run ------------------------------------------------------------------------------

    def note_lack(self, micro_batch: int, message: str) -> None:
        """Record for the next attempt that so many samples at once did not fit, since this process cannot go on."""
        content = {"micro_batch": micro_batch, "message": message}
        with files.replacing(self._lack, before_rename=self.check_folder) as unfinished:
            unfinished.write_text(json.dumps(content) + "\n")

    def cap(self, notices: Notices) -> int | None:
        """Return the most samples at once that an earlier attempt's record allows; None without a record."""
        if self._resume is False:
            return None
        try:
            size = json.loads(files.read(self._lack, _MOST_NOTED_BYTES))["micro_batch"]
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
        """Return the newest whole checkpoint of this run, to go back to; None if there is none."""
        return self._storage.read_back()

    def is_due(self, windows: int) -> bool:
        """Whether to write one after so many windows, at this time.

        True also when another process has taken the folder over: writing then raises the error that says so.
        """
        by_steps = self._every_steps is not None and windows % self._every_steps == 0
        by_time = self._every_s is not None and time.monotonic() - self._saved_at >= self._every_s
        return by_steps or by_time or self._lease.is_lost

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
        self._lack.unlink(missing_ok=True)  # training has gone on with it, in sizes that the checkpoint holds
        self.note(moment)
        return path


def saver_for(
    checkpoint: str | PathLike[str] | None, steps: int | None, minutes: float | None, resume: bool | str
) -> Saver | None:
    """Make the folder and return what writes the checkpoints of `fit`; None without `checkpoint=`.

    Raises:
        InvalidInputError: One of the arguments cannot be used, or the folder cannot be written to.
    """
    folder = check_saving(checkpoint, steps, minutes, resume)
    if folder is None:
        return None
    return Saver(Storage(folder), every_steps=steps, every_s=None if minutes is None else 60.0 * minutes, resume=resume)


def check_saving(
    checkpoint: str | PathLike[str] | None, steps: int | None, minutes: float | None, resume: bool | str
) -> Path | None:
    """Check the arguments of `fit` about checkpoints and return their folder, which need not exist.

    Raises:
        InvalidInputError: One of them cannot be used.
    """
    if not isinstance(resume, bool) and not is_one_of(resume, ["auto"]):
        raise InvalidInputError(
            f"resume={shown(resume)} is unknown; choose 'auto' (go on if there is a checkpoint), True (there must be "
            "one) or False (start from scratch)"
        )
    if steps is not None:
        check_positive_int("checkpoint_steps", steps)
    if minutes is not None:
        check_positive_number("checkpoint_minutes", minutes)
    if checkpoint is None:
        needing = {"checkpoint_steps": steps is not None, "resume": resume is True}
        for name in (name for name, is_set in needing.items() if is_set):
            raise InvalidInputError(f"{name}= needs a folder for checkpoints; pass checkpoint= too")
        return None
    return check_path("checkpoint", checkpoint, "folder for checkpoints")
