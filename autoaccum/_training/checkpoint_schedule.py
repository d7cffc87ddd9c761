"""Decides when a checkpoint is due and which one to resume from, while no other process trains with the folder."""

from __future__ import annotations

import json
import math
import re
import time
from typing import TYPE_CHECKING, Any

from autoaccum._arguments import check_path, check_positive_int, is_one_of, shown
from autoaccum._system import files
from autoaccum._system.lease import Lease
from autoaccum._training.checkpoint_files import Storage
from autoaccum.errors import CheckpointError, InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike
    from pathlib import Path

    from autoaccum._data.loader_state import Position
    from autoaccum._system.notices import Notices
    from autoaccum._training.checkpoint_contents import Moment, Stopped

# The default of `checkpoint_every`.
EVERY = "10min"
# By how much less is tried after what did not fit.
_LESS = 0.7
# Of what `note_lack` writes.
_MOST_NOTED_BYTES = 1 << 20
# No window has more.
_MOST_SAMPLES = 2**53
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


class Saver:
    """Writes the checkpoints of one run.

    Args:
        storage: Where they are.
        every: Windows from one to the next, or seconds if it is a float; None: neither.
        resume: As for `fit`.

    Attributes:
        storage: Where they are.
    """

    def __init__(self, storage: Storage, *, every: int | float | None, resume: bool | str) -> None:  # noqa: PYI041
        self.storage = storage
        self._every = every
        self._resume = resume
        self._lease = Lease(storage.folder)
        self._saved: tuple[Position, Stopped | None] | None = None
        self._saved_at = time.monotonic()

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint of this run; None before the first."""
        return self.storage.newest

    # --- whose folder it is -------------------------------------------------------------------------------------------

    def taking_folder(self, notices: Notices) -> Iterator[float]:
        """Take the lease on the folder, waiting while another process trains there; yield the seconds to pause.

        Raises:
            CheckpointInUseError: Another process trains there and does not end.
            CheckpointError: The folder cannot be written to.
        """
        yield from self._lease.taking(notices.say)
        self.storage.guard = self._lease.check

    def check_folder(self) -> None:
        """Check that this process still holds the lease on the folder, if it took one.

        Raises:
            CheckpointInUseError: Another process has taken it over.
        """
        self.storage.guard()

    def release_folder(self) -> None:
        """Release the lease on the folder."""
        self._lease.release()

    # --- what there is ------------------------------------------------------------------------------------------------

    def find(self, notices: Notices) -> tuple[Path, dict[str, Any]] | None:
        """Return the path and the content of the checkpoint to resume from; None for a fresh start, which is reported.

        Args:
            notices: Reports it.

        Raises:
            CheckpointError: None can be read; or there is none, and `resume=True` requires one.
        """
        self.storage.tidy()
        folder = self.storage.folder
        if self._resume is False:
            self._lack.unlink(missing_ok=True)
            if earlier := len(self.storage.found()):
                notices.say(
                    f"training starts from scratch (resume=False); the {earlier} checkpoints in {folder} move to a "
                    "folder earlier-N in it as soon as the first new one is written"
                )
            return None
        found = self.storage.read_newest(notices)
        if found is None and self._resume is True:
            raise CheckpointError(
                f"resume=True, and there is no checkpoint in {folder}; pass the folder of the run to go on with, or "
                "resume='auto', which starts from scratch where there is none"
            )
        if found is None:
            notices.say(f"training starts from scratch: there is no checkpoint in {folder} yet")
        return found

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
        notices.say(f"micro-batches of at most {cap} samples in this call, since {size} ran out of memory before")
        return cap

    @property
    def _lack(self) -> Path:
        return self.storage.folder / "out-of-memory.json"

    # --- when ---------------------------------------------------------------------------------------------------------

    def is_due(self, windows: int) -> bool:
        """Whether to write one after so many windows, at this time.

        True also when another process has taken the folder over: writing then raises the error that says so.
        """
        by_steps = isinstance(self._every, int) and windows % self._every == 0
        by_time = isinstance(self._every, float) and time.monotonic() - self._saved_at >= self._every
        return by_steps or by_time or self._lease.is_lost

    def is_best(self, loss: float) -> bool:
        """Whether a validation loss is lower than that of every checkpoint."""
        best = self.storage.best_loss
        return math.isfinite(loss) and (best is None or loss < best)

    def has(self, moment: Moment) -> bool:
        """Whether the newest checkpoint was taken at this moment."""
        return self._saved is not None and self._saved[0] is moment.position and self._saved[1] == moment.stopped

    def note(self, moment: Moment) -> None:
        """Note that the newest checkpoint was taken at this moment."""
        self._saved, self._saved_at = (moment.position, moment.stopped), time.monotonic()

    def took(self, path: Path, moment: Moment) -> None:
        """Note that another process of this run has written the checkpoint of this moment."""
        self.storage.took(path, moment.val_loss)
        self.note(moment)

    def write(self, content: dict[str, Any], moment: Moment) -> Path:
        """Write one and return its path.

        Args:
            content: What it holds.
            moment: When it was taken.

        Raises:
            CheckpointError: It could not be written; those before it are as they were.
        """
        path = self.storage.write(content, moment.windows, val_loss=moment.val_loss)
        self._lack.unlink(missing_ok=True)  # a run that gets so far needs it no longer: its sizes are in the checkpoint
        self.note(moment)
        return path


def saver_for(checkpoint: str | PathLike[str] | None, every: int | str | None, resume: bool | str) -> Saver | None:
    """Make the folder and return what writes the checkpoints of `fit`; None without `checkpoint=`.

    Raises:
        InvalidInputError: One of the arguments cannot be used, or the folder cannot be written to.
    """
    folder = check_saving(checkpoint, every, resume)
    if folder is None:
        return None
    return Saver(Storage(folder, replaces=resume is False), every=_interval(every), resume=resume)


def check_saving(checkpoint: str | PathLike[str] | None, every: int | str | None, resume: bool | str) -> Path | None:
    """Check the arguments of `fit` about checkpoints and return their folder, which need not exist.

    Raises:
        InvalidInputError: One of them cannot be used.
    """
    if not isinstance(resume, bool) and not is_one_of(resume, ["auto"]):
        raise InvalidInputError(
            f"resume={shown(resume)} is unknown; choose 'auto' (go on if there is a checkpoint), True (there must be "
            "one) or False (start from scratch)"
        )
    _interval(every)
    if checkpoint is None:
        needing = {"checkpoint_every": every not in (None, EVERY), "resume": resume is True}
        for name in (name for name, is_set in needing.items() if is_set):
            raise InvalidInputError(f"{name}= needs a folder for checkpoints; pass checkpoint= too")
        return None
    return check_path("checkpoint", checkpoint, "folder for checkpoints")


def _interval(every: int | str | None) -> int | float | None:
    """Return a number of windows as an int, a time as a float of seconds."""
    if every is None or not isinstance(every, str):
        return None if every is None else check_positive_int("checkpoint_every", every)
    found = _TIME.fullmatch(every.strip())
    if found is None or not float(found[1]):
        raise InvalidInputError(
            f"checkpoint_every={shown(every)} is neither a number of updates nor a time; pass such as 500, '15min', "
            "'90s' or '1h'"
        )
    return float(found[1]) * _SECONDS[found[2]]
