"""What the fault sweep goes through: models, precisions and optimizers, and a set of cases in which all pairs meet.

Networks are tiny (fp16 on the CPU is 50 times slower than the rest).
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import autoaccum

SAMPLES, WINDOWS, CLASSES = 12, 4, 3
_FEATURES, _WIDTH, _LENGTH, _WORDS = 6, 8, 5, 9


class Noting(nn.Module):
    """Notes the sizes of the micro-batches that a model is trained on, in buffers that a failure has to put back."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.register_buffer("sizes", torch.zeros(4 * WINDOWS * SAMPLES, dtype=torch.long))
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))

    def forward(self, *inputs, **named):
        self.sizes[int(self.passes)] = len(next(itertools.chain(inputs, named.values())))
        self.passes += 1
        return self.body(*inputs, **named)


def _linears(*between):
    return nn.Sequential(nn.Linear(_FEATURES, _WIDTH), *between, nn.Linear(_WIDTH, CLASSES))


def mlp():
    return _linears(nn.ReLU(), nn.Dropout(0.3), nn.Linear(_WIDTH, _WIDTH))


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, CLASSES)
    )


def frozen():
    """The first two layers are frozen, the second a BatchNorm in evaluation mode."""
    net = _linears(nn.BatchNorm1d(_WIDTH), nn.ReLU(), nn.Dropout(0.3))
    net[:2].requires_grad_(requires_grad=False)
    net[1].eval()
    return net


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant):
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2))
        self.layers, self.use_reentrant = _linears(*blocks), use_reentrant

    def forward(self, features):
        first, *blocks, last = self.layers
        hidden = first(features)
        for block in blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.use_reentrant)
        return last(hidden)


class Tied(nn.Module):
    """A language model whose head is its embedding, called with a mapping and returning its own loss."""

    def __init__(self):
        super().__init__()
        self.embed, self.mix = nn.Embedding(_WORDS, _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, labels):
        logits = self.head(torch.tanh(self.mix(self.embed(tokens))))
        return {"loss": functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Moody(nn.Module):
    """Writes one buffer, puts another in its place, and draws from four random generators."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(_FEATURES, _WIDTH), nn.BatchNorm1d(_WIDTH)
        self.last = nn.Linear(_WIDTH, CLASSES)
        self.register_buffer("steps", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(_WIDTH))
        self.own = torch.Generator().manual_seed(3)

    def forward(self, features):
        hidden = functional.dropout(torch.relu(self.norm(self.first(features))), 0.3, self.training)
        self.steps += 1
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().float().mean(0)
        if not self.training:
            return self.last(hidden)
        noise = torch.rand((), generator=self.own) + random.random() + np.random.randn()  # noqa: NPY002, S311
        return self.last(hidden) * (1.0 + 0.01 * noise)


class Renormed(nn.Module):
    """Writes its own weights in the forward pass (`max_norm`)."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(_WORDS, _WIDTH, max_norm=1.0), nn.Linear(_WIDTH, CLASSES)

    def forward(self, tokens):
        return self.head(self.embed(tokens).mean(1))


# --- losses -----------------------------------------------------------------------------------------------------------


def plain(outputs, targets):
    return functional.cross_entropy(outputs.float(), targets)


def pair(outputs, targets):
    counted = targets != 0
    each = functional.cross_entropy(outputs.float(), targets, reduction="none")
    return (each * counted).sum(), counted.sum()


def named(outputs, targets):
    """A pair beside a mean, so that the pairs' weights have to be learned before the first backward pass."""
    return {"pair": pair(outputs, targets), "size": outputs.float().square().mean()}


def entropy(model, batch):
    return plain(model(batch[0]), batch[1])


def energy(model, batch):
    return model(batch[0]).float().square().mean()


def contrast(outputs, targets):
    alike = functional.normalize(outputs.float()) @ functional.normalize(targets).T
    return functional.cross_entropy(5.0 * alike, torch.arange(len(outputs)))


# --- windows ----------------------------------------------------------------------------------------------------------


def vectors(*shape):
    return torch.randn(SAMPLES, *(shape or (_FEATURES,))), torch.randint(0, CLASSES, (SAMPLES,))


def images():
    return vectors(1, 6, 6)


def words():
    return torch.randint(1, _WORDS, (SAMPLES, _LENGTH)), torch.randint(0, CLASSES, (SAMPLES,))


def sentences():
    """Sentences of one token to five, padded with 0; padding has no target."""
    shape = SAMPLES, _LENGTH
    padding = torch.arange(_LENGTH) >= torch.randint(1, _LENGTH + 1, (SAMPLES, 1))
    tokens, targets = torch.randint(1, _WORDS, shape), torch.randint(0, CLASSES, shape)
    return tokens.masked_fill(padding, 0), targets.masked_fill(padding, -100)


def views():
    return torch.randn(SAMPLES, _FEATURES), torch.randn(SAMPLES, CLASSES)


@dataclass(frozen=True)
class Model:
    make: Callable  # makes it
    window: Callable  # makes the inputs and targets of one window
    loss: object = None  # as for `Runner`
    options: dict = field(default_factory=dict)  # further arguments of `Runner`
    forwards: int = 1  # how often each micro-batch goes through it
    # Whether it writes its parameters in the forward pass, which is known after a window.
    writes_parameters: bool = False

    @property
    def is_found_out(self):
        """Whether losses are computed for fewer samples, to see what they run over."""
        return not self.options


# Without a check, in which lack of memory is no event where the loss is one of torch.
MEAN = {"loss_reduction": "mean"}
SMALL = {
    "mlp": Model(mlp, vectors, nn.CrossEntropyLoss(), MEAN),
    "convolutional": Model(convolutional, images, plain),
    "tied weights": Model(Tied, sentences),
    "frozen layers": Model(frozen, vectors, nn.CrossEntropyLoss(reduction="none")),
    "reentrant checkpoint": Model(
        lambda: Checkpointed(use_reentrant=True),
        vectors,
        nn.CrossEntropyLoss(reduction="sum"),
        {"loss_reduction": "sum"},
    ),
    "checkpoint": Model(lambda: Checkpointed(use_reentrant=False), vectors, pair),
    "own buffers": Model(Moody, vectors, plain),
    "own weights": Model(Renormed, words, nn.CrossEntropyLoss(), MEAN, writes_parameters=True),
    "several losses": Model(mlp, vectors, [entropy, energy], forwards=2),
    "named losses": Model(mlp, vectors, named),
    "window loss": Model(mlp, views, contrast, {"loss_scope": "window"}),
}
PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = {
    f"{kind.__name__}, {form}": (kind, {**settings, "foreach": form == "foreach"})
    for kind, settings in (
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 1e-2}),
        (torch.optim.AdamW, {"lr": 1e-2}),
        (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
        (torch.optim.Adagrad, {"lr": 1e-2}),
    )
    for form in ("foreach", "loop")
}
CUTS = ((6, 6), (4, 4, 4), (5, 4, 3), (3, 3, 3, 3))


