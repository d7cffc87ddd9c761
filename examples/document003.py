"""Document 003: two losses on one batch, one graph in memory at a time; a rate that grows with the batch.

    python examples/document003.py

Adding the losses before the backward pass keeps both graphs in memory. A list of losses does not: each runs
its own forward, is back-propagated by itself, and its graph is gone before the next one begins. The gradients
add up to those of the sum. The rate was found with batches of 16; with eight times that it is scaled up
eightfold.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import DataLoader, TensorDataset

import autoaccum

Batch = tuple[torch.Tensor, torch.Tensor]


def class_loss(model: nn.ModuleDict, batch: Batch) -> torch.Tensor:
    """Return the first task's loss: which digit is it."""
    xs, ys = batch
    return cross_entropy(model["classifier"](xs), ys)


def size_loss(model: nn.ModuleDict, batch: Batch) -> torch.Tensor:
    """Return the second task's loss: how large is it."""
    xs, ys = batch
    return mse_loss(model["regressor"](xs).squeeze(1), ys.float())


def job(base_batch: int = 16, accumulation_steps: int = 8, windows: int = 5) -> autoaccum.Job:
    """Return the job."""
    samples = windows * accumulation_steps * base_batch
    data = TensorDataset(torch.randn(samples, 20), torch.randint(10, (samples,)))
    return autoaccum.Job(
        nn.ModuleDict({"classifier": nn.Linear(20, 10), "regressor": nn.Linear(20, 1)}),
        DataLoader(data, batch_size=base_batch),
        accumulation_steps * base_batch,
        loss=[class_loss, size_loss],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.001),
        lr_scaling="linear",
        base_batch=base_batch,
    )


if __name__ == "__main__":
    autoaccum.fit(**job().arguments)
