"""Lists the jobs of a folder, from Slurm's state and the files that the jobs wrote.

Slurm forgets a job some minutes after its end, and is not on every machine; then only the files count.
"""

from __future__ import annotations

import subprocess
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from autoaccum._launch.slurm.folder import FINAL, JobFolder
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from autoaccum._launch.slurm.folder import Progress, Restart, Submitted

# For a busy controller.
_PATIENCE_S = 20


@dataclass(frozen=True)
class Listed:
    """One job.

    Attributes:
        folder: Its folder.
        state: Slurm's state, in lower case; otherwise the last phase that the job wrote, with a question mark if it
            may have changed.
        reason: Why Slurm keeps it pending, or ended it.
        submitted: The submission; None if it cannot be read.
        progress: The progress; None before the first start.
        restarts: Every start but the first.
        problems: A text for each unreadable file and each contradiction.
    """

    folder: Path
    state: str
    reason: str | None
    submitted: Submitted | None
    progress: Progress | None
    restarts: Sequence[Restart]
    problems: Sequence[str]

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON types."""
        job_id = None if self.submitted is None else self.submitted.job_id
        return {"job_id": job_id, **asdict(self), "folder": str(self.folder)}


def jobs_in(parent: Path) -> list[Listed]:
    """Return the jobs of a folder, oldest first.

    Raises:
        InvalidInputError: There is no such folder.
    """
    if not parent.is_dir():
        raise InvalidInputError(
            f"there is no folder {str(parent)!r}; pass the --folder that was passed to `autoaccum slurm`"
        )
    folders = [JobFolder(path.parent) for path in parent.absolute().glob("*/job.json")]
    submitted = {folder.path: folder.submitted for folder in folders}
    states = states_of([one.job_id for one in submitted.values() if one is not None and one.job_id is not None])
    listed = [_listed(folder, submitted[folder.path], states) for folder in folders]
    return sorted(listed, key=lambda one: (0.0 if one.submitted is None else one.submitted.submitted_at, one.folder))


def _listed(folder: JobFolder, submitted: Submitted | None, states: Mapping[str, tuple[str, str]]) -> Listed:
    progress = folder.progress
    job_id = None if submitted is None else submitted.job_id
    problems = [f"{name} cannot be read" for name in folder.unreadable()]
    state, reason = states.get(job_id or "", ("", ""))
    if not state:
        state = "unknown" if progress is None else progress.phase
        if progress is not None and progress.phase not in FINAL:
            state += "?"
    elif job_id is not None and state not in ("pending", "configuring") and not folder.log(job_id).exists():
        problems.append("it has started and there is no log: do the nodes see this folder under the same path?")
    return Listed(folder.path, state, reason or None, submitted, progress, folder.restarts, problems)


def states_of(job_ids: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return the state, in lower case, and its reason for each job that Slurm still knows."""
    wanted = set(job_ids)
    if not wanted:
        return {}
    # All of the user's jobs, because squeue fails for a list with an unknown job.
    running = _asked(["squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r"])
    found = {row[0]: (row[1].lower(), _said(row[2])) for row in running if len(row) == 3 and row[0] in wanted}  # noqa: PLR2004
    missing = wanted - found.keys()
    if missing:
        columns = "--format=JobID,State,Reason"
        kept = _asked(["sacct", "--noheader", "--parsable2", "--allocations", columns, f"--jobs={','.join(missing)}"])
        # "CANCELLED by 1000" is one state
        found |= {row[0]: (row[1].split()[0].lower(), _said(row[2])) for row in kept if len(row) == 3 and row[1]}  # noqa: PLR2004
    return found


def _said(reason: str) -> str:
    return "" if reason in ("None", "") else reason


def _asked(command: Sequence[str]) -> list[list[str]]:
    """Return the output lines of a Slurm command, split at the bars; none if it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)  # noqa: S603 - no shell
    except (OSError, subprocess.TimeoutExpired):
        return []
    return [line.split("|") for line in ran.stdout.splitlines()] if ran.returncode == 0 else []
