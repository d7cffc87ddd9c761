"""What an accumulator measures of the noise of gradients on several ranks."""

import torch
from torch import nn

import autoaccum
from autoaccum._system.notices import Notices


def noise(rank, size, *, sizes, batches=40):
    """Return what an accumulator measures of the noise of known gradients, by batch: variance and squared norm."""
    torch.manual_seed(rank)
    mean, deviation = torch.full((12,), 0.3).double(), torch.linspace(0.5, 1.5, 12).double()
    model = nn.Linear(12, 1, bias=False).double()
    found = []
    accumulating = autoaccum.Accumulator(
        model,
        closure=lambda inputs: ((model.weight - inputs).square().sum(1) / 2).mean(),
        device="cpu",
        micro_batch=5,
        noise_scale=1,
        notices=Notices(silent=True),
    )
    model.weight.data.zero_()
    learned = accumulating._noise.learn
    accumulating._noise.learn = lambda spread, samples: (found.append((spread, samples)), learned(spread, samples))
    for _ in range(batches):
        accumulating.backward(mean + deviation * torch.randn(sizes[rank], 12).double())
        model.zero_grad()
    return [(spread.variance, spread.squared_norm, samples) for spread, samples in found]
