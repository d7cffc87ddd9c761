"""Traces the trainings of mmaction2's model zoo on fake tensors of the card they ran on.

published/mmaction2.csv has what they took: the largest `torch.cuda.max_memory_allocated()` of any card, in MiB, as
mmcv's logger writes it. Models and configurations are those of the package, version 0.24.1; how its runner trained is
in `mm_training.py`. The cards are not named; float32 is computed without Tensor Cores, as before Ampere.

Left out, by name, are models with operators that mmcv compiles, frames whose size changes in the course of a training
(multigrid), images normalised on the card, and what is no recognizer of videos.
"""

from __future__ import annotations

import collections
import copy
import csv
import logging
import warnings
from pathlib import Path

import mm_training
import torch
from fake_card import CARD

NUMBER = "tensors"
PUBLISHED = Path(__file__).parent / "published" / "mmaction2.csv"
# Sizes of one configuration that differ by less are those of one training that ran more than once.
SAME = 0.001


def runs():
    """Yield each training once; a configuration with two sizes is left out, because one belongs to another."""
    sizes = collections.defaultdict(list)
    with PUBLISHED.open() as lines:
        for line in csv.DictReader(lines):
            sizes[line["family"], line["config"]].append(int(line["mib"]))
    for (family, config), found in sizes.items():
        if max(found) <= min(found) * (1 + SAME):
            yield {
                "source": "mmaction2",
                "run": Path(config).stem,
                "of": family,
                "config": config,
                "card": "",
                "real_bytes": found[0] * 2**20,
            }


def predicted_bytes(run):
    settings = _configuration(run["config"])
    batch, shape = settings.data.videos_per_gpu, _shape(settings)
    model = _model(settings.model)
    classes = model.cls_head.num_classes
    is_multiple = model.cls_head.multi_class

    # mmcv's runner lets go of the batch before the backward pass.
    def loss_of(fake):
        videos = torch.empty(batch, *shape, device=CARD)
        labels = torch.zeros(batch, classes, device=CARD)
        if not is_multiple:
            labels = torch.zeros(batch, 1, dtype=torch.long, device=CARD)
        losses = fake.forward_train(videos, labels)
        return sum(part.mean() for name, part in losses.items() if "loss" in name)

    optimizer = {key: value for key, value in settings.optimizer.items() if key in ("type", "lr", "momentum")}
    clipped = settings.optimizer_config.get("grad_clip")
    return mm_training.predicted_bytes(
        model, batch, tuple, loss_of, optimizer, clipped_to=clipped["max_norm"] if clipped else None
    )


def _shape(settings):
    """Return the shape of one sample, as the pipeline of the training makes it."""
    steps = {step["type"].removeprefix("Dense"): step for step in settings.train_pipeline}
    frames, form = steps["SampleFrames"], steps["FormatShape"]["input_format"]
    clips, length = frames.get("num_clips", 1), frames["clip_len"]
    # Cut to a square, or scaled to one by the last of the steps of that name.
    width, height = 2 * [steps["RandomCrop"]["size"]] if "RandomCrop" in steps else steps["Resize"]["scale"]
    if form == "NCHW":
        return clips * length, 3, height, width
    if form == "NCHW_Flow":
        return clips, 2 * length, height, width
    if form == "NCTHW":
        return clips, settings.model.backbone.get("in_channels", 3), length, height, width
    raise ValueError(f"{form} is no format of videos")


def _configuration(name):
    from mmcv import Config  # noqa: PLC0415 - in an environment of `make published` alone

    settings = Config.fromfile(_package() / name)
    if "module_hooks" in settings or "multigrid" in settings:
        raise ValueError("normalised on the card, or of sizes that change")
    return settings


def _package():
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    import mmaction  # noqa: PLC0415

    return Path(mmaction.__file__).parent / ".mim" / "configs"


def _model(settings):
    from mmaction.models import build_model  # noqa: PLC0415

    settings = copy.deepcopy(settings)
    if "pretrained" in settings.backbone:
        settings.backbone.pretrained = None
    with torch.device("meta"):
        model = build_model(settings)
    head = model.cls_head
    # Without its accuracy, which it computes on the host.
    head.loss = lambda scores, labels, **_: {"loss_cls": head.loss_cls(scores, labels)}
    return model
