"""A search in the first windows may end when others have taken what was free."""

import dataclasses

import pytest
import torch
from torch import nn

import autoaccum

WIDTH = 1000


class Crowded(autoaccum.Simulated):
    """Memory of which others take all that is free, once trials have failed."""

    has_failed = False

    def reading(self):
        found = super().reading()
        return dataclasses.replace(found, free_bytes=0) if self.has_failed else found


class Keeps(nn.Module):
    """Keeps rows of activations, and lacks memory for more than ten samples, which nothing shows beforehand."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, WIDTH)

    def forward(self, inputs):
        if len(inputs) > 10:
            raise torch.OutOfMemoryError(f"CUDA out of memory: {len(inputs)} samples")
        return self.layer(inputs).tanh().exp().sum(1)


class Tells(autoaccum.Callback):
    def __init__(self, device):
        self.device = device

    def on_trial(self, trial):
        self.device.has_failed |= not trial.fits


@pytest.mark.parametrize("memory", [None, "auto"])
def test_no_memory_left_at_its_end_leaves_the_largest_that_fitted(memory):
    device = Crowded(60 * WIDTH * 4)
    loader = [(torch.randn(64, 4), torch.randn(64)) for _ in range(8)]

    result = autoaccum.fit(
        Keeps(),
        loader,
        64,
        loss=nn.functional.mse_loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3),
        device=device,
        precision="fp32",
        save_memory=memory,
        progress=False,
        callbacks=[Tells(device)],
    )

    assert device.has_failed
    assert result.steps == 8
    assert 1 <= result.plan.micro_batch < 64