@dataclass(frozen=True)
class Case:
    """A training of a few windows, the same in every run."""

    model: str  # name in `SMALL`
    precision: str = "fp32"  # one of `PRECISIONS`
    optimizer: str = "Adam, loop"  # name in `OPTIMIZERS`
    sizes: tuple[int, ...] = (6, 6)  # the cut to begin with
    clip: float | None = None  # norm to which gradients are clipped
    pieces: tuple[int, ...] = (SAMPLES,)  # sizes of the loader's batches that make a window; several are joined

    def __str__(self):
        return f"{self.model}; {self.precision}; {self.optimizer}"

    @property
    def kind(self):
        return SMALL[self.model]

    def windows(self):
        torch.manual_seed(5)
        made = [zip(*(half.split(self.pieces) for half in self.kind.window()), strict=True) for _ in range(WINDOWS)]
        if self.kind.make is Tied:
            return [[dict(zip(("tokens", "labels"), part, strict=True)) for part in parts] for parts in made]
        return list(map(list, made))

    def runner(self, *, device="cpu", callbacks=()):
        """Return the model and a runner of it, the random generators seeded on the way."""
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global generator, which models draw from
        model = Noting(self.kind.make())
        make, settings = OPTIMIZERS[self.optimizer]
        runner = autoaccum.Runner(
            model,
            make(model.parameters(), **settings),
            autoaccum.Plan(SAMPLES, self.sizes),
            loss=self.kind.loss,
            precision=self.precision,
            device=device,
            clip_grad_norm=self.clip,
            callbacks=callbacks,
            **self.kind.options,
        )
        return model, runner


def pairs():
    """Return cases in which every model meets every precision and optimizer, and every optimizer every precision."""
    return [
        Case(
            model,
            PRECISIONS[(row + column) % len(PRECISIONS)],
            optimizer,
            sizes=CUTS[(row + column // 3) % len(CUTS)],
            clip=(None, 0.5)[(row + column // 2) % 2],
            pieces=((SAMPLES,), (7, 5))[(row + column // 5) % 2],
        )
        for row, model in enumerate(SMALL)
        for column, optimizer in enumerate(OPTIMIZERS)
    ]
