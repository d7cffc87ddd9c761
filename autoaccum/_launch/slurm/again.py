"""Decides whether a batch script restarts its failed step.

    python -m autoaccum._launch.slurm.again FOLDER JOB_ID EXIT_CODE

exits with 0 for yes. A step that ran out of memory restarts from its checkpoint in micro-batches half as large; one
that lost its device restarts unchanged; any other failure ends the job. Slurm kills the processes of a step but not the
batch script, so the next step runs in the same allocation without queueing. A step that Slurm warned of its time limit
before it could handle the signal is requeued.
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
# 128 + an unhandled warning: SIGUSR2, or SIGUSR1 if submitit is so configured.
_UNHEARD = (128 + signal.SIGUSR2, 128 + signal.SIGUSR1)
# Slurm's messages are at the end of the log.
_TAIL_BYTES = 64 * 1024


@dataclass(frozen=True)
class StepEnd:
    """How a step ended.

    Attributes:
        code: srun's exit code.
        log: The end of its log.
        failures: The errors that its processes recorded; killed ones record none.
    """

    code: int
    log: str
    failures: Sequence[dict[str, Any]] = ()

    @property
    def lack_of_memory(self) -> str | None:
        """The evidence that it was killed for its memory; None if there is none."""
        line = slurm_words(self.log.rpartition(MARK)[2], self.code)
        if line is not None:
            return line
        # If one process fails, Slurm kills the others, so the signal means nothing.
        if self.code == KILLED and not self.failures:
            return "killed by SIGKILL, which the kernel sends when memory is short"
        return None

    @property
    def loss_of_device(self) -> str | None:
        """The error that a new process would not have; None if there is none."""
        return next((failure["error"] for failure in self.failures if failure.get("needs_new_process")), None)


def next_start(folder: JobFolder, ended: StepEnd) -> Restart | str:
    """Return how to restart a job, or why not."""
    submitted, progress = folder.submitted, folder.progress
    if submitted is None:
        return f"the submission cannot be read ({folder.path / 'job.json'}), so it is not restarted"
    step = 0 if progress is None else progress.step
    if ended.code in _UNHEARD and not folder.gets_nowhere:
        return Restart(kind="requeue", reason="warned of the time limit before it handled the signal", step=step)
    lack = ended.lack_of_memory
    reason = lack or ended.loss_of_device
    if reason is None:
        return "it did not end for lack of memory, so it is not restarted"
    used = sum(restart.kind != "requeue" for restart in folder.restarts)
    if used >= submitted.retries:
        return f"{reason}; it was restarted {used} times, and --retries {submitted.retries} allows no more"
    if lack is None:
        return Restart(kind="device", reason=reason, step=step)
    return _smaller(progress, folder.max_micro_batch, reason)


def _smaller(progress: Progress | None, cap: int | None, reason: str) -> Restart | str:
    if progress is None or progress.phase != "training" or progress.micro_batch is None:
        return f"{reason}; that was before training, where smaller micro-batches do not help"
    largest = min(progress.micro_batch, cap or progress.micro_batch)
    if largest == 1:
        return f"{reason}; micro-batches of one sample cannot be reduced"
    return Restart(kind="memory", reason=reason, step=progress.step, max_micro_batch=largest // 2)


def main(arguments: Sequence[str]) -> int:
    """Make the decision, record it and print it."""
    folder, job_id, code = JobFolder(Path(arguments[0])), arguments[1], int(arguments[2])
    found = next_start(folder, StepEnd(code, _tail(folder.log(job_id)), folder.take_failures()))
    if isinstance(found, Restart) and found.kind == "requeue":
        folder.add_restart(found)
        _say(f"{found.reason}; requeued")
        subprocess.run(["scontrol", "requeue", job_id], check=False)  # noqa: S603, S607 - wherever Slurm is; no shell
        return 1
    if isinstance(found, Restart):
        folder.add_restart(found)
        cap = "" if found.max_micro_batch is None else f" in micro-batches of at most {found.max_micro_batch}"
        _say(f"{found.reason}; restarted{cap}")
        return 0
    _say(found)
    progress = folder.progress
    if progress is not None and progress.phase not in FINAL:
        folder.write_progress(replace(progress, phase="failed", error=found))  # it was killed before it could
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
