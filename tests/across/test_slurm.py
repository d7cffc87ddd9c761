"""Jobs on a real Slurm: from the command line to what is in their folders when they have ended."""

# ruff: noqa: S607 - Slurm's commands are wherever Slurm is
import contextlib
import json
import subprocess
import sys

import pytest
import torch

import autoaccum
from autoaccum._launch import load_recipe
from folders import ROOT
from slurm_jobs import HUNGRY, RANKS, RECIPE, Job, command, needs_slurm

pytestmark = needs_slurm

EXAMPLE = ROOT / "examples" / "slurm.sh"


@contextlib.contextmanager
def submitting(make_folder):
    """A function that submits jobs, and those that it has, by name; cancelled at the end."""
    running = {}

    def submit(name, text, *options, **variables):
        running[name] = Job.submitted(make_folder(name), text, *options, **variables)
        return running[name]

    try:
        yield submit, running
    finally:
        for job in running.values():
            job.cancel()
        for job in running.values():
            job.ended()


@pytest.fixture(scope="module")
def short_jobs(tmp_path_factory):
    """Jobs that end as soon as they have begun, all at once."""
    with submitting(tmp_path_factory.mktemp) as (submit, running):
        submit("ranks", RANKS, "--tasks-per-node", 2)
        submit("too large", RECIPE.replace('device="cpu"', 'device=autoaccum.Simulated("1KiB")'))
        yield running


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """Jobs to which something happens, all at once, so that they wait for Slurm together."""
    with submitting(tmp_path_factory.mktemp) as (submit, running):
        options = ("--time", 30, "--signal-delay", 50, "--no-preflight")
        limited = submit("limited", RECIPE, "--epochs", 1000, *options, WAITS_S="0.2")
        options = ("--epochs", 20, "--target-batch", 16, "--job-name", "tiny")
        disturbed = submit("disturbed", RECIPE, *options, WAITS_S="0.2")
        submit("hungry", HUNGRY, "--epochs", 2, "--mem", "1500M")
        running["example"] = example(tmp_path_factory.mktemp("example"))
        disturbed.until(lambda: disturbed.step >= 3)
        disturbed.signal("USR2")  # as Slurm sends it before the time limit
        running["example"].until(lambda: "epoch 1 done" in running["example"].log)
        running["example"].signal("USR1", "--batch")
        limited.until(lambda: limited.step >= 1)
        # Slurm counts time limits in minutes: so a minute from now at the most, and the warning when it next looks.
        limited.limit_to(minutes=limited.minutes + 1)
        yield running


