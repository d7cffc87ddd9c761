"""`autoaccum slurm`: writes a batch script for a command, and submits it.

The script is for a person to read, keep and edit; it needs this package only for `autoaccum run`. Slurm decides whether
the job can run; its message is passed on. This module does not import torch.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from autoaccum._launch.run import Options, check, sizes_within, world_size_of
from autoaccum._system import files
from autoaccum.errors import InvalidInputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

WARN_S = 120
RESTARTS = 20
# The script depends on these.
_OWN = {"signal", "requeue", "no-requeue", "open-mode", "ntasks-per-node", "wrap", "parsable", "test-only"}
_OPTIONS = {"nodes", "gpus-per-node"}  # of ours
_MOST_SLURM = 2**31 - 1  # its numbers have 32 bits

_SCRIPT = """\
#!/bin/bash
{header}
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@{warn_s}
#SBATCH --requeue
#SBATCH --open-mode=append

# {warn_s} s before the time limit Slurm warns this script. The training gets SIGTERM, writes a checkpoint and ends, and
# the job returns to the queue, where the same command resumes. So does a preempted job; a cancelled one does not.
max_restarts={restarts}
job=${{SLURM_ARRAY_JOB_ID:+${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID}}
job=${{job:-$SLURM_JOB_ID}}
{setup}
asked=
trap 'asked=1; scancel --signal=TERM "$job"' USR1 # to the processes of srun, not to this script
trap 'asked=1' TERM # Slurm sends it to those processes as well

{command} &
run=$!
wait "$run"
code=$?
while kill -0 "$run" 2>/dev/null; do # a signal has ended the wait, not the training
    wait "$run"
    code=$?
done

# A job that was cancelled is no longer RUNNING; one that is preempted has a PreemptTime, and maybe no signal for this.
shown=$(scontrol show job "$job")
[[ $shown = *" PreemptTime=2"* ]] && asked=1
if [ -n "$asked" ] && [ "$code" != 0 ] && [[ $shown = *JobState=RUNNING* ]]; then
    if [ "${{SLURM_RESTART_COUNT:-0}}" -ge "$max_restarts" ]; then
        echo "autoaccum: the job was restarted $max_restarts times, so it is not requeued again" >&2
    elif scontrol requeue "$job"; then
        echo "autoaccum: requeued" >&2
    else
        echo "autoaccum: Slurm did not requeue the job; submit it again, and it resumes from its checkpoint" >&2
    fi
fi
exit "$code"
"""
_RENDEZVOUS = """\
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))
"""


@dataclass(frozen=True, kw_only=True)
class Submission:
    """A job for Slurm.

    Attributes:
        command: The training, as it runs on each node.
        run: The options of `autoaccum run` around it.
        nodes: Nodes.
        gpus: GPUs on each node; torchrun starts a process for each.
        sbatch: Other options of sbatch, by name; None for those that the cluster decides, "" for one without a value.
        warn_s: Seconds from Slurm's warning to the time limit.
        restarts: How often the job may be requeued.
        preflight: A script that `autoaccum report` judges before the training; None for none.
    """

    command: Sequence[str]
    run: Options = field(default_factory=Options)
    nodes: int = 1
    gpus: int = 0
    sbatch: Mapping[str, str | int | None] = field(default_factory=dict)
    warn_s: int = WARN_S
    restarts: int = RESTARTS
    preflight: str | None = None

    @property
    def name(self) -> str:
        """The job's name: that of the script in its command, as far as it can be part of a file's name."""
        scripts = [Path(word).stem for word in self.command if word.endswith(".py")]
        found = (scripts or [Path(self.command[0]).name])[0]
        return str(self.sbatch.get("job-name") or re.sub(r"[^\w.-]+", "-", found))

    def script(self) -> str:
        """Return the batch script.

        Raises:
            InvalidInputError: The command or an option cannot be used.
        """
        self._check()
        given: dict[str, str | int | None] = {"job-name": self.name, "nodes": self.nodes}
        given |= {"gpus-per-node": self.gpus or None, "mincpus": self._least_cores, "output": "%x-%j.out"}
        if self.sbatch.get("array"):
            given["output"] = "%x-%A_%a.out"
        given |= {name: value for name, value in self.sbatch.items() if value is not None}
        own = f"{shlex.quote(sys.executable)} -m autoaccum"
        cpus = self.sbatch.get("cpus-per-task")  # which srun does not take over from sbatch
        srun = "srun --kill-on-bad-exit=1" + ("" if cpus is None else f" --cpus-per-task={shlex.quote(str(cpus))}")
        setup = _RENDEZVOUS if self._uses_torchrun and self.nodes > 1 else ""
        if self.preflight is not None:
            setup += f"srun --nodes=1 --ntasks=1 {own} report {shlex.quote(self.preflight)} || exit\n"
        return _SCRIPT.format(
            header="\n".join(
                f"#SBATCH --{name}" + ("" if value == "" else f"={shlex.quote(str(value))}")
                for name, value in given.items()
                if value is not None
            ),
            warn_s=self.warn_s,
            restarts=self.restarts,
            setup=setup,
            command=f"{own} run {' '.join(self._run_options())} -- {srun} {self._launched()}",
        )

    @property
    def _uses_torchrun(self) -> bool:
        return Path(self.command[0]).name == "torchrun"

    @property
    def _least_cores(self) -> int | None:
        """A core for each of torchrun's ranks on a node: Slurm gives a task one. None where the user or nothing says.

        Only a least number, so that what the cluster gives with a GPU stays.
        """
        if not self._uses_torchrun or any(name.startswith("cpus-per-") and self.sbatch[name] for name in self.sbatch):
            return None
        ranks = str(self.gpus)
        for word, following in pairwise([*self.command, ""]):
            name, equals, value = word.partition("=")
            if name.replace("_", "-") == "--nproc-per-node":
                ranks = value if equals else following
        return int(ranks) if ranks.isdecimal() and int(ranks) > 1 else None

    def _launched(self) -> str:
        """Return the command, quoted; torchrun gets those of its options that follow from the job and are not given."""
        first, *rest = self.command
        names = {word.split("=")[0].replace("_", "-") for word in rest}
        words = []
        if self._uses_torchrun:
            if "--nproc-per-node" not in names:
                words.append(f"--nproc-per-node={max(self.gpus, 1)}")
            if self.nodes > 1 and "--rdzv-endpoint" not in names:
                words += [f"--nnodes={self.nodes}", "--rdzv-backend=c10d", '--rdzv-id="$SLURM_JOB_ID"']
                words.append('--rdzv-endpoint="$head:$port"')
            elif self.nodes == 1 and not names & {"--standalone", "--rdzv-endpoint", "--master-addr"}:
                words.append("--standalone")
        return " ".join([shlex.quote(first), *words, *map(shlex.quote, rest)])

    def _run_options(self) -> list[str]:
        numbers = {
            "grace": self.warn_s,
            "retries": self.run.retries,
            "target-batch": self.run.target_batch,
            "micro-batch": self.run.micro_batch,
            "world-size": self.run.world_size,
        }
        given = [f"--{name}={value}" for name, value in numbers.items() if value is not None]
        return given + ["--no-placeholder"] * self.run.no_placeholder

    def _check(self) -> None:
        check(self.command, self.run)
        for name, value in {"nodes": self.nodes, "warn-before": self.warn_s}.items():
            if not 1 <= value <= _MOST_SLURM:
                raise InvalidInputError(f"--{name} {value} must be from 1 to {_MOST_SLURM}")
        for name, value in {"gpus-per-node": self.gpus, "max-restarts": self.restarts}.items():
            if not 0 <= value <= _MOST_SLURM:
                raise InvalidInputError(f"--{name} {value} must be from 0 to {_MOST_SLURM}")
        for name, text in self.sbatch.items():
            _check_option(name, str(text))
        if "/" in self.name:
            raise InvalidInputError(f"--job-name {self.name} cannot be part of a file's name; leave out the slash")
        names = {word.split("=")[0].replace("_", "-") for word in self.command}
        if self.run.target_batch is not None and not (self._uses_torchrun and "--nproc-per-node" in names):
            ranks = self.run.world_size or (
                self.nodes * max(self.gpus, 1)
                if self._uses_torchrun
                else world_size_of(self.command, {"SLURM_NTASKS": str(self.nodes)})
            )
            sizes_within(self.run.target_batch, ranks)


def _check_option(name: str, text: str) -> None:
    if name in _OWN:
        raise InvalidInputError(f"--slurm {name} is set by autoaccum itself; leave it out")
    if name in _OPTIONS:
        raise InvalidInputError(f"--slurm {name}={text} is an option of autoaccum's own; write --{name} {text}")
    if "\n" in text or not name.replace("-", "").isalnum():
        raise InvalidInputError(f"--slurm {name}={text!r} is not an option of sbatch; write --slurm KEY=VALUE")


def submit(submission: Submission) -> str:
    """Submit a job; return its id, and where its batch script is kept, as text for a person.

    Raises:
        InvalidInputError: The job cannot be used, Slurm is missing, or it refuses the job.
    """
    text = submission.script()
    if shutil.which("sbatch") is None:
        raise InvalidInputError(
            "there is no Slurm here (no sbatch on the PATH); submit from a machine of the cluster, or print the script "
            "with --dry-run"
        )
    script = os.fsencode(text)  # the bytes of the command line, whatever they are
    asked = subprocess.run(["sbatch", "--parsable"], input=script, capture_output=True, check=False)  # noqa: S607 - wherever Slurm is
    if asked.returncode != 0:
        said = os.fsdecode(asked.stderr).splitlines()
        lines = [line.removeprefix("sbatch: ").removeprefix("error: ") for line in said]
        raise InvalidInputError(f"Slurm refused the job: {'; '.join(lines)}")
    job_id = os.fsdecode(asked.stdout).strip().split(";")[0]  # a cluster's name may follow
    path = Path(f"{submission.name}-{job_id}.sbatch")
    try:
        files.write(path, script)
    except OSError as error:  # the job is in the queue, so this is no failure
        return f"submitted job {job_id}; its batch script cannot be kept in {path} ({error.strerror})"
    return f"submitted job {job_id}; its batch script is {path}"
