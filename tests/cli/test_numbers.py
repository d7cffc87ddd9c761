"""No number that an option takes ends in a traceback, or makes a command wait for ever."""

import math

import pytest
from autoaccum._launch.cuts import cut_within
from typer.testing import CliRunner

from autoaccum._cli import app, run
from autoaccum._launch import run as run_module
from autoaccum._launch.run import Options, run_command
from autoaccum.errors import InvalidInputError

RECIPE = """
import torch, autoaccum
raise RuntimeError("options are checked before the recipe is loaded")
"""
VALUES = ["inf", "-inf", "nan", "-1", "0", "1e12", "1e400", str(2**63), str(10**30), "9" * 400, "1" * 5000]
HUGE = VALUES[-4:]
COUNTS = {
    "fit": ["--target-batch", "--epochs", "--max-steps", "--micro-batch", "--checkpoint-steps"],
    "report": ["--target-batch", "--max-micro-batch", "--require-micro-batch", "--length"],
    "slurm": [
        *["--nodes", "--gpus-per-node", "--tasks-per-node", "--cpus-per-task", "--signal-delay", "--retries"],
        *["--target-batch", "--epochs", "--max-steps", "--micro-batch", "--checkpoint-steps"],
    ],
}
REFUSED = {3, 2}


@pytest.fixture
def recipe(tmp_path):
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def refused(*arguments):
    """Whether a command refuses its options, in a line or by its usage."""
    result = CliRunner().invoke(app.app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, SystemExit), result.exception
    assert "Traceback" not in result.stderr
    return result.exit_code in REFUSED


@pytest.mark.parametrize(
    ("command", "option"), [(name, option) for name, options in COUNTS.items() for option in options]
)
def test_a_count_beyond_any_training_is_refused_before_the_recipe_is_loaded(recipe, command, option):
    for value in HUGE:
        assert refused(command, recipe, f"{option}={value}")


@pytest.mark.parametrize(
    ("command", "option", "values"),
    [
        ("fit", "--checkpoint-minutes", VALUES),
        ("slurm", "--checkpoint-minutes", VALUES),
        ("fit", "--seed", HUGE[1:]),
        ("slurm", "--seed", HUGE[1:]),
        ("fit", "--memory-limit", HUGE[-2:]),
        ("slurm", "--memory-limit", HUGE[-2:]),
        ("slurm", "--time", HUGE[-2:]),
        ("slurm", "--mem", HUGE[-2:]),
        ("report", "--time", HUGE[-2:]),
        ("report", "--memory-limit", HUGE[-2:]),
        ("report", "--device-memory", HUGE[-2:]),
        ("report", "--require-free", HUGE[-2:]),
    ],
)
def test_a_number_that_means_nothing_is_refused_before_the_recipe_is_loaded(recipe, command, option, values):
    for value in values:
        assert refused(command, recipe, f"{option}={value}")


@pytest.mark.parametrize("option", ["--target-batch", "--micro-batch", "--world-size"])
def test_run_refuses_counts_beyond_any_training(tmp_path, option):
    for value in HUGE:
        assert refused("run", f"{option}={value}", "--", "touch", tmp_path / "touched")

    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("grace", [v for v in VALUES if v != "0"])
def test_run_refuses_a_grace_that_cannot_be_waited_for_and_starts_nothing(tmp_path, grace):
    assert refused("run", f"--grace={grace}", "--", "touch", tmp_path / "touched")

    assert not (tmp_path / "touched").exists()


@pytest.mark.parametrize("grace", [math.inf, math.nan, -1.0, 1e12])
def test_a_grace_is_checked_by_the_library_too(grace):
    with pytest.raises(InvalidInputError, match=r"grace=.* from 0 to 604800"):
        run_command(["true"], Options(grace_s=grace))


@pytest.mark.parametrize("grace", ["0", "604800"])
def test_bounds_of_the_grace_are_allowed(monkeypatch, grace):
    given = []
    monkeypatch.setattr(run, "run_command", lambda _, options: given.append(options) or 0)

    assert CliRunner().invoke(app.app, ["run", "--grace", grace, "--", "true"]).exit_code == 0

    assert given[0].grace_s == float(grace)
    run_module._check(["true"], given[0])


def test_a_large_prime_is_cut_without_counting_to_it():
    cut = cut_within(999_999_999_989, 1, most=7)

    assert (cut.micro_batch, cut.accum_steps) == (1, 999_999_999_989)


@pytest.mark.parametrize("share", [*range(1, 60), 720, 1024])
def test_the_largest_divisor_is_found(share):
    for most in range(1, share + 2):
        assert cut_within(share, 1, most=most).micro_batch == max(n for n in range(1, most + 1) if share % n == 0)
