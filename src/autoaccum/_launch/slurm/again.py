"""Asked by the batch script where its step has ended badly: start it again, here and now?

    python -m autoaccum._launch.slurm.again FOLDER JOB_ID EXIT_CODE

ends with 0 for yes. A step that ran out of memory is started again from its checkpoint, in micro-batches half as large;
one whose device was lost, as it was; any other end is the job's. Slurm kills the processes of a step, and leaves the
script that started them alone: so this runs within the same allocation, and nothing waits in the queue again. A step
that was warned of its time limit before it could listen is requeued, as it would have done itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._launch.last_words import slurm_words
from autoaccum._launch.launchers import KILLED
from autoaccum._launch.slurm.folder import FINAL, JobFolder, Restart
from autoaccum._system import safe_files
from autoaccum._system.output import write_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from autoaccum._launch.slurm.folder import Progress

# Written by the batch script before each start.
MARK = "autoaccum: start"
# 128 + a signal that warns and that nobody handled yet: SIGUSR2, or SIGUSR1 where submitit is told so.
_UNHEARD = (128 + signal.SIGUSR2, 128 + signal.SIGUSR1)
# What of a log is looked at: Slurm's words are its last.
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class Ended:
    """How a step ended.

    Attributes:
        code: srun's exit code.
        log: The end of its log.
        failures: What its processes noted of their own errors; those that were killed noted nothing.
    """

    code: int
    log: str
    failures: Sequence[dict[str, Any]] = ()

    @property
    def lack_of_memory(self) -> str | None:
        """What shows that it was killed for its memory; None where nothing does."""
        said = slurm_words(self.log.rpartition(MARK)[2], self.code)
        if said is not None:
            return said
        # Where one process fails the others are killed, and then the signal says nothing.
        if self.code == KILLED and not self.failures:
            return "killed by SIGKILL, which the kernel sends where memory is short"
        return None

    @property
    def loss_of_device(self) -> str | None:
        """What shows that a new process can go on; None where nothing does."""
        found = [failure["error"] for failure in self.failures if failure.get("needs_new_process")]
        return found[0] if found else None


def next_start(folder: JobFolder, ended: Ended) -> Restart | str:
    """Return how a job is to be started again, or why not.

    Args:
        folder: The job's.
        ended: How its step ended.
    """
    submitted, progress = folder.submitted, folder.progress
    if submitted is None:
        return f"what was asked for cannot be read ({folder.path / 'job.json'}), so it is not started again"
    step = 0 if progress is None else progress.step
    if ended.code in _UNHEARD and not folder.gets_nowhere:
        return Restart(kind="requeue", reason="warned of the time limit before it could listen", step=step)
    lack = ended.lack_of_memory
    reason = lack or ended.loss_of_device
    if reason is None:
        return "it did not end for want of memory, so it is not started again"
    used = sum(restart.kind != "requeue" for restart in folder.restarts)
    if used >= submitted.retries:
        return f"{reason}; it was started again {used} times, and --retries {submitted.retries} allows no more"
    if lack is None:
        return Restart(kind="device", reason=reason, step=step)
    return _smaller(progress, folder.max_micro_batch, reason)


def _smaller(progress: Progress | None, cap: int | None, reason: str) -> Restart | str:
    if progress is None or progress.phase != "training" or progress.micro_batch is None:
        return f"{reason}; that was before the training, which smaller micro-batches would not change"
    largest = min(progress.micro_batch, cap or progress.micro_batch)
    if largest == 1:
        return f"{reason}; and micro-batches of one sample leave nothing to make smaller"
    return Restart(kind="memory", reason=reason, step=progress.step, max_micro_batch=largest // 2)


def main(arguments: Sequence[str]) -> int:
    """Decide, note it, and say it."""
    folder, job_id, code = JobFolder(Path(arguments[0])), arguments[1], int(arguments[2])
    found = next_start(folder, Ended(code, _tail(folder.log(job_id)), folder.take_failures()))
    if isinstance(found, Restart) and found.kind == "requeue":
        folder.add_restart(found)
        _say(f"{found.reason}; requeued")
        subprocess.run(["scontrol", "requeue", job_id], check=False)  # noqa: S603, S607 - wherever Slurm is; no shell
        return 1
    if isinstance(found, Restart):
        folder.add_restart(found)
        cap = "" if found.max_micro_batch is None else f" in micro-batches of at most {found.max_micro_batch}"
        _say(f"{found.reason}; started again{cap}")
        return 0
    _say(found)
    progress = folder.progress
    if progress is not None and progress.phase not in FINAL:
        folder.write_progress(replace(progress, phase="failed", error=found))  # of its own it could not
    return 1


def _tail(path: Path) -> str:
    try:
        with safe_files.open_regular(path, follows=True) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def _say(text: str) -> None:
    write_line(f"autoaccum: {text}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
