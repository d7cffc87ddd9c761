"""The task of every process of a Slurm job: loads the recipe, calls `fit`, and requeues the job if necessary.

submitit unpickles a `Task` on the node and calls it; before a requeue it asks the task what to run next. A process that
fails records its error, so that `again.py` knows it was not killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from autoaccum._engine.dtensor import is_sharded
from autoaccum._launch.recipe import load_recipe
from autoaccum._launch.recipe_exit_guard import Stopped, exits_refused
from autoaccum._launch.slurm import device_check
from autoaccum._launch.slurm.folder import IN_VAIN, JobFolder, Restart
from autoaccum._launch.slurm.progress import ProgressFile
from autoaccum._launch.slurm.stop import Stop
from autoaccum._oom import first_line, is_oom
from autoaccum._system.environment import MAX_MICRO_BATCH
from autoaccum._system.notices import Notices
from autoaccum._system.own_distribution import __version__
from autoaccum._training.api import fit
from autoaccum._training.loggers import JSONLinesLog
from autoaccum.errors import (
    AutoaccumError,
    DeviceLostError,
    StartAgainError,
    StateDamagedError,
    UpdateCompleteError,
)

if TYPE_CHECKING:
    from submitit import JobEnvironment

    from autoaccum._launch.job import Job
    from autoaccum._records import FitResult


@dataclass(frozen=True)
class Task:
    """A training that submitit can start and restart. It is pickled, so if it moves, its former name must stay.

    Attributes:
        recipe: The recipe, with its absolute path.
        folder: The job's folder.
        overrides: Arguments of `fit` that replace the recipe's.
        checks: Whether to check the device first.
    """

    recipe: str
    folder: str
    overrides: dict[str, Any] = field(default_factory=dict)
    checks: bool = True

    def __call__(self) -> dict[str, Any]:
        """Train; return steps, samples and seconds.

        Raises:
            SystemExit: A signal stopped it, and the job is requeued if it should be.
        """
        # Here, because submitit is an extra.
        from submitit import JobEnvironment  # noqa: PLC0415

        return _Run(self, JobEnvironment()).run()

    def checkpoint(self) -> Any:
        """Return what submitit runs after a requeue: the same task, which resumes from its checkpoint."""
        return resubmission_of(self)


def resubmission_of(task: Any) -> Any:
    """Return a task in submitit's form for a requeue."""
    from submitit.helpers import DelayedSubmission  # noqa: PLC0415 - as above

    return DelayedSubmission(task)


