"""Trainings of ranks on texts of unlike length, for tests of several ranks."""

import torch

import autoaccum
from ragged import Causal, loader_of


def train(rank, size, samples, batch, **options):
    """Train on this rank's part; return all parameters as one vector."""
    model = Causal()
    autoaccum.fit(
        model,
        loader_of(samples, batch),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        device="cpu",
        precision="fp32",
        shard=True,
        progress=False,
        **options,
    )
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
