"""The batch script that `autoaccum slurm` writes; tests/across/test_slurm.py has what becomes of real jobs."""

import os
import subprocess
import sys

import pytest

from support.processes.slurm_jobs import command

RENDEZVOUS = '--rdzv-id="$SLURM_JOB_ID" --rdzv-endpoint="$head:$port" train.py'
OWN = f"{sys.executable} -m autoaccum"


def script(*arguments):
    """The script of a dry run, on a machine without Slurm."""
    ran = command("--dry-run", *arguments, PATH="/nowhere")
    assert (ran.returncode, ran.stderr) == (0, "")
    subprocess.run(["/bin/bash", "-n"], input=ran.stdout, text=True, check=True)
    return ran.stdout.splitlines()


def training_of(lines):
    (line,) = [line for line in lines if line.startswith(OWN) and line.endswith(" &")]
    return line.removesuffix(" &")


def test_a_script_is_short_and_says_what_was_asked():
    lines = script(
        "--time", "12:00:00", "--gpus-per-node", 4, "--mem", "64G", "--slurm", "exclusive", "--", "python", "train.py"
    )

    header = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert header == [
        "job-name=train",
        "nodes=1",
        "gpus-per-node=4",
        "output=%x-%j.out",
        "time=12:00:00",
        "mem=64G",
        "exclusive",
        "ntasks-per-node=1",
        "signal=B:USR1@120",
        "requeue",
        "open-mode=append",
    ]
    assert len(lines) < 50
    assert training_of(lines) == f"{OWN} run --grace=120 --retries=5 -- srun --kill-on-bad-exit=1 python train.py"


def test_arguments_are_quoted_and_placeholders_reach_run():
    lines = script("--target-batch", 256, "--", "python", "train.py", "a b", "$HOME", "it's", "{micro_batch}")

    run = f"{OWN} run --grace=120 --retries=5 --target-batch=256"
    assert (
        training_of(lines)
        == f"{run} -- srun --kill-on-bad-exit=1 python train.py 'a b' '$HOME' 'it'\"'\"'s' '{{micro_batch}}'"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--gpus-per-node", 8], "torchrun --nproc-per-node=8 --standalone train.py"),
        (
            ["--gpus-per-node", 8, "--nodes", 2],
            "torchrun --nproc-per-node=8 --nnodes=2 --rdzv-backend=c10d " + RENDEZVOUS,
        ),
    ],
)
def test_torchrun_gets_what_follows_from_the_job(options, words):
    lines = script(*options, "--", "torchrun", "train.py")

    assert training_of(lines).endswith(words)
    assert any(line.startswith("head=") for line in lines) == ("--nodes" in options)


@pytest.mark.parametrize(
    ("options", "command", "cores"),
    [
        (["--gpus-per-node", 8], ["torchrun", "train.py"], "mincpus=8"),
        (["--gpus-per-node", 8], ["torchrun", "--nproc_per_node", "4", "train.py"], "mincpus=4"),
        ([], ["torchrun", "--nproc-per-node=4", "train.py"], "mincpus=4"),
        (["--gpus-per-node", 8, "--cpus", 64], ["torchrun", "train.py"], "cpus-per-task=64"),
        (["--gpus-per-node", 8, "--slurm", "cpus-per-gpu=6"], ["torchrun", "train.py"], "cpus-per-gpu=6"),
        (["--gpus-per-node", 8], ["python", "train.py"], None),
    ],
)
def test_each_rank_of_torchrun_has_a_core_if_nothing_else_is_asked(options, command, cores):
    lines = [line.removeprefix("#SBATCH --") for line in script(*options, "--", *command) if "cpus" in line]

    assert [line for line in lines if "srun" not in line] == ([] if cores is None else [cores])


def test_no_value_of_an_option_becomes_a_command():
    lines = script("--slurm", "cpus-per-task=1; touch x", "--slurm", "comment=$(touch x)", "--", "python", "train.py")

    assert "#SBATCH --comment='$(touch x)'" in lines
    assert training_of(lines).endswith("srun --kill-on-bad-exit=1 --cpus-per-task='1; touch x' python train.py")


def test_a_preflight_ends_the_job_if_the_report_does():
    lines = script("--preflight", "train.py", "--", "python", "train.py")

    assert f"srun --nodes=1 --ntasks=1 {OWN} report train.py || exit" in lines


def test_batch_script_replaces_a_link_of_its_name_and_writes_nothing_through_it(tmp_path):
    sbatch, other = tmp_path / "sbatch", tmp_path / "other"
    sbatch.write_text("#!/bin/sh\necho 7\n")
    sbatch.chmod(0o755)
    other.write_text("kept")
    (tmp_path / "x-7.sbatch").symlink_to(other)

    ran = command("--", "x", folder=tmp_path, PATH=str(tmp_path))

    assert "its batch script is x-7.sbatch" in ran.stdout
    assert other.read_text() == "kept"
    assert (tmp_path / "x-7.sbatch").read_text().startswith("#!/bin/bash")


def test_without_slurm_a_job_is_refused_in_one_line(tmp_path):
    ran = command("--", "python", "train.py", PATH=str(tmp_path))

    assert (ran.returncode, ran.stdout) == (3, "")
    assert ran.stderr.startswith("autoaccum: error: there is no Slurm here (no sbatch on the PATH)")


@pytest.mark.parametrize(("folder", "kept"), [(None, "its batch script is x-7"), ("/proc", "cannot be kept in x-7")])
def test_any_bytes_are_submitted_and_a_folder_that_cannot_be_written_to_hides_no_job(folder, kept, tmp_path):
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(f"#!/bin/sh\n/bin/cat >{tmp_path}/submitted\necho '7;cluster'\n")
    sbatch.chmod(0o755)

    ran = command("--", "x", os.fsdecode(b"\xff"), "é", folder=folder or tmp_path, PATH=str(tmp_path), LC_ALL="C")

    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("submitted job 7; its batch script ")
    assert kept in ran.stdout
    assert b" x '\xff' '\xc3\xa9' &\n" in (tmp_path / "submitted").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--slurm", "=7", "--", "x"], "is not an option of sbatch"),
        (["--job-name", "two\nlines", "--", "x"], "is not an option of sbatch"),
        (["--slurm", "gpus-per-node=4", "--", "x"], "write --gpus-per-node 4"),
        (["--job-name", "a/b", "--", "x"], "--job-name a/b cannot be part of a file's name"),
        (["--target-batch", 7, "--nodes", 2, "--", "x", "{micro_batch}"], "cannot be divided by 2 ranks"),
        (["--target-batch", 7, "--world-size", 3, "--", "x", "{micro_batch}"], "cannot be divided by 3 ranks"),
        (
            ["--target-batch", 4, "--gpus-per-node", 8, "--", "torchrun", "{micro_batch}"],
            "cannot be divided by 8 ranks",
        ),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_one_line(arguments, said):
    ran = command(*arguments)

    assert ran.returncode == 3
    (line,) = ran.stderr.splitlines()
    assert said in line
