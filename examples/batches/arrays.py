"""Batches of NumPy arrays, which become tensors on the way to the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

import autoaccum
from autoaccum.records import FitResult

Arrays = dict[str, np.ndarray[Any, Any]]


def forward(model: nn.Module, batch: Arrays) -> Tensor:
    """Return the model's outputs for arrays."""
    weight = next(model.parameters())
    outputs: Tensor = model(torch.from_numpy(batch["inputs"]).to(weight))
    return outputs


def loss(outputs: Tensor, batch: Arrays) -> Tensor:
    """Return the mean loss."""
    return functional.cross_entropy(outputs, torch.from_numpy(batch["labels"]).to(outputs.device))


def train(target_batch: int = 8) -> FitResult:
    """Train."""
    random = np.random.default_rng(0)
    loader = [{"inputs": random.normal(size=(4, 6)), "labels": random.integers(3, size=4)} for _ in range(4)]
    return autoaccum.fit(
        nn.Linear(6, 3),
        loader,
        target_batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        forward=forward,
        split=autoaccum.Along(0),
    )


if __name__ == "__main__":
    train()
