"""The models of the benchmarks: small ones of several kinds for two cores, and two for a GPU."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        causal = classes is None
        self.blocks = nn.ModuleList(Block(width, 4, causal=causal, dropout=dropout) for _ in range(layers))
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
        limit_bytes: The limit, in addition to the memory held when the search starts; on a GPU all of its memory.
        target: Samples per step, and the largest size of interest to finders that accept one.
        model: Makes the model.
        batch: Makes inputs and targets of a number of samples, or the named inputs of a model with a loss of its own.
        optimizer: Makes the optimizer.
        device: "cpu" or "cuda".
        precision: As for `fit`; "bf16" and "fp16" autocast.
        has_own_loss: Whether the model computes its loss; else the mean cross entropy is taken.
        tf32: Whether convolutions in float32 may use Tensor Cores.
    """

    title: str
    limit_bytes: int
    target: int
    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    device: str = "cpu"
    precision: str = "fp32"
    has_own_loss: bool = False
    tf32: bool = True

    @property
    def criterion(self) -> nn.Module | None:
        """What `fit` is given as `loss`."""
        return None if self.has_own_loss else nn.CrossEntropyLoss()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """Run the model, and return the mean loss, as a loop by hand does."""
        half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(self.precision)
        is_cast = half is not None and next(model.parameters()).dtype is torch.float32
        with torch.autocast(self.device, half, enabled=is_cast):
            if self.has_own_loss:
                return model(**batch).loss
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

    def made(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Return the model and its optimizer, the same in every process."""
        torch.manual_seed(0)
        with torch.device(self.device):
            model = self.model().train()
        return model, self.optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])

    def step(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        micro_batches: list[Any],
        scaler: torch.amp.GradScaler | None = None,
    ) -> torch.Tensor:
        """Make one step by hand, the mean corrected for unequal micro-batches; the next is on its way meanwhile."""
        sizes = [len(tensors_of(batch)[0]) for batch in micro_batches]
        coming, total = placed(micro_batches[0], self.device), torch.zeros((), device=self.device)
        for number, size in enumerate(sizes):
            here = coming
            coming = placed(micro_batches[number + 1], self.device) if number + 1 < len(sizes) else None
            loss = self.loss(model, here) * (size / sum(sizes))
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.detach()
            del loss
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()
        return total


def tensors_of(batch: Any) -> tuple[torch.Tensor, ...]:
    return tuple(batch.values()) if isinstance(batch, dict) else tuple(batch)


def each(batch: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return a batch of the same form, of what the function makes of its tensors."""
    made = [function(tensor) for tensor in tensors_of(batch)]
    return dict(zip(batch, made, strict=True)) if isinstance(batch, dict) else tuple(made)


def placed(batch: Any, device: str) -> Any:
    return each(batch, lambda tensor: tensor.to(device, non_blocking=True))


def cut(batch: Any, sizes: tuple[int, ...]) -> list[Any]:
    """Return micro-batches of these sizes."""
    ends = list(itertools.accumulate(sizes))
    parts = zip((0, *ends), ends, strict=False)
    return [each(batch, lambda tensor, begin=begin, end=end: tensor[begin:end]) for begin, end in parts]


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


def torchvision_model(name: str, *, channels_last: bool = False) -> nn.Module:
    from torchvision import models  # noqa: PLC0415 - as above

    model = getattr(models, name)().train()
    return model.to(memory_format=torch.channels_last) if channels_last else model


def photographs(side: int, classes: int, size: int, *, masks: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, of which at most eight differ, and their classes, or those of their pixels."""
    some = torch.randn(min(size, 8), 3, side, side)
    labels = torch.randint(classes, (size, side, side) if masks else (size,))
    return some.repeat(-(-size // 8), 1, 1, 1)[:size], labels


def hugging_face_model(kind: str, attention: str | None = None, **settings: Any) -> nn.Module:
    import transformers  # noqa: PLC0415 - as above

    model_class = getattr(transformers, kind)
    config = model_class.config_class(bos_token_id=1, eos_token_id=2, pad_token_id=0, **settings)
    if kind != "T5ForConditionalGeneration":
        config.use_cache = False
    if attention is not None:
        config._attn_implementation = attention
    return model_class(config).train()


def labelled_tokens(vocabulary: int, length: int, size: int, targets: int | None = None) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, vocabulary, (size, length))
    return {"input_ids": tokens, "labels": tokens[:, :targets].clone()}


def gpt2(length: int = 1024, **settings: Any) -> tuple[Callable[[], nn.Module], Callable[[int], Any]]:
    """Return what makes a GPT-2, by default of 124 million parameters, and its batches."""
    make = functools.partial(hugging_face_model, "GPT2LMHeadModel", n_positions=length, **settings)
    return make, functools.partial(labelled_tokens, settings.get("vocab_size", 50257), length)


_ON_GPU = {"device": "cuda", "precision": "bf16"}
GPU_WORKLOADS = {
    "ResNet-50": Workload(
        "ResNet-50",
        8 * 10**9,
        512,
        functools.partial(torchvision_model, "resnet50"),
        functools.partial(photographs, 224, 1000),
        adam,
        **_ON_GPU,
    ),
    "GPT-2": Workload("GPT-2", 8 * 10**9, 512, *gpt2(512), adam, has_own_loss=True, **_ON_GPU),
}
