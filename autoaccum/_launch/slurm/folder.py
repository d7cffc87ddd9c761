"""A job's folder: its submission, its progress and its restarts, each a JSON file.

Every file has one writer at a time: the submitting command, the training's first rank, or the process that restarts the
job. Files are written under a temporary name and renamed. A file that cannot be read counts as missing, and the list of
jobs names it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self, TypeVar

from autoaccum._system import safe_files
from autoaccum._system.user_files import beside
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from pathlib import Path

# Phases after which a process writes nothing more.
FINAL = ("done", "failed", "stopped")
# After this many requeues without an update, another is pointless.
IN_VAIN = 3
_Record = TypeVar("_Record")
_MOST_IN_A_SECOND = 1000
_MOST_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Submitted:
    """The record of a submission.

    Attributes:
        name: The job's name in Slurm.
        recipe: The recipe, with its absolute path.
        tasks: Processes.
        retries: Restarts allowed with smaller micro-batches.
        submitted_at: Seconds since 1970.
        job_id: Its id in Slurm; None until it has one.
    """

    name: str
    recipe: str
    tasks: int
    retries: int
    submitted_at: float
    job_id: str | None = None


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The state of a training, as last written by its first rank. None means unknown.

    Attributes:
        phase: "pre-flight", "training", "done", "stopped" or "failed".
        step: Updates made.
        steps: Updates in total.
        epoch: The current epoch.
        epochs: Epochs in total.
        samples_per_s: Speed since the file was last written.
        loss: The loss of the last update; None if not finite.
        micro_batches: The cut of the last update.
        micro_batch: The largest possible now: of the last update, of the plan, or the target batch.
        error: What ended the training.
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
    """A start of a job after its first one.

    Attributes:
        kind: "requeue" (unchanged), "memory" (in smaller micro-batches) or "device" (in a new process).
        reason: The reason, as text.
        step: Updates made before.
        max_micro_batch: The cap from then on; None for no cap.
        at: Seconds since 1970.
    """

    kind: str
    reason: str
    step: int
    max_micro_batch: int | None = None
    at: float = field(default_factory=time.time)


class JobFolder:
    """The folder of one job."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def made(cls, parent: Path, name: str) -> Self:
        """Make a new folder; two commands at the same moment get different ones.

        Raises:
            InvalidInputError: The folder cannot be made.
        """
        stem = f"{plain(name)}-{time.strftime('%Y%m%d-%H%M%S')}"
        if "%" in str(parent):
            raise InvalidInputError(f"--folder {str(parent)!r} has a %, which is special to Slurm; pass another")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            for number in range(1, _MOST_IN_A_SECOND):
                path = parent / (stem if number == 1 else f"{stem}-{number}")
                try:
                    path.mkdir()
                except FileExistsError:
                    continue
                return cls(path)
            reason = f"there are already {_MOST_IN_A_SECOND} jobs of this second"
        except OSError as error:
            reason = error.strerror or str(error)
        raise InvalidInputError(
            f"the folder {str(parent)!r} cannot be used for jobs ({reason}); pass --folder with one that you may write "
            "to and that the nodes see under the same path"
        )

    @property
    def checkpoints(self) -> Path:
        """The folder of the training's checkpoints, unless the job sets another."""
        return self.path / "checkpoints"

    def log(self, job_id: str, task: int = 0) -> Path:
        """Return the file of a task's output; submitit chooses the name."""
        return self.path / f"{job_id}_{task}_log.out"

    def unreadable(self) -> list[str]:
        """Return the names of files that exist and cannot be read."""
        names = ("job.json", "progress.json", "restarts.json")
        return [name for name in names if (self.path / name).exists() and self._read(name) is None]

    @property
    def submitted(self) -> Submitted | None:
        """The submission; None if it cannot be read."""
        return _made_of(Submitted, self._read("job.json"))

    def write_submitted(self, submitted: Submitted) -> None:
        """Write the submission."""
        self._write("job.json", asdict(submitted))

    @property
    def progress(self) -> Progress | None:
        """The progress; None before the first start."""
        return _made_of(Progress, self._read("progress.json"))

    def write_progress(self, progress: Progress) -> None:
        """Write the progress."""
        self._write("progress.json", asdict(progress))

    @property
    def restarts(self) -> list[Restart]:
        """Every start but the first, in order."""
        content = self._read("restarts.json") or {}
        found = [_made_of(Restart, entry) for entry in content.get("restarts", ())]
        return [restart for restart in found if restart is not None]

    @property
    def max_micro_batch(self) -> int | None:
        """The current cap on micro-batches; None for no cap."""
        caps = [restart.max_micro_batch for restart in self.restarts if restart.max_micro_batch is not None]
        return min(caps, default=None)

    @property
    def gets_nowhere(self) -> bool:
        """Whether the last requeues made no update, because the job's time is too short for its start."""
        last = [restart for restart in self.restarts if restart.kind == "requeue"][-IN_VAIN:]
        progress = self.progress
        step = 0 if progress is None else progress.step
        return len(last) == IN_VAIN and all(restart.step == step for restart in last)

    def add_restart(self, restart: Restart) -> None:
        """Add a restart."""
        self._write("restarts.json", {"restarts": [asdict(each) for each in (*self.restarts, restart)]})

    def note_failure(self, rank: int, error: str, *, needs_new_process: bool) -> None:
        """Record the error of a rank; a process that is killed records none."""
        content = {"rank": rank, "error": error, "needs_new_process": needs_new_process}
        with contextlib.suppress(InvalidInputError):  # it must not hide the error itself
            self._write(f"failed-{rank}.json", content)

    def take_failures(self) -> list[dict[str, Any]]:
        """Return the errors of ranks, and remove them from the folder."""
        found = []
        for path in sorted(self.path.glob("failed-*.json")):
            found.append(self._read(path.name) or {"error": f"{path.name} cannot be read"})
            path.unlink(missing_ok=True)
        return found

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
    """Return a name as part of a path that neither a shell nor Slurm interprets."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name)


def _made_of(kind: type[_Record], content: dict[str, Any] | None) -> _Record | None:
    """Make a record from a file's content; fields added by later versions are ignored."""
    if content is None:
        return None
    known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    try:
        return kind(**{name: value for name, value in content.items() if name in known})
    except TypeError:
        return None
