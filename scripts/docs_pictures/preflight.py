"""Takes a picture of the top of a report's page, of a small GPT on three GPUs: the verdict and the two charts."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor, nn
from tutorial import IMAGES, browse

import autoaccum

GPUS = ("rtx-3060", "l4", "a100-40gb")
WORDS, LENGTH, WIDTH, LAYERS, TARGET_BATCH = 5000, 256, 256, 4, 1024


class Block(nn.Module):
    """A block of attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Add what the block computes."""
        normal = self.norm(x)
        x = x + self.attention(normal, normal, normal, need_weights=False)[0]
        return x + self.perceptron(x)


class GPT(nn.Module):
    """A language model without what makes it a good one."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores of the next words."""
        return self.head(self.blocks(self.words(x)))


def loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over all words."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def run() -> None:
    """Write docs/images/report.png."""
    words = torch.zeros(2, LENGTH, dtype=torch.long)
    report = autoaccum.preflight(
        GPT, (words, words), TARGET_BATCH, loss=loss, optimizer=torch.optim.AdamW, gpus=GPUS, measure=False
    )
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        top, curves, _ = report.to_html().split("</figure>")
        page.write_text(f"{top}</figure>{curves}</figure>", encoding="utf-8")
        browse(page.as_uri(), IMAGES / "report.png", "660,1290", Path(folder) / "home")


if __name__ == "__main__":
    run()
