"""Traces the trainings of mmsegmentation's model zoo on fake tensors of the card they ran on.

The memory of each is in the package, "Memory (GB)" of its metafiles: the largest `torch.cuda.max_memory_allocated()` of
any card, with `torch.backends.cudnn.benchmark=False` (its docs/en/model_zoo.md), in GiB (for one in MiB). So are the
models and their configurations; how its runner trained is in `mm_training.py`. No training states its PyTorch version;
even the sizes of the latest, from 2023, match one before 1.11.

Operators that mmcv compiles are not here, and models with them, or that read values, are left out, by name.
"""

from __future__ import annotations

import collections
import copy
import logging
import re
import sys
import types
from pathlib import Path

import mm_training
import torch
from fake_card import CARD

NUMBER = "tensors"
# Sizes above this are in MiB.
_MOST_GIB = 1000


def runs():
    """Yield each training with known memory once, treating those that differ only in length as one.

    A name with two sizes is left out, because one of them belongs to another training.
    """
    import yaml  # noqa: PLC0415 - in the environment of `make published` alone

    of_all = [
        model
        for metafile in sorted((_package() / "configs").glob("*/metafile.yaml"))
        for model in yaml.safe_load(metafile.read_text()).get("Models", ())
    ]
    yield from once_each(filter(None, map(run_of, of_all)))


def once_each(told):
    """Yield the runs whose names have one size only, and one of those that differ only in length."""
    told = list(told)
    sizes = collections.defaultdict(set)
    for run in told:
        sizes[run["run"]].add(run["real_bytes"])
    seen = set()
    for run in told:
        which = re.sub(r"-\d+k(?=[_-])", "", run["run"]), run["real_bytes"]
        if len(sizes[run["run"]]) == 1 and which not in seen:
            seen.add(which)
            yield run


def run_of(model):
    """Return the training that a model's entry describes; None if its memory is missing."""
    about = model["Metadata"]
    told = about.get("Memory (GB)")
    if not told:
        return None
    return {
        "source": "mmsegmentation",
        "run": model["Name"],
        "of": model["Config"].split("/")[1],
        "config": model["Config"],
        "card": about["Training Resources"],
        "real_bytes": int(float(told) * (2**20 if float(told) > _MOST_GIB else 2**30)),
    }


def is_cast(run):
    """Return whether a training ran in fp16, as its name says.

    PoolFormer's configurations say so too, but not those of mmsegmentation 0.30.0, which the trainings ran by.
    """
    return "-amp-" in run["run"]


def predicted_bytes(run):
    settings = _configuration(run["config"])
    batch, size = settings.train_dataloader.batch_size, settings.crop_size

    def batch_of():
        return (
            torch.empty(batch, 3, *size, device=CARD),
            torch.zeros(batch, 1, *size, dtype=torch.long, device=CARD),
        )

    return mm_training.predicted_bytes(
        _model(settings.model),
        batch,
        batch_of,
        _loss,
        settings.optim_wrapper.optimizer,
        is_cast=is_cast(run),
        tensor_float="A100" in run["card"],
    )


def _loss(model, images, labels):
    from mmengine.structures import PixelData  # noqa: PLC0415
    from mmseg.structures import SegDataSample  # noqa: PLC0415

    samples = [
        SegDataSample(gt_sem_seg=PixelData(data=label), metainfo={"img_shape": tuple(images.shape[2:])})
        for label in labels
    ]
    losses = model.loss(images, samples)
    return sum(sum(part) if isinstance(part, list) else part for name, part in losses.items() if "loss" in name)


def _package():
    return Path(_mmseg().__file__).parent / ".mim"


def _configuration(name):
    from mmengine.config import Config  # noqa: PLC0415

    file = _package() / name
    settings = Config.fromfile(file)
    # One file assigns its model twice, of which Python takes the last; without the first a ResNet-101 is a ResNet-50.
    for overwritten in re.findall(r"^model = (.*)$", file.read_text(), re.MULTILINE)[:-1]:
        settings.merge_from_dict({"model": eval(overwritten, {"dict": dict})})  # noqa: S307 - a line of the package
    settings.model.pop("data_preprocessor", None)
    return settings


def _model(settings):
    from mmseg.registry import MODELS  # noqa: PLC0415

    try:
        with torch.device("meta"):
            return MODELS.build(copy.deepcopy(settings))
    except RuntimeError as error:
        if "item()" not in str(error):
            raise
    return MODELS.build(copy.deepcopy(settings))  # reads values as it is made


def _mmseg():
    """Import mmseg without the operators that mmcv compiles and the value that its metric reads."""
    if "mmcv.ops" not in sys.modules:
        sys.modules["mmcv.ops"] = _Uncompiled("mmcv.ops")
        logging.disable(logging.CRITICAL)
    import mmseg  # noqa: PLC0415
    import mmseg.models.decode_heads.decode_head as heads  # noqa: PLC0415
    from mmengine.registry import init_default_scope  # noqa: PLC0415

    init_default_scope("mmseg")
    heads.accuracy = _accuracy
    return mmseg


class _Uncompiled(types.ModuleType):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__init__": _refused})


def _refused(self, *_args, **_options):
    raise NotImplementedError(f"{type(self).__name__} is compiled by mmcv")


def _accuracy(scores, labels, *_args, **_options):
    """Compute mmseg's accuracy as for labels none of which is ignored."""
    _, chosen = scores.topk(1, dim=1)
    right = chosen.transpose(0, 1).eq(labels.unsqueeze(0))
    return right[:1].reshape(-1).float().sum(0, keepdim=True)
