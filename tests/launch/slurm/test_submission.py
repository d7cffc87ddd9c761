"""What is asked of Slurm, and what is refused before it is."""

import math
import sys
from pathlib import Path

import pytest
from autoaccum._launch.slurm.submission import Resources, minutes_of, script_of

from autoaccum._cli import slurm
from autoaccum._launch.slurm import submission
from autoaccum._report.durations import seconds_in
from autoaccum.errors import InvalidInputError
from slurm_jobs import RECIPE, command

BAD = "def job(:"


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


@pytest.fixture
def no_slurm(monkeypatch):
    """A machine without Slurm."""
    monkeypatch.setenv("PATH", "/nowhere")


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("90", 90),
        ("90:30", 91),
        ("1:00:00", 60),
        ("12:00:01", 721),
        ("2-0", 2880),
        ("1-12", 2160),
        ("1-1:30", 1530),
        ("1-0:0:1", 1441),
    ],
)
def test_every_form_of_a_time_is_read(text, minutes):
    assert minutes_of(text) == minutes


@pytest.mark.parametrize("text", ["", "soon", "1h", "-5", "1:2:3:4", "1-2-3", "1.5", "0", "0:00", "٣"])
def test_time_that_slurm_would_not_know_is_refused(text):
    with pytest.raises(InvalidInputError, match="--time"):
        minutes_of(text)


@pytest.mark.parametrize("text", ["90:30", "12:00:01", "2-6", "1-1:30"])
def test_time_limits_of_reports_and_of_jobs_are_the_same(text):
    assert minutes_of(text) == math.ceil(seconds_in(text, name="--time") / 60)


@pytest.mark.parametrize(
    "resources",
    [
        {"nodes": 0},
        {"gpus_per_node": -1},
        {"tasks_per_node": 0},
        {"cpus_per_task": 0},
        {"warning_s": 0},
        {"others": {"output": "x"}},
        {"others": {"signal": "USR1@3"}},
    ],
)
def test_what_cannot_be_is_refused(resources, tmp_path):
    with pytest.raises(InvalidInputError, match=r"must be|omit it"):
        script_of(Resources(name="a", **resources), tmp_path)


def test_there_is_a_task_for_every_card(tmp_path):
    script = script_of(Resources(name="a", nodes=2, gpus_per_node=8, tasks_per_node=3), tmp_path)

    assert "#SBATCH --nodes=2\n" in script
    assert "#SBATCH --gpus-per-node=8\n" in script
    assert "#SBATCH --ntasks-per-node=8\n" in script


def test_what_was_not_asked_is_left_to_the_cluster(tmp_path):
    script = script_of(Resources(name="a"), tmp_path)

    asked = {line.removeprefix("#SBATCH --").partition("=")[0] for line in script.splitlines() if "#SBATCH" in line}
    assert asked == {"job-name", "nodes", "ntasks-per-node", "open-mode", "output", "requeue", "signal"}


def test_options_of_sbatch_are_passed_on(recipe, no_slurm):
    options = ["--partition=long", "--time=1-0", "--mem=4G", "--slurm=exclude=node7", "--slurm=exclusive"]

    ran = command("slurm", recipe, "--dry-run", *options)

    assert ran.exit_code == 0
    for line in ("--partition=long", "--time=1440", "--mem=4G", "--exclude=node7", "--exclusive"):
        assert f"#SBATCH {line}\n" in ran.stdout


def test_dry_run_leaves_nothing_behind(recipe, no_slurm, tmp_path):
    before = sorted(tmp_path.iterdir())

    ran = command("slurm", recipe, "--dry-run", "--folder", tmp_path / "jobs")

    assert str(tmp_path / "jobs" / "recipe-DATE-TIME") in ran.stdout
    assert sorted(path for path in tmp_path.iterdir() if path.name != "__pycache__") == before


def test_machine_without_slurm_is_told_what_works_there(recipe, no_slurm, tmp_path):
    ran = command("slurm", recipe, "--folder", tmp_path / "jobs")

    assert ran.exit_code == 3
    assert "no sbatch on the PATH" in ran.stderr
    assert "--dry-run" in ran.stderr
    assert not (tmp_path / "jobs").exists()


def test_missing_submitit_is_told_with_the_way_to_install_it(recipe, monkeypatch):
    monkeypatch.setitem(sys.modules, "submitit", None)

    ran = command("slurm", recipe, "--dry-run")

    assert ran.exit_code == 3
    assert "pip install 'autoaccum[slurm]'" in ran.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [(BAD, "SyntaxError"), ("def train(): ...", "no function job()"), ("import nonesuch_module", "nonesuch_module")],
)
def test_recipe_that_cannot_be_used_is_found_before_it_is_submitted(tmp_path, text, told):
    (tmp_path / "recipe.py").write_text(text)

    ran = command("slurm", tmp_path / "recipe.py", "--folder", tmp_path / "jobs")

    assert ran.exit_code == 3
    assert told in ran.stderr
    assert not (tmp_path / "jobs").exists()


def test_recipe_is_not_called_where_it_is_submitted(tmp_path, no_slurm):
    (tmp_path / "recipe.py").write_text("def job(): raise SystemExit('called')")

    assert command("slurm", tmp_path / "recipe.py", "--dry-run").exit_code == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--target-batch", "0"],
        ["--micro-batch", "-1"],
        ["--strategy", "slow"],
        ["--retries", "-1"],
        ["--time", "soon"],
        ["--slurm", "=3"],
        ["--precision", "fp8"],
        ["--fallback", "prayer"],
        ["--memory-limit", "much"],
        ["--shares", "unfair"],
    ],
)
def test_bad_option_is_refused_with_its_value(recipe, options):
    ran = command("slurm", recipe, "--dry-run", *options)

    assert ran.exit_code == 3
    assert options[1] in ran.stderr


def test_names_that_a_shell_or_slurm_would_read_something_into_are_made_plain(recipe):
    ran = command("slurm", recipe, "--dry-run", "--job-name", "a b/%j;c")

    assert ran.exit_code == 0
    assert "/a-b-j-c-DATE-TIME/%j_0_log.out\n" in ran.stdout


def test_place_that_no_folder_can_be_made_in_is_refused(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(submission.shutil, "which", lambda _: "/bin/true")
    (tmp_path / "file").write_text("")

    ran = command("slurm", recipe, "--folder", tmp_path / "file")

    assert ran.exit_code == 3
    assert "pass --folder" in ran.stderr


def test_folder_is_the_same_for_both_commands():
    assert Path("autoaccum-jobs") == slurm.FOLDER
