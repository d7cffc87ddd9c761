"""Rows that belong together, such as a preferred answer beside a rejected one: a sample is a group of them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

import autoaccum
from autoaccum.records import FitResult

if TYPE_CHECKING:
    from collections.abc import Sequence


class Groups:
    """Batches of so many rows for each sample, which no micro-batch takes apart."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def count(self, batch: Tensor) -> int:
        """Return the number of groups."""
        return len(batch) // self.rows

    def cut(self, batch: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return consecutive parts of so many groups each."""
        ends = itertools.accumulate(size * self.rows for size in sizes)
        return list(batch.tensor_split([*ends][:-1]))

    def join(self, batches: Sequence[Tensor]) -> Tensor:
        """Return the groups of all parts."""
        return torch.cat([*batches])


def loss(scores: Tensor, _: Tensor) -> Tensor:
    """Return the mean over pairs of how much the first row is preferred to the second."""
    return -functional.logsigmoid(scores[0::2] - scores[1::2]).mean()


def train(target_batch: int = 8) -> FitResult:
    """Train; `target_batch` counts pairs."""
    return autoaccum.fit(
        nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1)),
        [torch.randn(8, 6) for _ in range(4)],  # of four pairs each
        target_batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        split=Groups(2),
    )


if __name__ == "__main__":
    train()
