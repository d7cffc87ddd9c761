"""Submits jobs with submitit, which writes the batch script.

The script runs its step in a loop: after each round `again.py` decides whether another follows. Slurm decides whether a
job can run at all; its message is passed on.
"""

from __future__ import annotations

import contextlib
import io
import math
import shlex
import shutil
import sys
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoaccum._launch.slurm import again
from autoaccum._launch.slurm.folder import JobFolder, Submitted, plain
from autoaccum._report.durations import slurm_seconds
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from submitit import SlurmExecutor

# The slowest part of a stop is the checkpoint: at 600 MB/s, 90 s are enough for about 50 GB.
WARNING_S = 90
# submitit counts down time-outs; `task.py` checks for progress instead.
_TIMEOUTS = 1_000_000
_MINUTES_A_DAY = 24 * 60
# Set here, because the requeue depends on them.
_OWN = ("output", "error", "open-mode", "signal", "requeue", "array", "wrap", "parsable", "test-only")


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Options for Slurm, under Slurm's names; None leaves one to the cluster.

    Attributes:
        gpus_per_node: Cards on each node, with one process each.
        tasks_per_node: Processes on each node without cards.
        time: The time limit, in any of Slurm's formats.
        warning_s: Seconds from Slurm's warning to the time limit.
        others: Other options of sbatch, such as "partition" or "mem".
    """

    name: str
    nodes: int = 1
    gpus_per_node: int = 0
    tasks_per_node: int = 1
    time: str | None = None
    cpus_per_task: int | None = None
    warning_s: int = WARNING_S
    others: Mapping[str, str | bool] = field(default_factory=dict)

    @property
    def tasks(self) -> int:
        """The number of processes, each a rank."""
        return self.nodes * (self.gpus_per_node or self.tasks_per_node)

    def parameters(self) -> dict[str, Any]:
        """Return them under submitit's names.

        Raises:
            InvalidInputError: A value is out of range, or an option belongs to autoaccum.
        """
        for name in ("nodes", "tasks_per_node", "cpus_per_task", "warning_s"):
            value = getattr(self, name)
            if value is not None and value < 1:
                option = "signal-delay" if name == "warning_s" else name.replace("_", "-")
                raise InvalidInputError(f"--{option} {value} must be at least 1")
        if self.gpus_per_node < 0:
            raise InvalidInputError(f"--gpus-per-node {self.gpus_per_node} must be 0 or more; 0 is for the CPU")
        for name in self.others:
            if name in _OWN:
                raise InvalidInputError(f"--slurm {name}=... is set by autoaccum itself; omit it")
        return {
            "job_name": self.name,
            "nodes": self.nodes,
            "gpus_per_node": self.gpus_per_node or None,
            "ntasks_per_node": self.gpus_per_node or self.tasks_per_node,
            "time": None if self.time is None else minutes_of(self.time),
            "cpus_per_task": self.cpus_per_task,
            "signal_delay_s": self.warning_s,
            "stderr_to_stdout": True,
            "wckey": None,  # submitit would set it to its own name
            # Otherwise the others would wait for a process that failed.
            "srun_args": ["--kill-on-bad-exit=1"],
            "additional_parameters": {"requeue": True, **self.others},
        }


def minutes_of(text: str) -> int:
    """Return the minutes of a time limit in one of Slurm's formats, rounded up.

    Raises:
        InvalidInputError: It is in none of them, or zero.
    """
    seconds = slurm_seconds(text)
    if not seconds:
        raise InvalidInputError(
            f"--time {text!r} is not a time limit of Slurm; write minutes (90), hours:minutes:seconds (12:00:00) "
            "or days-hours (2-12)"
        )
    return math.ceil(seconds / 60)


def script_of(resources: Resources, parent: Path) -> str:
    """Return the batch script that would be submitted, without side effects.

    Raises:
        InvalidInputError: An option cannot be used, or submitit is not installed.
    """
    folder = parent.absolute() / f"{plain(resources.name)}-DATE-TIME"
    with tempfile.TemporaryDirectory() as nowhere:
        # submitit makes the folder of an executor.
        executor = _executor(resources, JobFolder(Path(nowhere)))
        text = executor._make_submission_file_text(executor._submitit_command_str, "")
        return text.replace(nowhere, str(folder))


def submit(
    resources: Resources, parent: Path, task: Callable[[JobFolder], Any], submitted: Submitted
) -> tuple[str, JobFolder]:
    """Submit a job.

    Args:
        resources: The options for Slurm.
        parent: Where the job's folder is made.
        task: Makes the job's task, given its folder.
        submitted: The record of the job, stored in its folder.

    Returns:
        The job's id in Slurm, and its folder.

    Raises:
        InvalidInputError: Slurm is missing or rejects the job.
    """
    if shutil.which("sbatch") is None:
        raise InvalidInputError(
            "there is no Slurm here (no sbatch on the PATH); submit from a machine of the cluster, or use "
            "--dry-run to see what would be submitted"
        )
    resources.parameters()
    folder = JobFolder.made(parent.absolute(), resources.name)
    try:
        folder.write_submitted(submitted)
        job_id = _accepted(_executor(resources, folder), task(folder))
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    folder.write_submitted(replace(submitted, job_id=job_id))
    return job_id, folder


def _accepted(executor: SlurmExecutor, task: Any) -> str:
    from submitit.core.utils import FailedJobError, FailedSubmissionError  # noqa: PLC0415

    try:
        with contextlib.redirect_stderr(io.StringIO()):  # submitit prints what it then raises
            return str(executor.submit(task).job_id)
    except (FailedJobError, FailedSubmissionError) as error:
        words = "; ".join(line.removeprefix("sbatch: ").removeprefix("error: ") for line in str(error).splitlines())
        raise InvalidInputError(f"Slurm rejected the job: {words}") from error


def _executor(resources: Resources, folder: JobFolder) -> SlurmExecutor:
    parameters = resources.parameters()
    executor: SlurmExecutor = _kind_of_executor()(folder.path, max_num_timeout=_TIMEOUTS)
    has_time = parameters["time"] is not None
    if not has_time:
        # submitit needs a time; without one in the script, the partition's default applies.
        parameters["time"] = 365 * _MINUTES_A_DAY
    executor.has_time = has_time  # type: ignore[attr-defined]
    executor.update_parameters(**parameters, setup=_setup(), teardown=_teardown(folder))
    return executor


def _setup() -> list[str]:
    return [
        "stopped=",
        "trap 'stopped=1' TERM  # what runs below hears it too, and leaves a checkpoint",
        "while true; do",
        f'echo "{again.MARK}"',
    ]


def _teardown(folder: JobFolder) -> list[str]:
    asks = shlex.join([sys.executable, "-m", again.__name__, str(folder.path)])
    return [
        "code=$?",
        'if [ "$code" = 0 ] || [ "$stopped" ]; then exit "$code"; fi',
        f'{asks} "$SLURM_JOB_ID" "$code" || exit "$code"',
        "done",
    ]


def _kind_of_executor() -> Any:
    # Here, because submitit is an extra.
    try:
        from submitit import SlurmExecutor  # noqa: PLC0415
    except ImportError:
        raise InvalidInputError(
            "submitit, which submits jobs, is not installed: pip install 'autoaccum[slurm]'"
        ) from None

    class Executor(SlurmExecutor):
        """An executor that also writes scripts without Slurm, and without a time limit."""

        has_time = True

        @classmethod
        def affinity(cls) -> int:
            return 2

        def _make_submission_file_text(self, command: str, uid: str) -> str:
            kept = self.parameters
            try:
                if not self.has_time:
                    self.parameters = {**kept, "time": None}
                return super()._make_submission_file_text(command, uid)
            finally:
                self.parameters = kept

    return Executor
