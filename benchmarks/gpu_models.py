"""Models and windows for the parts of gpu.py, and the state after training, for comparison bit for bit."""

from __future__ import annotations

import functools
import os
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from faults import state_of

CLASSES = 5


def be_deterministic():
    """Make equal work give equal bits; call before the device is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True


class Witnessed(nn.Module):
    """A network that records the numbers of its samples, in order, in a buffer.

    Args:
        body: The network.
        noted: The capacity of the buffer.
    """

    def __init__(self, body, noted):
        super().__init__()
        self.body = body
        self.register_buffer("order", torch.full((noted,), -1))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, inputs):
        """Return the body's outputs."""
        features, ids = inputs
        start = int(self.seen)
        self.order[start : start + len(ids)] = ids
        self.seen += len(ids)
        return self.body(features)

    def noted(self):
        """Return the numbers."""
        return self.order[: int(self.seen)].tolist()


class Positions(nn.Module):
    """Layers with BatchNorm and dropout, applied at many positions of each sample."""

    def __init__(self, width):
        super().__init__()
        self.first, self.norm = nn.Linear(width, width), nn.BatchNorm1d(width)
        self.second, self.head = nn.Linear(width, width), nn.Linear(width, CLASSES)

    def forward(self, features):
        """Return logits for (N, positions, width)."""
        n, positions, width = features.shape
        hidden = torch.relu(self.norm(self.first(features.reshape(n * positions, width))))
        hidden = torch.tanh(self.second(functional.dropout(hidden, 0.2, self.training)))
        return self.head(hidden.view(n, positions, width).mean(1))


class Attention(nn.Module):
    """One block of attention, written out: the fused kernels' backward passes are not deterministic."""

    def __init__(self, width):
        super().__init__()
        self.norm, self.mix, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, features):
        """Return logits for (N, positions, width)."""
        queries, keys, values = self.mix(self.norm(features)).chunk(3, dim=-1)
        weights = torch.softmax(queries @ keys.transpose(1, 2) / keys.shape[-1] ** 0.5, dim=-1)
        mixed = functional.dropout(weights, 0.1, self.training) @ values
        return self.head((features + self.out(mixed)).mean(1))


class Convolutional(nn.Module):
    """Two convolutions with BatchNorm between them."""

    def __init__(self, width):
        super().__init__()
        channels = max(4, width // 16)
        self.first, self.norm = nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.second, self.head = nn.Conv2d(channels, channels, 3, padding=1), nn.Linear(channels, CLASSES)

    def forward(self, features):
        """Return logits for (N, positions, width), seen as images."""
        hidden = torch.relu(self.norm(self.first(features.unsqueeze(1))))
        hidden = self.second(functional.dropout(hidden, 0.2, self.training))
        return self.head(hidden.mean((2, 3)))


BODIES = {"layers": Positions, "attention": Attention, "convolutions": Convolutional}


@dataclass(frozen=True)
class Work:
    """A training that is the same in every run.

    Attributes:
        body: Name in `BODIES`.
        samples: Samples per window.
        positions: Positions per sample.
        width: Features per position.
        windows: The number of windows.
    """

    body: str
    samples: int
    positions: int
    width: int
    windows: int

    @functools.lru_cache(maxsize=4)  # noqa: B019 - a frozen record, and few of them
    def batches(self, *, pinned=False):
        """Return the windows, one batch each, with samples numbered consecutively; do not write to them."""
        generator = torch.Generator().manual_seed(5)
        batches = []
        for number in range(self.windows):
            features = torch.randn(self.samples, self.positions, self.width, generator=generator)
            targets = torch.randint(CLASSES, (self.samples,), generator=generator)
            ids = torch.arange(number * self.samples, (number + 1) * self.samples)
            parts = (features, ids, targets)
            features, ids, targets = (part.pin_memory() for part in parts) if pinned else parts
            batches.append(((features, ids), targets))
        return batches

    def model(self):
        """Seed the generators and return a model."""
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global generator, which is compared
        return Witnessed(BODIES[self.body](self.width), 4 * self.windows * self.samples)

    def all_ids(self, windows=None):
        """Return the numbers of all samples, in order."""
        return list(range((windows or self.windows) * self.samples))


def whole_state(model, optimizer, scaler):
    """Return all state that a step may change, including the card's random state."""
    state = state_of(model, optimizer, scaler)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["random state of the card"] = bytes(torch.cuda.get_rng_state().numpy())
    return state


class SmallGpt(nn.Module):
    """A causal language model that returns its loss, called with a mapping.

    Args:
        words: Size of the vocabulary.
        width: Width of the residual stream.
        layers: Number of blocks.
        heads: Attention heads.
        length: The longest sequence.
    """

    def __init__(self, words=8192, width=512, layers=6, heads=8, length=512):
        super().__init__()
        self.heads = heads
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {
                    "before": nn.LayerNorm(width),
                    "mix": nn.Linear(width, 3 * width),
                    "out": nn.Linear(width, width),
                    "between": nn.LayerNorm(width),
                    "wide": nn.Linear(width, 4 * width),
                    "narrow": nn.Linear(4 * width, width),
                }
            )
            for _ in range(layers)
        )
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, input_ids, labels):
        """Return a mapping with the loss."""
        n, length = input_ids.shape
        hidden = self.words(input_ids) + self.places(torch.arange(length, device=input_ids.device))
        for block in self.blocks:
            mixed = block["mix"](block["before"](hidden)).view(n, length, 3, self.heads, -1)
            queries, keys, values = (part.transpose(1, 2) for part in mixed.unbind(2))
            attended = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
            hidden = hidden + block["out"](attended.transpose(1, 2).reshape(n, length, -1))
            hidden = hidden + block["narrow"](functional.gelu(block["wide"](block["between"](hidden))))
        logits = self.head(self.last(hidden))
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        return {"loss": loss}
