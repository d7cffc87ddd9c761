"""Jobs on the real Slurm that the tests find, and what they train."""

# ruff: noqa: S607 - Slurm's commands are wherever Slurm is

import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import ClassVar

import pytest
from typer.testing import CliRunner

from autoaccum._cli import app
from autoaccum._launch.slurm.folder import JobFolder

# For a machine that others use, too.
_PATIENCE_S = 180

# A run with a random mask and shuffling, at a pace that lets something happen to it; WAITS_S is the pace.
RECIPE = """
import os, time
import torch
import autoaccum

class Waits(autoaccum.Callback):
    def on_step(self, report, *, epoch):
        time.sleep(float(os.environ.get("WAITS_S", "0")))

def job():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(0, 2, (64,)))
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Dropout(), torch.nn.Linear(8, 2))
    loader = torch.utils.data.DataLoader(data, batch_size=16, shuffle=True)
    return autoaccum.Job(model, loader, 32, micro_batch=8, device="cpu", seed=1, callbacks=[Waits()])
"""

# Every process adds its number to those of the others, and writes down what it is and what came out.
RANKS = """
import os, pathlib
import torch
import torch.distributed as dist

def job():
    dist.init_process_group("gloo")
    total = torch.tensor([float(os.environ["RANK"]) + 1])
    dist.all_reduce(total)
    dist.destroy_process_group()
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    text = " ".join([*(os.environ[name] for name in names), str(total.item())])
    pathlib.Path(__file__).with_name("rank-" + os.environ["RANK"]).write_text(text)
    os._exit(0)  # nothing is to be trained; an exit that can be caught is bad input
"""

# 64 MiB a sample beside a process of some 730 MiB (VmHWM): 16 at once are over 1,500 MiB, and wait to be killed; 8 are
# not.
HUNGRY = """
import time
import torch
import autoaccum

def forward(model, batch):
    held = torch.ones(len(batch[0]), 64, 2**18)
    if len(held) > 8:
        time.sleep(60)
    return model(batch[0])

def job():
    torch.manual_seed(0)
    data = [(torch.randn(32, 8), torch.randint(0, 2, (32,))) for _ in range(2)]
    loss = torch.nn.CrossEntropyLoss()
    return autoaccum.Job(torch.nn.Linear(8, 2), data, 32, loss, micro_batch=16, device="cpu", forward=forward, seed=1)
"""


def missing_slurm():
    """Why there is no Slurm to test with; None where there is one."""
    if shutil.which("sinfo") is None:
        return "Slurm is not installed; scripts/slurm_here.sh start installs it"
    asked = subprocess.run(["sinfo", "--noheader"], capture_output=True, text=True, timeout=30, check=False)
    if asked.returncode != 0:
        return f"Slurm does not answer; scripts/slurm_here.sh start starts one ({asked.stderr.strip()[-80:]})"
    return None


needs_slurm = pytest.mark.skipif(missing_slurm() is not None, reason=str(missing_slurm()))


def command(*arguments, **variables):
    """Run the command line; what its jobs inherit is `variables` too."""
    return CliRunner().invoke(app.app, [str(argument) for argument in arguments], env=variables)


class Job:
    """A job that was submitted, to be waited for and looked at."""

    _known: ClassVar[list] = []

    def __init__(self, job_id, folder):
        self.id = job_id
        self.folder = JobFolder(Path(folder))
        self._hurried = False
        self._known.append(self)

    @classmethod
    def submitted(cls, folder, text, *options, **variables):
        recipe = folder / "recipe.py"
        recipe.write_text(text)
        variables = {"OMP_NUM_THREADS": "1"} | variables
        ran = command("slurm", recipe, "--folder", folder / "jobs", "--json", *options, **variables)
        assert ran.exit_code == 0, ran.stderr
        document = json.loads(ran.stdout)
        return cls(document["job_id"], document["folder"])

    @property
    def state(self):
        """What Slurm says, and whether it waits for the time at which it may begin again."""
        return self._asked("%T %r")

    @property
    def step(self):
        progress = self.folder.progress
        return 0 if progress is None else progress.step

    @property
    def minutes(self):
        """Whole minutes that it has been running."""
        return int(self._asked("%M").split(":")[-2])  # M:SS, in the first hour

    def _asked(self, form):
        asked = subprocess.run(
            ["squeue", "--noheader", "--states=all", f"--jobs={self.id}", f"--format={form}"],
            capture_output=True,
            text=True,
            check=True,
        )
        return asked.stdout.strip()

    @property
    def log(self):
        path = self.folder.log(self.id)
        return path.read_text(errors="replace") if path.exists() else ""

    def signal(self, name, *options):
        """Send a signal as Slurm sends it: to every process of every step, or, with --batch, to the script."""
        subprocess.run(["scancel", f"--signal={name}", *options, self.id], check=True)

    def limit_to(self, minutes):
        subprocess.run(["scontrol", "update", f"JobId={self.id}", f"TimeLimit={minutes}"], check=True)

    def cancel(self):
        subprocess.run(["scancel", self.id], check=True)

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
        """Wait for its end and return its state."""
        self.until(lambda: self.state.startswith(("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY")))
        return self.state.split()[0]
