"""What a process of a job does, called here as submitit calls it on a node."""

import os

import pytest
from autoaccum._launch.slurm.folder import JobFolder, Restart
from autoaccum._launch.slurm.task import Task, resubmission_of

from autoaccum._system.launched import MAX_MICRO_BATCH
from autoaccum.errors import DoesNotFitError, InvalidInputError, StartAgainError

RECIPE = """
import torch
import autoaccum

def job():
    torch.manual_seed(0)
    data = [(torch.randn(8, 2), torch.randn(8, 1))] * 4
    return autoaccum.Job(torch.nn.Linear(2, 1), data, 8, micro_batch=8, device="cpu", resume=False)

def too_large():
    model = torch.nn.Linear(2, 1)
    return autoaccum.Job(model, [(torch.randn(8, 2), torch.randn(8, 1))], 8, device=autoaccum.Simulated("64B"))

def short():
    def loss(outputs, targets):
        raise autoaccum.StartAgainError("a rank ran out of memory with 4 samples", 4)
    return autoaccum.Job(torch.nn.Linear(2, 1), [(torch.randn(8, 2), torch.randn(8, 1))], 8, loss=loss, device="cpu")

def leaves():
    def loss(outputs, targets):
        raise SystemExit(0)
    return autoaccum.Job(torch.nn.Linear(2, 1), [(torch.randn(8, 2), torch.randn(8, 1))], 8, loss=loss, device="cpu")

def spoilt():
    return autoaccum.Job(torch.nn.Linear(3, 1), [(torch.randn(8, 2), torch.randn(8, 1))], 8, device="cpu")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    return JobFolder(tmp_path)


@pytest.fixture
def run(folder, monkeypatch):
    """Run a task as a node would; what it sets in the environment is taken back."""
    monkeypatch.setenv(MAX_MICRO_BATCH, "")
    monkeypatch.delenv(MAX_MICRO_BATCH)
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")

    def run(function="job", **arguments):
        task = Task(f"{folder.path / 'recipe.py'}:{function}", str(folder.path), **arguments)
        return task()

    yield run
    os.environ.pop(MAX_MICRO_BATCH, None)


def test_job_is_trained_and_its_folder_tells_of_it(run, folder):
    result = run(overrides={"target_batch": 16})

    assert (result["steps"], result["samples"]) == (2, 32)
    assert (folder.progress.phase, folder.progress.step) == ("done", 2)
    assert (folder.path / "log.jsonl").exists()
    assert list(folder.checkpoints.glob("step-*.pt"))


def test_arguments_for_several_ranks_are_taken_over(run, folder):
    with pytest.raises(InvalidInputError, match="shares='speed' needs shard=True"):
        run(overrides={"shares": "speed"}, checks=False)


def test_cap_of_an_earlier_start_holds_for_a_size_that_was_asked_for(run, folder):
    folder.add_restart(Restart(kind="memory", reason="", step=0, max_micro_batch=2))

    run(checks=False)

    assert folder.progress.micro_batches == [2, 2, 2, 2]
    assert os.environ[MAX_MICRO_BATCH] == "2"


def test_recipe_that_starts_anew_does_so_only_once(run, folder, capfd):
    run(checks=False)
    folder.add_restart(Restart(kind="requeue", reason="", step=4))

    run(checks=False)

    assert "resuming from the checkpoint" in capfd.readouterr().err


def test_job_that_cannot_fit_ends_with_a_report_of_what_would_help(run, folder):
    with pytest.raises(DoesNotFitError):
        run("too_large")

    assert (folder.path / "report.json").exists()
    assert folder.progress.phase == "failed"
    assert folder.take_failures()[0]["error"].startswith("DoesNotFitError")


def test_error_of_the_users_own_arrives_and_is_noted(run, folder):
    with pytest.raises(RuntimeError, match="shapes"):
        run("spoilt", checks=False)

    assert folder.progress.error.startswith("RuntimeError: ")
    assert not folder.take_failures()[0]["needs_new_process"]


def test_lack_of_memory_that_ends_all_processes_is_noted_as_one_that_a_new_start_mends(run, folder):
    with pytest.raises(StartAgainError):
        run("short", checks=False)

    assert folder.take_failures()[0]["needs_new_process"]


def test_requeue_that_slurm_made_itself_is_noted(run, folder, monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")

    run(checks=False)

    (restart,) = folder.restarts
    assert (restart.kind, "from outside" in restart.reason) == ("requeue", True)


def test_after_a_requeue_the_same_is_to_run():
    task = Task("recipe.py:job", "folder", {"epochs": 2})

    assert resubmission_of(task).function == task


def test_one_of_several_processes_is_told_who_it_is(run, monkeypatch):
    names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    for name in names:
        monkeypatch.setenv(name, "of somebody else's")
    for name, value in {"NTASKS": "4", "JOB_NUM_NODES": "2", "PROCID": "3", "LOCALID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[07-08]")
    monkeypatch.setenv("MASTER_PORT", "29500")

    with pytest.raises(InvalidInputError, match="nonesuch"):  # by then they are set, and nothing is trained
        run("nonesuch")

    assert [os.environ[name] for name in names] == ["node07", "29500", "3", "4", "1", "2"]


def test_recipe_that_exits_has_failed_and_not_ended(run, folder):
    with pytest.raises(InvalidInputError, match=r"exited by sys\.exit\(0\) at .*recipe\.py:\d+, in loss\(\)"):
        run("leaves", checks=False)

    assert folder.progress.phase == "failed"
    assert "exited by sys.exit(0)" in folder.take_failures()[0]["error"]
