"""Sequences of unlike lengths for a recurrent network, packed when a micro-batch is made of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.records import FitResult

Sample = tuple[Tensor, Tensor]


class Tagger(nn.Module):
    """Classifies every step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, sequences: PackedSequence) -> Tensor:
        """Return logits (steps of all sequences, 3)."""
        found: Tensor = self.head(self.rnn(sequences)[0].data)
        return found


def collate(samples: list[Sample]) -> tuple[PackedSequence, PackedSequence]:
    """Return packed inputs and targets, in the same order."""
    inputs, targets = zip(*samples, strict=True)
    return pack_sequence(list(inputs), enforce_sorted=False), pack_sequence(list(targets), enforce_sorted=False)


def loss(outputs: Tensor, targets: PackedSequence) -> Tensor:
    """Return the mean over all steps."""
    return functional.cross_entropy(outputs, targets.data)


def steps(samples: list[Sample]) -> float:
    """Return the number of steps, over which the loss is a mean."""
    return float(sum(len(targets) for _, targets in samples))


def train(target_batch: int = 8) -> FitResult:
    """Train."""
    lengths = [int(torch.randint(2, 9, ())) for _ in range(16)]
    data = [(torch.randn(length, 4), torch.randint(3, (length,))) for length in lengths]
    return autoaccum.fit(
        Tagger(),
        DataLoader(data, batch_size=4, collate_fn=list),
        target_batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        split=autoaccum.ListOfSamples(collate, weight=steps),
    )


if __name__ == "__main__":
    train()
