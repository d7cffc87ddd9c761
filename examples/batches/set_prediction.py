"""Set prediction as in DETR: classes are averaged over weighted queries, boxes over the boxes of the whole batch.

No single weight of a sample serves both losses, so each is returned as a (sum, weight) pair.
"""

from __future__ import annotations

from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from autoaccum.records import FitResult

CLASSES, QUERIES = 3, 6
# No object weighs less than an object, since most queries find none.
CLASS_WEIGHTS = (1.0, 1.0, 1.0, 0.1)

Sample = dict[str, Tensor]


class Detector(nn.Module):
    """Finds boxes in an image."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Conv2d(3, 16, 8, stride=8)
        self.queries = nn.Parameter(torch.randn(QUERIES, 16))
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.classes = nn.Linear(16, CLASSES + 1)
        self.boxes = nn.Linear(16, 4)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return classes (N, Q, C + 1) and boxes (N, Q, 4) for images (N, 3, H, W)."""
        seen = self.backbone(images).flatten(2).transpose(1, 2)
        found = self.decoder(self.queries.expand(len(images), -1, -1), seen)
        return self.classes(found), self.boxes(found).sigmoid()


def collate(samples: list[Sample]) -> dict[str, Any]:
    """Return stacked images, and the samples' classes and boxes as lists."""
    return {
        "images": torch.stack([sample["image"] for sample in samples]),
        "classes": [sample["classes"] for sample in samples],
        "boxes": [sample["boxes"] for sample in samples],
    }


def loss(outputs: tuple[Tensor, Tensor], batch: dict[str, Any]) -> dict[str, tuple[Tensor, Tensor]]:
    """Match queries to boxes, and return each loss with what it is averaged over."""
    logits, boxes = outputs
    weights = logits.new_tensor(CLASS_WEIGHTS)
    labels = torch.full(logits.shape[:2], CLASSES, device=logits.device)
    distances = []
    for i, (classes, wanted) in enumerate(zip(batch["classes"], batch["boxes"], strict=True)):
        cost = torch.cdist(boxes[i], wanted, p=1) - logits[i].softmax(1)[:, classes]
        queries, objects = map(torch.as_tensor, linear_sum_assignment(cost.detach().cpu()))
        labels[i, queries] = classes[objects]
        distances.append((boxes[i, queries] - wanted[objects]).abs().sum())
    of_classes = functional.cross_entropy(logits.transpose(1, 2), labels, weights, reduction="sum")
    number = torch.tensor(float(sum(map(len, batch["classes"]))))
    return {"classes": (of_classes, weights[labels].sum()), "boxes": (torch.stack(distances).sum(), number)}


def samples(number: int) -> list[Sample]:
    """Return random images with one to four boxes each."""
    objects = [int(torch.randint(1, 5, ())) for _ in range(number)]
    return [
        {"image": torch.rand(3, 32, 32), "classes": torch.randint(CLASSES, (n,)), "boxes": torch.rand(n, 4)}
        for n in objects
    ]


def train(target_batch: int = 8) -> FitResult:
    """Train."""
    return autoaccum.fit(
        Detector(),
        DataLoader(samples(16), batch_size=4, collate_fn=list),
        target_batch,
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        forward=lambda model, batch: model(batch["images"]),
        split=autoaccum.ListOfSamples(collate),
    )


if __name__ == "__main__":
    train()