class _Run:
    """One start of a task in one process."""

    def __init__(self, task: Task, environment: JobEnvironment) -> None:
        self._task = task
        self._environment = environment
        self._rank = environment.global_rank
        self._folder = JobFolder(Path(task.folder))
        self._notices = Notices(silent=self._rank != 0)
        self._progress: ProgressFile | None = None

    def run(self) -> dict[str, Any]:
        self._notices.say(f"{__version__}, job {self._environment.job_id}, {self._task.recipe}")
        if self._rank == 0:
            self._note_requeue()
            self._progress = ProgressFile(self._folder, self._notices)
        stop = Stop(getattr(signal, f"SIG{self._environment.USR_SIG}"))
        try:
            with stop:
                self._set_rank_variables()
                with exits_refused(self._task.recipe):
                    result = self._train()
        except Stopped:
            pass
        except Exception as error:
            text = f"{type(error).__name__}: {first_line(error)}"
            needs_new_process = isinstance(error, DeviceLostError | StateDamagedError | StartAgainError)
            # Work after an update does not depend on the cut. A new process may have the memory; a scheduler that fails
            # for another reason would fail again.
            if isinstance(error, UpdateCompleteError) and error.__cause__ is not None:
                needs_new_process = is_oom(error.__cause__)
            self._folder.note_failure(self._rank, text, needs_new_process=needs_new_process)
            self._end("failed", text)
            raise
        else:
            self._end("done")
            return {"steps": result.steps, "samples": result.samples, "elapsed_s": result.elapsed_s}
        # Here, because the training's frames no longer hold anything.
        return self._follow(stop)

    # --- the training -------------------------------------------------------------------------------------------------

    def _train(self) -> FitResult:
        job = self._job()
        if self._task.checks and isinstance(job.model, nn.Module) and is_sharded([job.model]):
            # The report runs in one process, which cannot make a step of such a model.
            self._notices.say("the model is sharded over ranks, so there is no pre-flight report")
        elif self._task.checks:
            device_check.check(job, self._folder.path / "report.json" if self._rank == 0 else None, self._notices.say)
        return fit(**job.fit_arguments(), progress="auto" if self._rank == 0 else False)

    def _job(self) -> Job:
        job = load_recipe(self._task.recipe)
        chosen: dict[str, Any] = dict(self._task.overrides)
        if job.checkpoint is None:
            chosen.setdefault("checkpoint", self._folder.checkpoints)
        if self._progress is not None:
            log = JSONLinesLog(self._folder.path / "log.jsonl")
            self._progress.target_batch = (
                chosen.get("target_batch") or chosen.get("target_tokens") or job.target_batch or job.target_tokens
            )
            chosen["callbacks"] = [*job.callbacks, log, self._progress]
        if self._folder.restarts:
            chosen["resume"] = "auto"  # resume=False applied to the first start
        cap = self._folder.max_micro_batch
        if cap is not None:
            os.environ[MAX_MICRO_BATCH] = str(cap)
            asked = chosen.get("micro_batch", job.micro_batch)
            if isinstance(asked, int) and asked > cap:
                chosen["micro_batch"] = cap
            self._notices.say(f"micro-batches have at most {cap} samples, because memory ran out before")
        # Made once: pre-flight and training share it and its random initial values.
        chosen["model"] = job.fit_arguments()["model"]
        return job.with_arguments(chosen)

    def _set_rank_variables(self) -> None:
        """Set the variables of torchrun, and choose the process's card."""
        tasks = self._environment.num_tasks
        if tasks == 1:
            return
        from submitit.helpers import TorchDistributedEnvironment  # noqa: PLC0415

        # As under torchrun, every process sees all cards of its node and uses the one of its local rank.
        TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        if self._environment.num_nodes == 1:
            os.environ["MASTER_ADDR"] = "127.0.0.1"  # a node may not resolve its own name
        local = self._environment.local_rank
        if torch.cuda.is_available() and local < torch.cuda.device_count():
            torch.cuda.set_device(local)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _follow(self, stop: Stop) -> dict[str, Any]:
        """Requeue the job after Slurm's warning, in its first process; exit after SIGTERM."""
        if not stop.warned:
            self._end("stopped", "SIGTERM")
            sys.exit(128 + signal.SIGTERM)
        if self._progress is not None:
            self._end("stopped", "requeued")
            self._check_progress()
            reason = "Slurm's warning of the time limit, or of preemption"
            self._folder.add_restart(Restart(kind="requeue", reason=reason, step=self._progress.step))
        # submitit's handler: the first process calls `checkpoint`, requeues and exits; in others it returns.
        try:
            stop.former(getattr(signal, f"SIG{self._environment.USR_SIG}"), None)
        except (OSError, subprocess.SubprocessError) as error:
            text = f"Slurm did not requeue the job ({first_line(error)}); submit it again with the same --checkpoint"
            self._end("failed", text)
            raise AutoaccumError(text) from error
        return {"stopped": True}

    def _check_progress(self) -> None:
        if self._folder.gets_nowhere:
            error = AutoaccumError(
                f"the job was requeued {IN_VAIN} times without a further update, so it is not requeued again; "
                "allow more time (--time), or use a smaller target batch"
            )
            self._end("failed", str(error))
            raise error

    def _note_requeue(self) -> None:
        """Record a requeue from outside: a preemption without a warning, a failed node, or a user's."""
        seen = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        known = sum(restart.kind == "requeue" for restart in self._folder.restarts)
        if seen > known:
            progress = self._folder.progress
            step = 0 if progress is None else progress.step
            reason = "requeued from outside (preempted, its node failed, or by hand)"
            self._folder.add_restart(Restart(kind="requeue", reason=reason, step=step))

    def _end(self, phase: str, error: str | None = None) -> None:
        if self._progress is not None:
            self._progress.end(phase, error)
