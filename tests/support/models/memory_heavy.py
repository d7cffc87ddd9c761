"""Models that keep much for the backward pass."""

import random

import numpy as np
import torch
from torch import nn


class Block(nn.Module):
    """Has statistics and random masks, which computing it again could get wrong."""

    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(width, 4 * width), nn.BatchNorm1d(4 * width), nn.GELU(), nn.Dropout(0.3))
        self.head = nn.Linear(4 * width, width)

    def forward(self, inputs):
        return inputs + self.head(self.body(inputs))


class Stack(nn.Module):
    def __init__(self, width=32, depth=6):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.last = nn.Linear(width, 4)

    def forward(self, inputs):
        for block in self.blocks:
            inputs = block(inputs)
        return self.last(inputs)


def seed():
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002


def data():
    torch.manual_seed(2)
    return [(torch.randn(8, 32), torch.randint(0, 4, (8,))) for _ in range(6)]


class Feed(nn.Module):
    """Keeps much for backward, and moves nothing that a cut could change."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 128), nn.GELU(), nn.Dropout(0.1), nn.Linear(128, 32))

    def forward(self, inputs):
        return inputs + self.inner(inputs)


class Wide(Stack):
    def __init__(self):
        super().__init__(depth=0)
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Feed() for _ in range(4)])

    def forward(self, inputs):
        return super().forward(inputs.unsqueeze(1).repeat(1, 512, 1)).mean(1)


def a_step(model):
    seed()
    inputs, targets = torch.randn(16, 32), torch.randint(0, 4, (16,))
    nn.functional.cross_entropy(model(inputs), targets).backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    draws = torch.rand(3), torch.tensor([random.random(), np.random.rand()])  # noqa: NPY002, S311
    return [*gradients, *(buffer.clone() for buffer in model.buffers()), *draws]
