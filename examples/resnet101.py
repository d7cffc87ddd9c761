"""ResNet-101 on 224 x 224 images with Adam and batches of 100, on a GPU that fits about 50.

    pip install torchvision
    python examples/resnet101.py

By hand, this takes the number 50, found by running out of memory; a division of the loss that is right for a mean and
wrong for a sum; and a condition for the last, shorter window. The images are random. A step takes about half a minute
without a GPU.
"""

from __future__ import annotations

import torch
import torchvision
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.records import FitResult


def train(images: int = 250, side: int = 224, target_batch: int = 100) -> FitResult:
    """Train; its third window is half as long as the others."""
    data = TensorDataset(torch.randn(images, 3, side, side), torch.randint(100, (images,)))
    return autoaccum.fit(
        torchvision.models.resnet101(),
        DataLoader(data, batch_size=target_batch),
        target_batch,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=5e-4),
    )


if __name__ == "__main__":
    train()
