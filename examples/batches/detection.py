"""Detection with torchvision: images and boxes differ from sample to sample, so the loader yields lists of samples.

The model returns a mapping of losses, which are added.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchvision.models.detection import FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator

import autoaccum
from autoaccum.records import FitResult

Sample = tuple[Tensor, dict[str, Tensor]]


def collate(samples: list[Sample]) -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Return what the model takes: images, and their boxes and labels."""
    images, targets = zip(*samples, strict=True)
    return list(images), list(targets)


def losses(model: nn.Module, batch: Any) -> dict[str, Tensor]:
    """Return the model's own losses."""
    images, targets = batch
    found: dict[str, Tensor] = model(images, targets)
    return found


def model() -> FasterRCNN:
    """Return a small detector.

    It trains on every anchor and every proposal, as many for each image: its losses are means over them, and so means
    over images. With torchvision's defaults it draws a part of them at random.
    """
    backbone = nn.Sequential(nn.Conv2d(3, 8, 3, stride=8, padding=1), nn.ReLU())
    backbone.out_channels = 8
    return FasterRCNN(
        backbone,
        num_classes=3,
        rpn_anchor_generator=AnchorGenerator(sizes=((16, 32),), aspect_ratios=((1.0,),)),
        min_size=64,
        max_size=64,
        rpn_fg_iou_thresh=0.5,
        rpn_bg_iou_thresh=0.5,
        rpn_batch_size_per_image=10_000,
        rpn_nms_thresh=1.0,
        rpn_pre_nms_top_n_train=20,
        rpn_post_nms_top_n_train=20,
        box_batch_size_per_image=10_000,
        box_positive_fraction=1.0,
    )


def samples(number: int) -> list[Sample]:
    """Return random images of 64 x 64, each with two boxes."""
    corners = torch.rand(number, 2, 2) * 30
    boxes = torch.cat([corners, corners + 16 + torch.rand(number, 2, 2) * 16], dim=2)
    labels = torch.randint(1, 3, (number, 2))
    return [(torch.rand(3, 64, 64), {"boxes": boxes[i], "labels": labels[i]}) for i in range(number)]


def train(target_batch: int = 8) -> FitResult:
    """Train."""
    return autoaccum.fit(
        model(),
        DataLoader(samples(16), batch_size=4, collate_fn=list),
        target_batch,
        loss=[losses],
        loss_reduction="mean",
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        split=autoaccum.ListOfSamples(collate),
    )


if __name__ == "__main__":
    train()
