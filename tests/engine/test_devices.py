"""The device that was asked for, or what there is."""

import pytest
import torch
from torch import nn

from autoaccum._engine import devices
from autoaccum._memory.host import Host
from autoaccum._system.notices import Notices
from helpers import CPU


@pytest.fixture
def notices():
    return Notices(silent=True)


@pytest.mark.parametrize("device", ["cpu", "cpu:0", CPU, torch.device("cpu", 0)], ids=str)
def test_host_is_found_under_all_its_names(device, notices):
    backend = devices.resolve(device, nn.Linear(1, 1), notices)

    assert isinstance(backend, Host)
    assert backend.device == CPU
    assert notices.texts == ()
