"""A limit of a Runner: in force within its steps and evaluations, and nowhere else."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum.errors import InvalidInputError
from memory._child import run_checks


def test_limit_of_a_runner_within_another_limit_is_refused():
    device = autoaccum.Simulated("1GiB")
    runner = autoaccum.Runner(nn.Linear(8, 1), None, autoaccum.plan(4, 4), device=device, memory_limit="1MiB")

    with device.limited(None), pytest.raises(InvalidInputError, match="already limited"):
        runner.step((torch.randn(4, 8), torch.randn(4, 1)))


def test_host_limit_is_in_force_within_steps_alone():
    seen = run_checks("runner_is_limited_within_its_steps")["runner_is_limited_within_its_steps"]

    assert seen["step"] != seen["before"]
    assert seen["later step"] == seen["step"]
    assert seen["evaluation"] == seen["step"]
    for place in ("loader", "between", "after"):
        assert seen[place] == seen["before"], place
    assert seen["largest"][0] == 128  # which takes more than the limit, and is kept
    assert seen["largest"][-1] < 128


def test_process_that_ends_with_a_runner_under_a_limit_says_nothing():
    source = """
import torch, autoaccum
from torch import nn
model = nn.Linear(4, 3)
runner = autoaccum.Accumulator(model, loss=nn.CrossEntropyLoss(), memory_limit="200MiB", device="cpu")
runner.backward((torch.randn(8, 4), torch.randint(3, (8,))))
"""
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)

    assert "ignored" not in done.stderr
    assert "Traceback" not in done.stderr
