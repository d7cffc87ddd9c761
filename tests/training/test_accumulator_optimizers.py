"""Optimizers that write in their own way step from an accumulator's gradients as from those of whole batches."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._system.notices import Notices
from helpers import CPU

SAMPLES, IN, CLASSES = 24, 64, 4


class Model(nn.Module):
    """Lacks memory where more samples come at once than `most`."""

    def __init__(self, most=None):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(IN, 128), nn.ReLU(), nn.Linear(128, CLASSES))
        self.most = most

    def forward(self, inputs):
        if self.most is not None and len(inputs) > self.most:
            raise torch.OutOfMemoryError("told to")
        return self.body(inputs)


def fused(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, fused=True)


def of_8_bits(parameters):
    optim = pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed").optim
    return optim.AdamW8bit(parameters, lr=0.01, min_8bit_size=0)


@pytest.mark.parametrize("make", [fused, of_8_bits])
def test_optimizer_steps_as_from_the_gradients_of_whole_batches(make):
    generator = torch.Generator().manual_seed(0)
    whole, cut = Model(), Model(most=5)
    of_whole, of_cut = make(whole.parameters()), make(cut.parameters())
    accumulator = autoaccum.Accumulator(
        cut, loss=functional.cross_entropy, precision="fp32", device=CPU, notices=Notices(silent=True)
    )

    for _ in range(3):
        inputs = torch.randn(SAMPLES, IN, generator=generator)
        targets = torch.randint(CLASSES, (SAMPLES,), generator=generator)
        of_whole.zero_grad()
        functional.cross_entropy(whole(inputs), targets).backward()
        of_whole.step()
        of_cut.zero_grad()
        report = accumulator.backward((inputs, targets))
        of_cut.step()

    assert len(report.micro_batches) > 1
    torch.testing.assert_close(list(cut.parameters()), list(whole.parameters()), rtol=0, atol=1e-6)
