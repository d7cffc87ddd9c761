"""What is told of submitted jobs, also where Slurm says nothing."""

import json

import pytest
from autoaccum._launch.slurm.folder import JobFolder, Progress, Restart, Submitted
from autoaccum._launch.slurm.listing import jobs_in, states_of

from slurm_jobs import command


@pytest.fixture(autouse=True)
def no_slurm(monkeypatch):
    """A machine without Slurm, or a Slurm that has forgotten."""
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.fixture
def made(tmp_path):
    """Make the folder of a job, submitted at a second."""

    def make(name, at=0.0, job_id="7"):
        folder = JobFolder(tmp_path / name)
        folder.path.mkdir()
        folder.write_submitted(
            Submitted(name=name, recipe="a.py:job", tasks=1, retries=5, submitted_at=at, job_id=job_id)
        )
        return folder

    return make


def test_jobs_are_listed_in_the_order_of_their_submission(made, tmp_path):
    made("b", at=1.0)
    made("a", at=2.0)

    assert [one.folder.name for one in jobs_in(tmp_path)] == ["b", "a"]


@pytest.mark.parametrize(("phase", "state"), [("done", "done"), ("failed", "failed"), ("training", "training?")])
def test_without_slurm_the_folder_has_to_do(made, tmp_path, phase, state):
    made("a").write_progress(Progress(phase=phase))

    assert jobs_in(tmp_path)[0].state == state


def test_table_tells_progress_cut_and_why_it_was_started_again(made, tmp_path):
    folder = made("a")
    folder.write_progress(
        Progress(phase="failed", step=3, steps=9, epoch=1, epochs=3, loss=0.25, micro_batches=(4, 4, 2), error="boom")
    )
    folder.add_restart(Restart(kind="memory", reason="it was full", step=2, max_micro_batch=4))

    ran = command("jobs", "--folder", tmp_path)

    assert ran.exit_code == 0
    row = next(line for line in ran.stdout.splitlines() if line.startswith("7"))
    assert row.split() == ["7", "a", "failed", "3", "/", "9", "1", "/", "3", "0.25", "4+4+2", "1"]
    assert "a: start 2 after step 2: it was full; micro-batches of at most 4" in ran.stdout
    assert "a: boom" in ran.stdout


def test_document_holds_all_of_it(made, tmp_path):
    made("a").write_progress(Progress(phase="done", step=3))

    (listed,) = json.loads(command("jobs", "--folder", tmp_path, "--json").stdout)

    assert (listed["job_id"], listed["state"], listed["progress"]["step"]) == ("7", "done", 3)
    assert (listed["restarts"], listed["problems"]) == ([], [])


def test_files_that_were_cut_short_are_told_and_the_others_are_shown(made, tmp_path):
    (made("a").path / "progress.json").write_text('{"phase": "trai')
    (made("b").path / "job.json").write_text("")
    made("c").write_progress(Progress(phase="done", step=3))

    ran = command("jobs", "--folder", tmp_path)

    assert ran.exit_code == 0
    assert "a: progress.json cannot be read" in ran.stdout
    assert "b: job.json cannot be read" in ran.stdout
    assert "done" in ran.stdout


def test_folder_that_is_not_there_is_refused(tmp_path):
    ran = command("jobs", "--folder", tmp_path / "gone")

    assert ran.exit_code == 3
    assert "gone" in ran.stderr


def test_folder_without_jobs_is_said(tmp_path):
    ran = command("jobs", "--folder", tmp_path)

    assert (ran.exit_code, ran.stdout) == (0, "")
    assert "no jobs" in ran.stderr


def test_reason_and_state_are_read_from_squeue_and_for_older_jobs_from_sacct(tmp_path, monkeypatch):
    for name, said in {"squeue": "7|PENDING|Resources\n8|RUNNING|None\nx", "sacct": "9|CANCELLED by 0|None"}.items():
        script = tmp_path / name
        script.write_text(f"#!/bin/sh\nprintf '{said}\\n'\n".replace("\n8", "\\n8").replace("\nx", "\\nx"))
        script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")

    found = states_of(["7", "8", "9", "10"])

    assert found == {"7": ("pending", "Resources"), "8": ("running", ""), "9": ("cancelled", "")}
