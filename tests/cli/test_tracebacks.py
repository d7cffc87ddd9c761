"""Which frames of a traceback the command line shows."""

import subprocess
import sys

import pytest
import torch

import autoaccum
from autoaccum._cli import tracebacks
from autoaccum._sizing.planner import plan

RECIPE = """
import torch, autoaccum

def bad_loss(outputs, targets):
    return torch.nn.functional.cross_entropy(outputs, targets.reshape(3, 5))

def job():
    batches = [(torch.randn(4, 4), torch.arange(4) % 3)]
    return autoaccum.Job(torch.nn.Linear(4, 3), batches, 4, device="cpu", cache=False, loss=bad_loss)
"""


@pytest.mark.parametrize(
    "arguments", [["fit", "recipe.py"], ["fit", "recipe.py", "--traceback"], ["--traceback", "fit", "recipe.py"]]
)
def test_error_of_a_recipe_is_shown_without_frames_of_the_library(arguments, tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)

    done = subprocess.run(
        [sys.executable, "-m", "autoaccum", *arguments, "--quiet"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip

    lines = done.stderr.splitlines()
    frames = [line for line in lines if line.startswith("  File ")]
    assert done.returncode == 1
    assert lines[-1].startswith("RuntimeError: shape '[3, 5]' is invalid")
    assert "recipe.py" in frames[-1]
    if "--traceback" in arguments:
        assert len(frames) > 10
        assert any("runner.py" in frame for frame in frames)
    else:
        assert len(frames) == 1
        assert any("frames of autoaccum are left out; --traceback shows them" in line for line in lines)


def raised(function):
    try:
        function()
    except Exception as error:  # noqa: BLE001 - any
        return error
    return None


def test_error_of_the_library_itself_is_shown_whole():
    text = tracebacks.text_of(raised(lambda: plan(0, 1)))

    assert "planner.py" in text
    assert "left out" not in text


def test_errors_that_led_to_another_lose_their_frames_too():
    def loss(outputs, targets):
        try:
            raise KeyError("first")  # noqa: TRY301 - the example
        except KeyError as error:
            raise ValueError("second") from error

    def run():
        batches = [(torch.randn(2, 4), torch.arange(2))]
        autoaccum.fit(torch.nn.Linear(4, 3), batches, 2, loss=loss, device="cpu", progress=False, cache=False)

    text = tracebacks.text_of(raised(run))

    assert "KeyError: 'first'" in text
    assert "direct cause" in text
    assert "runner.py" not in text
    assert "in loss" in text


@pytest.mark.parametrize(
    ("given", "moved"),
    [
        (["fit", "r.py"], ["fit", "r.py"]),
        (["fit", "r.py", "--traceback"], ["--traceback", "fit", "r.py"]),
        (["run", "--", "train.py", "--traceback"], ["run", "--", "train.py", "--traceback"]),
    ],
)
def test_option_may_stand_behind_the_command(given, moved):
    assert tracebacks.with_option_first(given) == moved
