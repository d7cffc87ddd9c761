"""A batch as for Qwen2-VL: the patches of all images are rows of one tensor, and a grid says how many each image has.

A split of your own cuts the collated batch, so that the loader stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.records import FitResult

TOKENS, WORDS, PATCH = 8, 20, 12

Sample = dict[str, Tensor]


class ImagesInText:
    """Counts, cuts and joins batches of texts with one image each."""

    def count(self, batch: Sample) -> int:
        """Return the number of texts."""
        return len(batch["input_ids"])

    def cut(self, batch: Sample, sizes: Sequence[int]) -> list[Sample]:
        """Return consecutive parts: rows of the texts and grids, and the patches that the grids give."""
        patches = batch["image_grid_thw"].prod(1)
        stops = list(itertools.accumulate(sizes))
        starts = [0, *stops[:-1]]
        return [
            {
                "input_ids": batch["input_ids"][start:stop],
                "labels": batch["labels"][start:stop],
                "image_grid_thw": batch["image_grid_thw"][start:stop],
                "pixel_values": batch["pixel_values"][int(patches[:start].sum()) : int(patches[:stop].sum())],
            }
            for start, stop in zip(starts, stops, strict=True)
        ]

    def join(self, batches: Sequence[Sample]) -> Sample:
        """Return one batch of all texts."""
        return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


class Reader(nn.Module):
    """Predicts the next word of a text that begins with an image."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.patches = nn.Linear(PATCH, 16)
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, input_ids: Tensor, pixel_values: Tensor, image_grid_thw: Tensor) -> Tensor:
        """Return logits (N, T, words)."""
        images = self.patches(pixel_values).split(image_grid_thw.prod(1).tolist())
        seen = torch.stack([image.mean(0) for image in images]).unsqueeze(1)
        mask = nn.Transformer.generate_square_subsequent_mask(TOKENS, dtype=seen.dtype)
        found: Tensor = self.head(self.block(self.words(input_ids) + seen, src_mask=mask))
        return found


def loss(outputs: Tensor, batch: Sample) -> Tensor:
    """Return the mean over the words that count."""
    return functional.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


def collate(samples: list[Sample]) -> Sample:
    """Return the samples as one batch."""
    return ImagesInText().join(samples)


def sample() -> Sample:
    """Return a random text, whose padding does not count, and an image of two to twelve patches."""
    grid = torch.tensor([[1, int(torch.randint(1, 4, ())), int(torch.randint(2, 5, ()))]])
    ids = torch.randint(WORDS, (1, TOKENS))
    padded = torch.arange(TOKENS) >= int(torch.randint(3, TOKENS + 1, ()))
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(padded, -100),
        "image_grid_thw": grid,
        "pixel_values": torch.randn(int(grid.prod()), PATCH),
    }


def train(target_batch: int = 8) -> FitResult:
    """Train."""
    return autoaccum.fit(
        Reader(),
        DataLoader([sample() for _ in range(16)], batch_size=4, collate_fn=collate),
        target_batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        split=ImagesInText(),
    )


if __name__ == "__main__":
    train()
