"""The arguments of `fit` about checkpoints, and the note that a process leaves that ran out of memory for good."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autoaccum._arguments import check_path, check_positive_int, counted, is_one_of, shown
from autoaccum._system import files
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from os import PathLike
    from pathlib import Path

    from autoaccum._system.notices import Notices

# The default of `checkpoint_every`.
EVERY = "10min"
# By how much less is tried after what did not fit.
_LESS = 0.7
# Of the file that `note_out_of_memory` writes.
_MOST_NOTED_BYTES = 1 << 20
_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class Saving:
    """The arguments of `fit` about checkpoints, once checked.

    Attributes:
        folder: Where checkpoints are; made, if it is missing, when the training begins.
        every: Windows from one to the next, or seconds if it is a float; None: neither.
        resume: As for `fit`.
    """

    folder: Path
    every: int | float | None
    resume: bool | str

    @property
    def note(self) -> Path:
        """The file that `note_out_of_memory` writes."""
        return self.folder / "out-of-memory.json"

    def note_out_of_memory(
        self, micro_batch: int, message: str, before_rename: Callable[[], None] | None = None
    ) -> None:
        """Record for the next attempt that so many samples at once did not fit, since this process cannot go on."""
        with files.replacing(self.note, before_rename=before_rename) as unfinished:
            unfinished.write_text(json.dumps({"micro_batch": micro_batch, "message": message}) + "\n")

    def cap(self, notices: Notices) -> int | None:
        """Return the most samples at once that an earlier attempt's record allows; None without a record."""
        if self.resume is False:
            return None
        try:
            size = check_positive_int("", json.loads(files.read(self.note, _MOST_NOTED_BYTES))["micro_batch"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):  # or nothing that was written here
            return None
        cap = max(1, int(size * _LESS))
        notices.say(
            f"micro-batches of at most {counted(cap, 'sample')} in this call, since {size} ran out of memory before"
        )
        return cap


def check_saving(checkpoint: str | PathLike[str] | None, every: int | str | None, resume: bool | str) -> Saving | None:
    """Check the arguments of `fit` about checkpoints; return None if there is no folder.

    Raises:
        InvalidInputError: One of them cannot be used.
    """
    if not isinstance(resume, bool) and not is_one_of(resume, ["auto"]):
        raise InvalidInputError(
            f"resume={shown(resume)} is unknown; choose 'auto' (go on if there is a checkpoint), True (there must be "
            "one) or False (start from scratch)"
        )
    interval = _interval(every)
    if checkpoint is None:
        needing = {"checkpoint_every": every not in (None, EVERY), "resume": resume is True}
        for name in (name for name, is_set in needing.items() if is_set):
            raise InvalidInputError(f"{name}= needs a folder for checkpoints; pass checkpoint= too")
        return None
    return Saving(check_path("checkpoint", checkpoint, "folder for checkpoints"), interval, resume)


def _interval(every: int | str | None) -> int | float | None:
    """Return a number of windows as an int, a time as a float of seconds."""
    if every is None or not isinstance(every, str):
        return None if every is None else check_positive_int("checkpoint_every", every)
    found = _TIME.fullmatch(every.strip())
    if found is None or not float(found[1]):
        raise InvalidInputError(
            f"checkpoint_every={shown(every)} is neither a number of optimizer steps nor a time; pass such as 500, "
            "'15min', '90s' or '1h'"
        )
    return float(found[1]) * _SECONDS[found[2]]
