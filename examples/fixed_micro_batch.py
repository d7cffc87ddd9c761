"""Batches of 1,024 in micro-batches of 256, a size that is known beforehand.

    python examples/fixed_micro_batch.py

Nothing is searched for: each optimizer step uses four micro-batches. A shuffled loader yields them; a window is four
of its batches.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import autoaccum
from autoaccum.records import FitResult


def train(micro_batch: int = 256, accumulation_steps: int = 4, windows: int = 5) -> FitResult:
    """Train; the loader's batches are the micro-batches."""
    target_batch = accumulation_steps * micro_batch
    samples = windows * target_batch
    data = TensorDataset(torch.randn(samples, 20), torch.randint(5, (samples,)))
    return autoaccum.fit(
        nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5)),
        DataLoader(data, batch_size=micro_batch, shuffle=True),
        target_batch,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.001),
        micro_batch=micro_batch,
    )


if __name__ == "__main__":
    train()
