"""One large batch from the loader, in four micro-batches, with a loss that is a mean or a sum.

    python examples/mean_and_sum.py

A mean is divided among the micro-batches, and a sum is not. `fit` reads from the loss which it is. A sum over N samples
has N times the gradient, so its learning rate is N times smaller, and both train alike. From pinned memory, a
micro-batch travels to the GPU while the one before computes.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.records import FitResult


def train(target_batch: int = 128, windows: int = 5, reduction: str = "mean", lr: float = 0.1) -> FitResult:
    """Train with a loss that is a mean, or a sum."""
    samples = windows * target_batch
    data = TensorDataset(torch.randn(samples, 3, 8, 8), torch.randint(10, (samples,)))
    return autoaccum.fit(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 6 * 6, 10)),
        DataLoader(data, batch_size=target_batch, pin_memory=torch.cuda.is_available()),
        target_batch,
        loss=nn.CrossEntropyLoss(reduction=reduction),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        micro_batch=target_batch // 4,
    )


if __name__ == "__main__":
    train()
    train(reduction="sum", lr=0.1 / 128)
