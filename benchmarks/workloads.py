"""The bench's models: small ones of several kinds, with steps of well under a second on two cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

MIB = 2**20


class Block(nn.Module):
    """Pre-norm attention and MLP, with dropout."""

    def __init__(self, width: int, heads: int, *, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run the block."""
        n, t, c = x.shape
        q, k, v = (
            part.view(n, t, self.heads, c // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(n, t, c)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """A language model (a class for every token), or a classifier of sequences."""

    def __init__(
        self,
        *,
        vocabulary: int,
        width: int,
        layers: int,
        length: int,
        classes: int | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        causal = classes is None
        self.blocks = nn.ModuleList(Block(width, 4, causal=causal, dropout=0.1) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary if classes is None else classes)
        self.classifies, self.recompute = classes is not None, recompute

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits by class, and for a language model by token."""
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        x = self.norm(x)
        return self.head(x.mean(1)) if self.classifies else self.head(x).transpose(1, 2)


@dataclass(frozen=True)
class Workload:
    """A model, its optimizer and its data, with the memory it is given.

    Attributes:
        title: The title in tables.
        limit_bytes: The limit, in addition to the memory held when the search starts.
        target: Samples per update, and the largest size of interest to finders that accept one.
        model: Makes the model.
        batch: Makes inputs and targets of a number of samples.
        optimizer: Makes the optimizer.
    """

    title: str
    limit_bytes: int
    target: int
    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, torch.Tensor]]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy."""
        return nn.functional.cross_entropy(outputs, targets)

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and its optimizer, the same in every process."""
        torch.manual_seed(0)
        model = self.model().train()
        return model, self.optimizer(list(model.parameters()))


def resnet18() -> nn.Module:
    from torchvision import models  # noqa: PLC0415 - only the processes that make one need it

    return models.resnet18(num_classes=10)


def mobilenet() -> nn.Module:
    from torchvision import models  # noqa: PLC0415 - as above

    return models.mobilenet_v3_small(num_classes=10)


def mlp() -> nn.Module:
    def layer(inputs: int) -> list[nn.Module]:
        return [nn.Linear(inputs, 1536), nn.LayerNorm(1536), nn.GELU(), nn.Dropout(0.1)]

    return nn.Sequential(*layer(256), *(module for _ in range(3) for module in layer(1536)), nn.Linear(1536, 10))


def images(pixels: int):
    return lambda size: (torch.randn(size, 3, pixels, pixels), torch.randint(10, (size,)))


def text(vocabulary: int, length: int):
    def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(vocabulary, (size, length))
        return tokens, tokens.roll(-1, 1)

    return batch


def sequences(vocabulary: int, length: int):
    return lambda size: (torch.randint(vocabulary, (size, length)), torch.randint(10, (size,)))


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-4)


WORKLOADS = {
    "resnet18": Workload("ResNet-18, 32 px, SGD", 180 * MIB, 256, resnet18, images(32), sgd),
    "mobilenet": Workload("MobileNetV3-small, 64 px, AdamW", 160 * MIB, 256, mobilenet, images(64), adam),
    "gpt": Workload(
        "GPT, 64 tokens, AdamW",
        150 * MIB,
        256,
        lambda: Transformer(vocabulary=1000, width=128, layers=3, length=64),
        text(1000, 64),
        adam,
    ),
    "encoder": Workload(
        "Transformer encoder, 256 tokens, AdamW",
        160 * MIB,
        128,
        lambda: Transformer(vocabulary=1000, width=96, layers=2, length=256, classes=10),
        sequences(1000, 256),
        adam,
    ),
    "mlp": Workload(
        "MLP of 7.5 M parameters, AdamW",
        150 * MIB,
        1024,
        mlp,
        lambda size: (torch.randn(size, 256), torch.randint(10, (size,))),
        adam,
    ),
    "checkpointed": Workload(
        "GPT, 96 tokens, 6 layers recomputed, AdamW",
        90 * MIB,
        128,
        lambda: Transformer(vocabulary=1000, width=96, layers=6, length=96, recompute=True),
        text(1000, 96),
        adam,
    ),
}
