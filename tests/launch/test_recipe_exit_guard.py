"""A recipe that exits is bad input, wherever it does so and whichever command runs it."""

import signal
from pathlib import Path

import pytest
from autoaccum._launch.recipe_exit_guard import exits_refused
from typer.testing import CliRunner

import autoaccum
from autoaccum._cli import app
from autoaccum._launch import load_recipe
from autoaccum.errors import InvalidInputError

RECIPE = """
import argparse, asyncio, contextlib, sys
import torch, typer
import autoaccum
with contextlib.suppress(ImportError):
    import click

def leave(): {leave}

class Leaves(torch.nn.Linear):
    def forward(self, x): leave()

class LeavesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x.clone()
    @staticmethod
    def backward(ctx, gradient): leave()

class LeavesLater(autoaccum.Callback):
    def on_step(self, report, *, epoch): leave()

def loss(outputs, targets): leave()
def backward_loss(outputs, targets): return LeavesInBackward.apply(outputs).mean()
def make(): leave()
def batches(): leave(); yield
def optimizer(parameters): leave()

def job(model=None, **changes):
    data = [(torch.zeros(8, 3), torch.zeros(8, 1))]
    arguments = dict(loader=data, target_batch=8, device="cpu", micro_batch=4) | changes
    return autoaccum.Job(model or torch.nn.Linear(3, 1), **arguments)

def in_model(): return job(Leaves(3, 1))
def in_making(): return job(make)
def in_loss(): return job(loss=loss)
def in_backward(): return job(loss=backward_loss)
def in_loader(): return job(loader=batches())
def in_optimizer(): return job(optimizer=optimizer)
def in_callback(): return job(callbacks=[LeavesLater()])
def in_job(): leave()
{at_import}
"""
PLACES = ["in_job", "in_model", "in_making", "in_loss", "in_backward", "in_loader", "in_optimizer"]


@pytest.fixture
def recipe(tmp_path):
    def write(leave="sys.exit(0)", at_import=""):
        path = tmp_path / "recipe.py"
        path.write_text(RECIPE.format(leave=leave, at_import=at_import))
        return str(path)

    return write


def invoke(*arguments):
    return CliRunner().invoke(app.app, [str(argument) for argument in arguments])


def line_of(recipe, text):
    lines = Path(recipe).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def assert_bad_input(result, recipe, said="sys.exit(0)", at="def leave"):
    assert result.exit_code == app.ExitCode.BAD_INPUT, result.output
    assert f"exited by {said} at {recipe}:{line_of(recipe, at)}" in result.stderr
    assert "Traceback" not in result.stderr.split("autoaccum: error")[-1]


@pytest.mark.parametrize("place", [*PLACES, "in_callback"])
def test_fit_ends_with_3_and_the_place(recipe, place):
    path = recipe()

    assert_bad_input(invoke("fit", f"{path}:{place}", "--quiet"), path)


def test_an_exit_of_a_callback_leaves_a_checkpoint_as_an_error_does(recipe, tmp_path):
    invoke("fit", f"{recipe()}:in_callback", "--quiet", "--checkpoint", tmp_path / "kept")

    assert [path.name for path in (tmp_path / "kept").glob("step-*")] != []


@pytest.mark.parametrize("options", [(), ("--no-measure", "--gpu", "h100-80gb")])
@pytest.mark.parametrize("place", PLACES)
def test_report_ends_with_3_and_the_place(recipe, place, options):
    path = recipe()

    assert_bad_input(invoke("report", f"{path}:{place}", "--quiet", *options), path)


@pytest.mark.parametrize("command", [("fit",), ("report",), ("slurm", "--dry-run")])
def test_an_exit_of_the_file_ends_every_command_with_3(recipe, command):
    path = recipe(at_import="sys.exit(0)  # while it is imported")

    result = invoke(*command, path)

    assert_bad_input(result, path, at="# while")
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("leave", "said"),
    [
        ("sys.exit()", "sys.exit(None)"),
        ("sys.exit('no data')", "sys.exit('no data')"),
        ("exit(7)", "sys.exit(7)"),
        ("raise typer.Exit(0)", "Exit(0)"),
        ("raise typer.Abort", "Abort()"),
        ("raise click.exceptions.Exit(0)", "Exit(0)"),
        ("raise click.UsageError('no such option')", "UsageError(no such option)"),
        ("raise GeneratorExit", "GeneratorExit()"),
        ("raise asyncio.CancelledError", "CancelledError()"),
        ("argparse.ArgumentParser(exit_on_error=True).parse_args(['--no'])", "sys.exit(2)"),
    ],
)
def test_every_way_to_exit_is_known_and_named(recipe, leave, said):
    if "click." in leave:
        pytest.importorskip("click", reason="typer may hold a click of its own")
    path = recipe(leave)

    for command in (("fit", "--quiet", f"{path}:in_loss"), ("report", "--quiet", f"{path}:in_model")):
        assert_bad_input(invoke(*command), path, said)
    with pytest.raises(InvalidInputError, match="exited by"):
        load_recipe(f"{path}:in_job")


def test_ctrl_c_in_a_recipe_stays_ctrl_c(recipe):
    path = recipe("raise KeyboardInterrupt")

    assert invoke("fit", f"{path}:in_loss", "--quiet").exit_code == app.ExitCode.INTERRUPTED
    assert invoke("report", f"{path}:in_job", "--quiet").exit_code == app.ExitCode.INTERRUPTED


def test_in_the_function_fit_an_exit_goes_on_to_its_caller_unchanged(recipe):
    job = load_recipe(f"{recipe('sys.exit(17)')}:in_callback")

    with pytest.raises(SystemExit) as caught:
        autoaccum.fit(**job.fit_arguments(), progress=False)

    assert caught.value.code == 17


def test_what_a_handler_of_a_signal_does_stays(recipe):
    former = signal.signal(signal.SIGUSR2, lambda *_: exit_now())

    def exit_now():
        raise SystemExit(9)

    try:
        with pytest.raises(SystemExit), exits_refused(recipe()):
            signal.raise_signal(signal.SIGUSR2)
    finally:
        signal.signal(signal.SIGUSR2, former)
