"""A job's folder: what was asked, how far it is, and how often it was started again, each a file of JSON.

Every file has one writer at a time: who submits, the training's first rank, and whoever starts it again. Each is
written beside its place and renamed. One that cannot be read is taken for one that is not there, and is said.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeVar

from autoaccum._report.files import beside
from autoaccum._system import safe_files
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

# Phases after which a process writes nothing any more.
FINAL = ("done", "failed", "stopped")
# Requeues without an update after which another one is pointless.
IN_VAIN = 3
_Record = TypeVar("_Record")
# More in one second, and the names are counted up.
_AT_ONCE = 1000
# Of a file of this folder.
_MOST_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """What was asked.

    Attributes:
        name: The job's name in Slurm.
        recipe: The recipe, with its whole path.
        tasks: How many processes train.
        retries: How often it may be started again with smaller micro-batches.
        submitted_at: Seconds since 1970.
        job_id: Slurm's number for it; None until it has one.
    """

    name: str
    recipe: str
    tasks: int
    retries: int
    submitted_at: float
    job_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training is, as its first rank wrote it last.

    Attributes:
        phase: "pre-flight", "training", "done", "stopped" or "failed".
        step: Updates that are done.
        steps: Updates there will be, where that is known.
        epoch: The epoch at work.
        epochs: Epochs there will be, where that is known.
        samples_per_s: By the updates since this was written before.
        loss: Of the last update; None where it is no number.
        micro_batches: In which the last update was cut.
        micro_batch: The largest there may be at work: of the last update, or of the plan, or the target batch.
        error: What ended it.
        written_at: Seconds since 1970.
    """

    phase: str
    step: int = 0
    steps: int | None = None
    epoch: int | None = None
    epochs: int | None = None
    samples_per_s: float | None = None
    loss: float | None = None
    micro_batches: tuple[int, ...] = ()
    micro_batch: int | None = None
    error: str | None = None
    written_at: float = field(default_factory=time.time)


@dataclass(frozen=True, kw_only=True)
class Restart:
    """Why a job was started again.

    Attributes:
        kind: "requeue" (it goes on as it was), "memory" (in smaller micro-batches) or "device" (in a new process).
        reason: For people.
        step: Updates that were done.
        max_micro_batch: The cap from then on; None for none.
        at: Seconds since 1970.
    """

    kind: str
    reason: str
    step: int
    max_micro_batch: int | None = None
    at: float = field(default_factory=time.time)


class JobFolder:
    """The folder of one job.

    Args:
        path: Where it is.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def made(cls, parent: Path, name: str) -> Self:
        """Make a new folder; two that are made at the same moment are two.

        Raises:
            InvalidInputError: It cannot be made.
        """
        stem = f"{plain(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
        if "%" in str(parent):
            raise InvalidInputError(f"--folder {str(parent)!r} has a %, which means something to Slurm; pass another")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for number in range(1, _AT_ONCE):
                path = parent / (stem if number == 1 else f"{stem}-{number}")
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                return cls(path)
            reason = f"there are {_AT_ONCE} jobs of this second"
        except OSError as error:
            reason = error.strerror or str(error)
        raise InvalidInputError(
            f"the folder {str(parent)!r} cannot be used for jobs ({reason}); pass --folder with one that you may write "
            "to, and that the nodes see under the same path"
        )

    @property
    def checkpoints(self) -> Path:
        """Where the training's checkpoints are, unless it was told otherwise."""
        return self.path / "checkpoints"

    def log(self, job_id: str, task: int = 0) -> Path:
        """Return where a task's output goes; submitit chooses the name."""
        return self.path / f"{job_id}_{task}_log.out"

    def unreadable(self) -> list[str]:
        """Return the names of those files that are there and cannot be read."""
        names = ("job.json", "progress.json", "restarts.json")
        return [name for name in names if (self.path / name).exists() and self._read(name) is None]

    # --- what was asked -----------------------------------------------------------------------------------------------

    @property
    def submitted(self) -> Submitted | None:
        """What was asked; None where that cannot be read."""
        return _made_of(Submitted, self._read("job.json"))

    def write_submitted(self, submitted: Submitted) -> None:
        """Write what was asked."""
        self._write("job.json", asdict(submitted))

    # --- how far it is ------------------------------------------------------------------------------------------------

    @property
    def progress(self) -> Progress | None:
        """How far it is; None where it has not begun."""
        return _made_of(Progress, self._read("progress.json"))

    def write_progress(self, progress: Progress) -> None:
        """Write how far it is."""
        self._write("progress.json", asdict(progress))

    # --- how often it was started again -------------------------------------------------------------------------------

    @property
    def restarts(self) -> list[Restart]:
        """Every start but the first, in order."""
        content = self._read("restarts.json") or {}
        found = [_made_of(Restart, entry) for entry in content.get("restarts", ())]
        return [restart for restart in found if restart is not None]

    @property
    def max_micro_batch(self) -> int | None:
        """The largest micro-batch that may be tried from now on; None for any."""
        caps = [restart.max_micro_batch for restart in self.restarts if restart.max_micro_batch is not None]
        return min(caps, default=None)

    @property
    def gets_nowhere(self) -> bool:
        """Whether it was requeued again and again without one more update: its time is too short for its start."""
        last = [restart for restart in self.restarts if restart.kind == "requeue"][-IN_VAIN:]
        progress = self.progress
        step = 0 if progress is None else progress.step
        return len(last) == IN_VAIN and all(restart.step == step for restart in last)

    def add_restart(self, restart: Restart) -> None:
        """Note that it is started again."""
        self._write("restarts.json", {"restarts": [asdict(each) for each in (*self.restarts, restart)]})

    # --- what went wrong ----------------------------------------------------------------------------------------------

    def note_failure(self, rank: int, error: str, *, needs_new_process: bool) -> None:
        """Note what ended one process, by itself: one that is killed leaves nothing."""
        content = {"rank": rank, "error": error, "needs_new_process": needs_new_process}
        with contextlib.suppress(InvalidInputError):  # what ended the process is to be seen, not this
            self._write(f"failed-{rank}.json", content)

    def take_failures(self) -> list[dict[str, Any]]:
        """Return what ended processes since this was asked before."""
        found = []
        for path in sorted(self.path.glob("failed-*.json")):
            found.append(self._read(path.name) or {"error": f"{path.name} cannot be read"})
            path.unlink(missing_ok=True)
        return found

    # --- files --------------------------------------------------------------------------------------------------------

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            content = json.loads(safe_files.read(self.path / name, _MOST_BYTES))
        except (OSError, ValueError):
            return None
        return content if isinstance(content, dict) else None

    def _write(self, name: str, content: dict[str, Any]) -> None:
        with beside(self.path / name) as unfinished:
            unfinished.write_text(json.dumps(content, allow_nan=False) + os.linesep, encoding="utf-8")


def plain(name: str) -> str:
    """Return a name as part of a path that no shell and no Slurm reads anything into."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def _made_of(kind: type[_Record], content: dict[str, Any] | None) -> _Record | None:
    """Make a record of what was read; of a file that a later version wrote, what is known here."""
    if content is None:
        return None
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    try:
        return kind(**{name: value for name, value in content.items() if name in known})
    except TypeError:
        return None
