"""The device that was asked for, or what there is."""

import pytest
import torch
from torch import nn

from autoaccum._engine import devices
from autoaccum._memory.host import Host  # what is found
from autoaccum._system.notices import Notices  # an argument
from support.models.small import CPU

without_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")


@pytest.fixture
def notices():
    return Notices(silent=True)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", CPU, torch.device("cpu", 0)], ids=str)
def test_host_is_found_under_all_its_names(device, notices):
    backend = devices.resolve(device, nn.Linear(1, 1), notices)

    assert isinstance(backend, Host)
    assert backend.device == CPU
    assert notices.texts == ()


@without_accelerator
@pytest.mark.parametrize(
    "model", [nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, device="meta")], ids=["host", "none", "meta"]
)
def test_without_accelerator_the_host_is_chosen_and_said(model, notices):
    backend = devices.resolve(None, model, notices)

    assert backend.device == CPU
    assert notices.texts == ("device cpu (device=)",)
