"""Time-first data for a recurrent network: inputs (T, N, F), targets (N,)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, default_collate

import autoaccum
from autoaccum.records import FitResult


class Classifier(nn.Module):
    """Classifies a sequence by its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return logits (N, 3) for inputs (T, N, 4)."""
        found: Tensor = self.head(self.rnn(inputs)[0][-1])
        return found


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Return inputs with time first."""
    inputs, targets = default_collate(samples)
    return inputs.transpose(0, 1), targets


def train(target_batch: int = 8) -> FitResult:
    """Train."""
    data = [(torch.randn(5, 4), torch.randint(3, ())) for _ in range(16)]
    return autoaccum.fit(
        Classifier(),
        DataLoader(data, batch_size=4, collate_fn=collate),
        target_batch,
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        split=autoaccum.Along((1, 0)),
    )


if __name__ == "__main__":
    train()
