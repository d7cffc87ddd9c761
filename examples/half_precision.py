"""Mixed precision in fp16 with a gradient scaler, clipping, and batches that are dictionaries.

    python examples/half_precision.py

`forward` passes a part of the batch to the model, and the loss gets the whole batch. Gradients are unscaled before they
are clipped, and the scaler is updated once a window, also in the last, shorter one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.records import FitResult

Batch = dict[str, torch.Tensor]


def forward(model: nn.Module, data: Batch) -> torch.Tensor:
    """Return the model's outputs for a batch."""
    outputs: torch.Tensor = model(data["image"])
    return outputs


def loss(outputs: torch.Tensor, data: Batch) -> torch.Tensor:
    """Return the batch's mean loss."""
    return cross_entropy(outputs, data["label"])


def train(target_batch: int = 32, samples: int = 80, side: int = 8) -> FitResult:
    """Train."""
    data: Any = [{"image": torch.randn(3, side, side), "label": i % 10} for i in range(samples)]
    return autoaccum.fit(
        nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, 32), nn.ReLU(), nn.Linear(32, 10)),
        DataLoader(data, batch_size=target_batch // 2),
        target_batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
        forward=forward,
        precision="fp16",
        clip_grad_norm=1.0,
    )


if __name__ == "__main__":
    train()
