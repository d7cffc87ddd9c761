"""What `fit` measures of the noise of gradients on several ranks."""

import torch
from torch import nn

import autoaccum
from autoaccum._engine.noise_scale import NoiseScale  # whose estimates are kept


class Distance(nn.Module):
    """Half the squared distance of a sample to its parameter: its gradients are known."""

    def __init__(self):
        super().__init__()
        self.center = nn.Parameter(torch.zeros(12).double())

    def forward(self, inputs):
        return (self.center - inputs).square().sum(1) / 2


def noise(rank, size, *, windows=40):
    """Return what is measured of known gradients, by window of 24 samples: variance and squared norm."""
    model, found, learn = Distance(), [], NoiseScale.learn
    draws = torch.randn(windows, 24, 12, generator=torch.Generator().manual_seed(rank)).double()
    batches = [(0.3 + torch.linspace(0.5, 1.5, 12) * draw, torch.zeros(24)) for draw in draws]
    NoiseScale.learn = lambda self, spread, samples: (found.append((spread, samples)), learn(self, spread, samples))
    try:
        autoaccum.fit(
            model,
            batches,
            24,
            loss=lambda outputs, _: outputs.mean(),
            optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
            epochs=1,
            micro_batch=5,
            device="cpu",
            noise_scale=1,
            progress=False,
        )
    finally:
        NoiseScale.learn = learn
    return [(spread.variance, spread.squared_norm, samples) for spread, samples in found]