def example(folder):
    """Submit the script that does without `autoaccum slurm`."""
    (folder / "recipe.py").write_text(RECIPE.replace("seed=1", "seed=1, epochs=10"))
    script = EXAMPLE.read_text().replace("autoaccum fit", f"{sys.executable} -m autoaccum fit")
    (folder / "slurm.sh").write_text(script)
    options = ["--parsable", "--time=5", "--output=%j_0_log.out", "--export=ALL,WAITS_S=0.3"]
    command = ["sbatch", *options, "slurm.sh", "recipe.py"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return Job(ran.stdout.strip(), folder)


def end_of(folder):
    """The model as the newest checkpoint has it."""
    newest = max(folder.glob("step-*.pt"))
    return torch.load(newest, weights_only=True)["modules"][0]["state"]


@pytest.mark.slow  # Slurm counts time limits in minutes, and takes seconds for whatever else it is told
def test_at_its_time_limit_it_is_requeued_and_goes_on_until_it_is_cancelled(jobs):
    job = jobs["limited"]
    job.until(lambda: job.folder.restarts)
    job.limit_to(minutes=30)
    job.until(lambda: "resuming from the checkpoint" in job.log)

    job.cancel()
    state = job.ended()

    (restart,) = job.folder.restarts
    assert (restart.kind, restart.step > 0) == ("requeue", True)
    assert "is saved in" in job.log
    assert "pre-flight:" not in job.log
    assert state == "CANCELLED"
    assert job.folder.progress.phase == "stopped"


@pytest.mark.slow
def test_stopped_by_a_warning_it_is_requeued_and_ends_bit_for_bit_as_if_undisturbed(jobs, tmp_path):
    job = jobs["disturbed"]
    (tmp_path / "recipe.py").write_text(RECIPE)
    arguments = load_recipe(str(tmp_path / "recipe.py")).fit_arguments()
    changes = {"epochs": 20, "target_batch": 16, "checkpoint": tmp_path / "undisturbed", "progress": False}
    autoaccum.fit(**arguments | changes)

    state = job.ended()

    assert state == "COMPLETED"
    (restart,) = job.folder.restarts
    assert restart.kind == "requeue"
    assert 3 <= restart.step < 80
    assert f"resuming from the checkpoint {job.folder.checkpoints}" in job.log
    undisturbed, disturbed = end_of(tmp_path / "undisturbed"), end_of(job.folder.checkpoints)
    assert all(torch.equal(undisturbed[name], disturbed[name]) for name in undisturbed)
    progress = job.folder.progress
    assert (progress.phase, progress.step, progress.steps, progress.epoch) == ("done", 80, 80, 20)
    assert progress.micro_batches == [8, 8]
    assert "pre-flight: host memory" in job.log
    assert json.loads((job.folder.path / "report.json").read_text())["fits"]
    assert job.folder.path.name.startswith("tiny-")


@pytest.mark.slow  # by Slurm, which starts its job after the others
def test_that_nothing_fits_is_known_in_the_first_seconds(short_jobs):
    job = short_jobs["too large"]

    assert job.ended() == "FAILED"

    shown = subprocess.run(["scontrol", "show", "job", job.id], capture_output=True, text=True, check=True).stdout
    assert "ExitCode=4:0" in shown
    assert "Pre-flight report" in job.log
    assert job.folder.restarts == []
    assert not json.loads((job.folder.path / "report.json").read_text())["fits"]


def test_every_task_is_a_rank(short_jobs):
    job = short_jobs["ranks"]

    assert job.ended() == "COMPLETED", job.log

    written = [job.folder.path.parents[1] / f"rank-{rank}" for rank in range(2)]
    assert [path.read_text() for path in written] == ["0 2 0 2 3.0", "1 2 1 2 3.0"]


def test_partition_that_is_not_there_is_refused_in_slurms_own_words(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)

    ran = command("slurm", tmp_path / "recipe.py", "--folder", tmp_path / "jobs", "--partition", "nowhere")

    assert ran.exit_code == 3
    assert "Slurm rejected the job: " in ran.stderr
    assert "Invalid partition name specified" in ran.stderr
    assert list((tmp_path / "jobs").iterdir()) == []


@pytest.mark.slow
def test_plain_script_for_sbatch_goes_on_after_a_warning(jobs):
    job = jobs["example"]

    assert job.ended() == "COMPLETED"

    assert "is saved in" in job.log
    assert "resuming from the checkpoint" in job.log

    assert list((job.folder.path / "runs" / "recipe").glob("step-*.pt"))


@pytest.mark.slow
def test_killed_for_its_memory_it_comes_back_smaller_and_finishes(jobs):
    job = jobs["hungry"]

    assert job.ended() == "COMPLETED", job.log

    (restart,) = job.folder.restarts
    assert (restart.kind, restart.max_micro_batch) == ("memory", 8)
    assert "exceeded memory limit" in restart.reason
    assert max(job.folder.progress.micro_batches) == 8
    assert job.folder.progress.phase == "done"


@pytest.mark.slow
def test_jobs_lists_what_became_of_each(jobs):
    job = jobs["hungry"]
    job.ended()

    shown = command("jobs", "--folder", job.folder.path.parent).stdout
    (listed,) = json.loads(command("jobs", "--folder", job.folder.path.parent, "--json").stdout)

    assert job.id in shown
    assert "completed" in shown
    assert "micro-batches of at most 8" in shown
    assert (listed["job_id"], listed["state"]) == (job.id, "completed")
    assert listed["restarts"][0]["kind"] == "memory"
