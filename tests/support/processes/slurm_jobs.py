"""Jobs on the real Slurm that the tests find, submitted by the command line."""

import os
import re
import shutil
import subprocess
import sys
import time
from typing import ClassVar

import pytest

# For a machine that others use, too.
_PATIENCE_S = 240
_ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED")


def missing_slurm():
    """Why there is no Slurm to test with; None where there is one."""
    if shutil.which("sinfo") is None:
        return "Slurm is not installed; scripts/slurm_here.sh start installs it"
    asked = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, timeout=30, check=False)
    if asked.returncode != 0:
        return f"Slurm does not answer; scripts/slurm_here.sh start starts one ({asked.stderr.strip()[-80:]})"
    return None


def number_of_nodes():
    """How many nodes the Slurm here has; 0 where there is none."""
    if missing_slurm() is not None:
        return 0
    listed = subprocess.run(["sinfo", "--noheader", "--format=%N"], capture_output=True, text=True, check=True).stdout
    words = ["scontrol", "show", "hostnames", ",".join(listed.split())]
    return len(set(subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()))


needs_slurm = pytest.mark.skipif(missing_slurm() is not None, reason=str(missing_slurm()))
needs_two_nodes = pytest.mark.skipif(
    number_of_nodes() < 2, reason="Slurm has fewer than two nodes; scripts/slurm_here.sh start starts one of two"
)


def command(*arguments, folder=None, **variables):
    """Run `autoaccum slurm`; jobs inherit the variables."""
    words = [sys.executable, "-m", "autoaccum", "slurm", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | variables
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


class Job:
    """A job that was submitted, to be waited for and looked at."""

    _known: ClassVar[list] = []

    def __init__(self, folder, *arguments, **variables):
        self.folder = folder
        ran = command("--job-name", "job", *arguments, folder=folder, **variables)
        assert ran.returncode == 0, ran.stderr
        self.id = re.search(r"job (\d+)", ran.stdout)[1]
        self._hurried = False
        self._known.append(self)

    @property
    def state(self):
        """What Slurm says, and whether it waits for the time at which it may begin again."""
        words = ["squeue", "--noheader", "--states=all", f"--jobs={self.id}", "--format=%T %r"]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    @property
    def log(self):
        return "".join(path.read_text(errors="replace") for path in sorted(self.folder.glob(f"job-{self.id}*.out")))

    def warn(self, task=""):
        """Signal the batch script, as Slurm does before the time limit."""
        subprocess.run(["scancel", "--signal=USR1", "--batch", f"{self.id}{task}"], check=True)

    def cancel(self):
        subprocess.run(["scancel", self.id], check=False)

    def until(self, holds):
        """Wait until something holds; no job that is requeued meanwhile need wait its two minutes."""
        end = time.monotonic() + _PATIENCE_S
        while not holds():
            assert time.monotonic() < end, f"{self.state}\n{self.log}"
            for job in self._known:
                job._hurry()
            time.sleep(0.3)

    def _hurry(self):
        waits = "BeginTime" in self.state
        if waits and not self._hurried:
            # Not at once: in the second in which it was requeued its node still refuses it.
            subprocess.run(["scontrol", "update", f"JobId={self.id}", "StartTime=now+2"], check=False)
        self._hurried = waits

    def ended(self):
        self.until(lambda: all(line.startswith(_ENDS) for line in self.state.splitlines()))
        return self.state.splitlines()[0].split()[0]
