"""Speech recognition with CTC, whose targets are concatenated: their first dimension is no dimension of samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.records import FitResult

Sample = tuple[Tensor, Tensor]


class Recogniser(nn.Module):
    """Scores the symbols of every frame."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Linear(6, 16)
        self.symbols = nn.Linear(16, 5)

    def forward(self, frames: Tensor) -> Tensor:
        """Return log-probabilities (T, N, 5) for frames (N, T, 6)."""
        found: Tensor = self.symbols(self.frames(frames).relu()).log_softmax(2).transpose(0, 1)
        return found


def collate(samples: list[Sample]) -> dict[str, Tensor]:
    """Return padded frames, concatenated symbols, and how many of each a sample has."""
    frames, symbols = zip(*samples, strict=True)
    return {
        "frames": pad_sequence(list(frames), batch_first=True),
        "symbols": torch.cat(list(symbols)),
        "frame_lengths": torch.tensor([len(one) for one in frames]),
        "symbol_lengths": torch.tensor([len(one) for one in symbols]),
    }


def loss(outputs: Tensor, batch: dict[str, Any]) -> Tensor:
    """Return the mean over samples of the loss per symbol, as `nn.CTCLoss` computes it."""
    ctc = nn.CTCLoss()
    found: Tensor = ctc(outputs, batch["symbols"], batch["frame_lengths"], batch["symbol_lengths"])
    return found


def train(target_batch: int = 8) -> FitResult:
    """Train."""
    lengths = [int(torch.randint(2, 5, ())) for _ in range(16)]
    data = [(torch.randn(3 * length, 6), torch.randint(1, 5, (length,))) for length in lengths]
    return autoaccum.fit(
        Recogniser(),
        DataLoader(data, batch_size=4, collate_fn=list),
        target_batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        forward=lambda model, batch: model(batch["frames"]),
        split=autoaccum.ListOfSamples(collate),
    )


if __name__ == "__main__":
    train()
