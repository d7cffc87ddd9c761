import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from autoaccum._estimate.estimate import estimate_step
from autoaccum._estimate.gpus import gpu_named


class Stack(nn.Module):
    """Drops layers as transformers does: by a number of PyTorch's, or of Python's or NumPy's."""

    def __init__(self, rate, *, by_torch):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(8))
        self.by_torch = by_torch
        if by_torch:
            self.layerdrop = rate
        else:
            self.config = SimpleNamespace(encoder_layerdrop=rate)

    def forward(self, x):
        for layer in self.layers:
            if self.by_torch:
                dropped = self.layerdrop > 0 and torch.rand([]) < self.layerdrop
            else:
                dropped = random.random() < self.config.encoder_layerdrop  # noqa: S311 - as models do
            if not dropped:
                x = layer(x)
        return x


BATCH = torch.zeros(4, 64), torch.zeros(4, 64)


def predicted(model, gpu):
    return estimate_step(model, BATCH, loss=nn.MSELoss(), gpu=gpu and gpu_named(gpu), precision="bf16", sizes=[64, 128])


@pytest.mark.parametrize(
    ("by_torch", "gpu"),
    [
        pytest.param(False, "h100-80gb", marks=pytest.mark.gpu_fakes),
        (True, None),
        pytest.param(True, "h100-80gb", marks=[pytest.mark.gpu_fakes, pytest.mark.sweep]),
        pytest.param(False, None, marks=pytest.mark.sweep),
    ],
)
def test_layers_dropped_at_random_are_predicted_as_kept(by_torch, gpu):
    random.seed(0)

    ours = predicted(Stack(0.5, by_torch=by_torch), gpu)
    whole = predicted(Stack(0.0, by_torch=by_torch), gpu)

    assert [one.peak_bytes for one in ours.footprints] == [one.peak_bytes for one in whole.footprints]


def test_the_model_itself_keeps_its_rate():
    model = Stack(0.5, by_torch=False)

    predicted(model, None)

    assert model.config.encoder_layerdrop == 0.5
