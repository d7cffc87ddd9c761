"""Two losses of one batch with one graph in memory at a time, and a learning rate that grows with the batch.

    python examples/two_losses.py

Losses that are added up before the backward pass keep both graphs in memory. In a list, each loss has a forward and a
backward pass of its own, and its graph is freed before the next one begins. The gradients add up to those of the sum.
The learning rate was found with batches of 16; for batches of 128, it is multiplied by eight.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.records import FitResult

Batch = tuple[torch.Tensor, torch.Tensor]


def class_loss(model: nn.ModuleDict, batch: Batch) -> torch.Tensor:
    """Return the loss of the first task, which digit it is."""
    xs, ys = batch
    return cross_entropy(model["classifier"](xs), ys)


def size_loss(model: nn.ModuleDict, batch: Batch) -> torch.Tensor:
    """Return the loss of the second task, how large the digit is."""
    xs, ys = batch
    return mse_loss(model["regressor"](xs).squeeze(1), ys.float())


def train(base_batch: int = 16, accumulation_steps: int = 8, windows: int = 5) -> FitResult:
    """Train."""
    samples = windows * accumulation_steps * base_batch
    data = TensorDataset(torch.randn(samples, 20), torch.randint(10, (samples,)))
    return autoaccum.fit(
        nn.ModuleDict({"classifier": nn.Linear(20, 10), "regressor": nn.Linear(20, 1)}),
        DataLoader(data, batch_size=base_batch),
        accumulation_steps * base_batch,
        loss=[class_loss, size_loss],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        lr_scaling="linear",
        base_batch=base_batch,
    )


if __name__ == "__main__":
    train()
