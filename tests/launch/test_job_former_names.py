"""Names from before modules moved: recipes import them, and Slurm jobs that wait in a queue run and unpickle them."""

import pickle
import subprocess

import pytest

import autoaccum
import warm
from autoaccum import jobs
from autoaccum._launch.slurm.again import MARK
from autoaccum._launch.slurm.folder import JobFolder, Progress, Submitted
from autoaccum._launch.slurm.task import Task

RECIPE = """
import torch
from autoaccum.jobs import Job, load_recipe

def job():
    data = [(torch.randn(8, 2), torch.randn(8, 1))] * 2
    return Job(torch.nn.Linear(2, 1), data, 8, micro_batch=8, device="cpu")
"""


@pytest.fixture
def on_a_node(monkeypatch):
    """What submitit finds in the environment of a job."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    monkeypatch.setenv("SLURM_JOB_ID", "7")


def pickled(module, name, **attributes):
    """An object as a version from before has pickled it: protocol 2, its class by name, its attributes."""
    state = pickle.dumps(attributes, protocol=2)
    made = b"c" + f"{module}\n{name}\n".encode() + b")\x81"
    return b"\x80\x02" + made + state.removeprefix(b"\x80\x02").removesuffix(b".") + b"b."


def test_recipe_that_imports_a_job_by_its_former_name_loads(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)

    job = jobs.load_recipe(str(tmp_path / "recipe.py"))

    assert type(job) is autoaccum.Job
    assert job.target_batch == 8


def test_task_that_was_pickled_by_its_former_name_trains(tmp_path, on_a_node):
    (tmp_path / "recipe.py").write_text(RECIPE)
    recipe = f"{tmp_path / 'recipe.py'}:job"
    waiting = pickled(
        "autoaccum.jobs.slurm_task", "Task", recipe=recipe, folder=str(tmp_path), overrides={"epochs": 2}, checks=False
    )

    task = pickle.loads(waiting)  # noqa: S301 - made above

    assert task == Task(recipe, str(tmp_path), {"epochs": 2}, checks=False)
    assert task()["steps"] == 4


@pytest.mark.parametrize("module", ["autoaccum.jobs.slurm_again", "autoaccum._launch.slurm.again"])
def test_batch_script_that_names_a_module_gets_the_same_answer(tmp_path, module):
    folder = JobFolder(tmp_path)
    folder.write_submitted(Submitted(name="a", recipe="a.py:job", tasks=1, retries=2, submitted_at=0.0))
    folder.write_progress(Progress(phase="training", step=7, micro_batch=64))
    folder.log("5").write_text(f"{MARK}\n")

    ran = subprocess.run(
        [*warm.python(), "-m", module, folder.path, "5", "137"], capture_output=True, text=True, check=False
    )

    assert ran.returncode == 0, ran.stderr
    assert folder.max_micro_batch == 32
    assert "restarted in micro-batches of at most 32" in ran.stderr
