"""A job whose step does not fit ends before it trains, unless it has a way to take less memory."""

import pytest
import torch
from autoaccum._launch.slurm.device_check import check
from torch import nn

import autoaccum
from autoaccum._memory import Simulated
from autoaccum.errors import DoesNotFitError


def job(**options):
    batch = torch.randn(4, 64), torch.randint(3, (4,))
    model = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 3))
    return autoaccum.Job(model, [batch], 4, device=Simulated("6MiB"), **options)


@pytest.mark.parametrize(
    ("options", "way"),
    [({"fallback": "checkpoint"}, "its fallback"), ({"memory": "auto"}, "memory='auto'")],
    ids=str,
)
def test_job_that_can_take_less_memory_begins_though_a_plain_step_does_not_fit(options, way):
    said = []

    check(job(**options), None, said.append)

    assert said[-1] == f"pre-flight: this step does not fit, so training will use {way}"


def test_job_that_cannot_ends_with_the_report():
    said = []

    with pytest.raises(DoesNotFitError):
        check(job(), None, said.append)

    assert "does not fit" in said[-1]
