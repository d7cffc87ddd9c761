"""Layers that move in every forward pass are named once; the remedies of docs/losses.md are exact."""

import re

import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn.utils import spectral_norm

import autoaccum
from helpers import logged

WIDTH = 4


def a_batch(samples=12):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(samples, WIDTH, generator=generator).double(), torch.zeros(samples, WIDTH).double()


def said_of(*layers, sizes=3, windows=3, **options):
    with logged() as lines:
        runner = autoaccum.Runner(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), *layers).double(),
            None,
            autoaccum.plan(12, 12 // sizes),
            device="cpu",
            precision="fp32",
            **options,
        )
        for _ in range(windows):
            runner.step(a_batch())
    return [line for line in lines if "docs/losses.md" in line and not line.startswith("BatchNorm:")]


class Moco(nn.Module):
    """An encoder, its momentum copy, and a queue of keys."""

    def __init__(self):
        super().__init__()
        self.encoder, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("queue", torch.randn(24, WIDTH))

    def forward(self, inputs):
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.encoder.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
            self.queue = torch.cat([self.queue, self.slow(inputs)])[-24:]
        return self.encoder(inputs)


class Codebook(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("embed_avg", torch.ones(WIDTH))

    def forward(self, inputs):
        self.embed_avg.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
        return inputs + self.embed_avg


class Stays(nn.Module):
    """Its buffers are written and stay what they are, or stay NaN."""

    def __init__(self):
        super().__init__()
        self.register_buffer("same", torch.ones(3))
        self.register_buffer("undefined", torch.full((3,), torch.nan))

    def forward(self, inputs):
        self.same.mul_(1.0)
        self.undefined.mul_(2.0)
        return inputs


class Counted(nn.Module):
    """Counts in a metric, which is meant to move."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=2)

    def forward(self, inputs):
        self.accuracy(inputs[:, :2], torch.zeros(len(inputs), dtype=torch.long))
        return inputs


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (Codebook, ["1.embed_avg"]),
        (Moco, ["1.queue", "1.slow.bias", "1.slow.weight"]),
        (lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)), ["1.weight_u", "1.weight_v"]),
    ],
    ids=["codebook", "momentum encoder and queue", "spectral norm"],
)
@pytest.mark.filterwarnings("ignore:autoaccum. the model.s outputs for a sample depend on the others")
@pytest.mark.parametrize("options", [{}, {"loss": nn.MSELoss(), "loss_scope": "window"}], ids=["usual", "window loss"])
def test_what_forward_moves_is_named_once(layer, names, options):
    (text,) = said_of(layer(), **options)

    moved = re.match(r"forward\(\) moves (.*?): once for each micro-batch, 3 times in this optimizer step", text)
    assert sorted(moved[1].split(", ")) == names


@pytest.mark.parametrize(
    "layer", [Stays(), nn.Dropout(), nn.BatchNorm1d(WIDTH), Counted()], ids=lambda it: type(it).__name__
)
def test_what_stays_the_same_or_is_meant_to_move_is_not_spoken_of(layer):
    assert said_of(layer) == []
