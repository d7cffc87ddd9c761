"""What the fault harness goes through: models, precisions and optimizers, and a set of cases in which all pairs meet.

Networks are tiny (fp16 on the CPU is 50 times slower than the rest). Each keeps a record of which samples it saw, so
that "every sample once, in order" is read off the model itself and not off the code under test.
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

SAMPLES = 12
WINDOWS = 4
CLASSES = 3
_FEATURES, _WIDTH = 6, 8
_LENGTH, _WORDS = 5, 9
# Samples that a model may note: those of a few windows, twice where it runs twice, and those with which a loss's
# weighting is found out.
_NOTED = 4 * WINDOWS * SAMPLES


class _Count(torch.autograd.Function):
    """Passes outputs on; backward, the gradient of each sample's entry of `uses` is 1, whatever the loss."""

    @staticmethod
    def forward(ctx, outputs, uses, ids):
        ctx.save_for_backward(ids)
        ctx.entries = len(uses)
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx, gradient):
        (ids,) = ctx.saved_tensors
        return gradient, torch.zeros(ctx.entries).index_add_(0, ids, torch.ones(len(ids))), None


class Witness(nn.Module):
    """Notes which samples went through a model.

    Attributes:
        order: Their numbers, in the order in which they came. It is a buffer, so what a failed micro-batch wrote there
            has to be taken back.
        begins: Where in it a micro-batch begins.
        uses: A parameter with an entry a sample. Its gradient counts the backward passes that the sample went through
            (times what the scaler or the clipping does to all of them alike).
    """

    def __init__(self):
        super().__init__()
        self.uses = nn.Parameter(torch.zeros(WINDOWS * SAMPLES))
        self.register_buffer("order", torch.full((_NOTED,), -1))
        self.register_buffer("begins", torch.zeros(_NOTED, dtype=torch.bool))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, outputs, ids):
        start = int(self.seen)
        self.order[start : start + len(ids)] = ids
        self.begins[start] = True
        self.seen += len(ids)
        return _Count.apply(outputs, self.uses, ids)

    def noted(self):
        return self.order[: int(self.seen)].tolist()

    def sizes(self, start):
        """Return the sizes of the micro-batches that came since so many samples were noted."""
        stops = [*torch.nonzero(self.begins[: int(self.seen)]).flatten().tolist(), int(self.seen)]
        return tuple(stop - begin for begin, stop in itertools.pairwise(stops) if begin >= start)


class Witnessed(nn.Module):
    """A network with a witness; its inputs are (features, numbers of the samples)."""

    def __init__(self, body):
        super().__init__()
        self.body, self.witness = body, Witness()

    def forward(self, inputs):
        features, ids = inputs
        return self.witness(self.body(features), ids)


def mlp():
    return nn.Sequential(
        nn.Linear(_FEATURES, _WIDTH), nn.ReLU(), nn.Dropout(0.3), nn.Linear(_WIDTH, _WIDTH), nn.Linear(_WIDTH, CLASSES)
    )


def convolutional():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(64, CLASSES)
    )


def frozen():
    """The first two layers are frozen, the second a BatchNorm in evaluation mode."""
    net = nn.Sequential(
        nn.Linear(_FEATURES, _WIDTH), nn.BatchNorm1d(_WIDTH), nn.ReLU(), nn.Dropout(0.3), nn.Linear(_WIDTH, CLASSES)
    )
    for layer in net[:2]:
        layer.requires_grad_(requires_grad=False)
    net[1].eval()
    return net


class Checkpointed(nn.Module):
    """Two blocks with dropout that are run again in the backward pass."""

    def __init__(self, *, use_reentrant):
        super().__init__()
        self.first = nn.Linear(_FEATURES, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)
        )
        self.last = nn.Linear(_WIDTH, CLASSES)
        self.use_reentrant = use_reentrant

    def forward(self, features):
        hidden = self.first(features)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=self.use_reentrant)
        return self.last(hidden)


class Transformer(nn.Module):
    """One encoder layer over padded sentences; logits of shape (N, C, T)."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH, padding_idx=0)
        self.layer = nn.TransformerEncoderLayer(_WIDTH, 2, 2 * _WIDTH, dropout=0.1, batch_first=True)
        self.head = nn.Linear(_WIDTH, CLASSES)

    def forward(self, tokens):
        return self.head(self.layer(self.embed(tokens), src_key_padding_mask=tokens == 0)).transpose(1, 2)


class Tied(nn.Module):
    """A language model whose head is its embedding, called with a mapping and returning its own loss."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(_WORDS, _WIDTH)
        self.mix = nn.Linear(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, _WORDS, bias=False)
        self.head.weight = self.embed.weight
        self.witness = Witness()

    def forward(self, tokens, ids, labels):
        logits = self.witness(self.head(torch.tanh(self.mix(self.embed(tokens)))), ids)
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
        self.embed = nn.Embedding(_WORDS, _WIDTH, max_norm=1.0)
        self.head = nn.Linear(_WIDTH, CLASSES)

    def forward(self, tokens):
        return self.head(self.embed(tokens).mean(1))


# --- losses -----------------------------------------------------------------------------------------------------------


def plain(outputs, targets):
    """A mean of which nothing says that it is one: that is found out."""
    return functional.cross_entropy(outputs.float(), targets)


def pair(outputs, targets):
    counted = targets != 0
    each = functional.cross_entropy(outputs.float(), targets, reduction="none")
    return (each * counted).sum(), counted.sum()


def named(outputs, targets):
    """A pair beside a mean, so that the pairs' weights have to be learned before the first backward pass."""
    return {"pair": pair(outputs, targets), "size": outputs.float().square().mean()}


def entropy(model, batch):
    return functional.cross_entropy(model(batch[0]).float(), batch[1])


def energy(model, batch):
    return model(batch[0]).float().square().mean()


def contrast(outputs, targets):
    """Every sample against every other sample of the window."""
    alike = functional.normalize(outputs.float()) @ functional.normalize(targets).T
    return functional.cross_entropy(5.0 * alike, torch.arange(len(outputs)))


# --- windows ----------------------------------------------------------------------------------------------------------


def vectors(*shape):
    return torch.randn(SAMPLES, *(shape or (_FEATURES,))), torch.randint(0, CLASSES, (SAMPLES,))


def images():
    return vectors(1, 6, 6)


def words():
    return torch.randint(1, _WORDS, (SAMPLES, _LENGTH)), torch.randint(0, CLASSES, (SAMPLES,))


def sentences(length=_LENGTH):
    """Sentences of one token to `length`, padded with 0; padding has no target."""
    tokens, targets = torch.randint(1, _WORDS, (SAMPLES, length)), torch.randint(0, CLASSES, (SAMPLES, length))
    padding = torch.arange(length) >= torch.randint(1, length + 1, (SAMPLES, 1))
    return tokens.masked_fill(padding, 0), targets.masked_fill(padding, -100)


def views():
    return torch.randn(SAMPLES, _FEATURES), torch.randn(SAMPLES, CLASSES)


@dataclass(frozen=True)
class Model:
    """A model and what it is trained with."""

    make: Callable  # makes it
    window: Callable  # makes the inputs and targets of one window
    loss: object = None  # as for `Runner`
    options: dict = field(default_factory=dict)  # further arguments of `Runner`
    forwards: int = 1  # how often each sample goes through it
    mapping: bool = False  # whether its batches are mappings
    # Whether it writes its parameters in the forward pass, which is known after a window.
    writes_parameters: bool = False

    @property
    def is_found_out(self):
        """Whether nothing says what its loss runs over."""
        return not isinstance(self.loss, nn.Module) and self.loss is not pair


SMALL = {
    "mlp": Model(lambda: Witnessed(mlp()), vectors, nn.CrossEntropyLoss()),
    "convolutional": Model(lambda: Witnessed(convolutional()), images, plain),
    "transformer": Model(lambda: Witnessed(Transformer()), sentences, nn.CrossEntropyLoss()),
    "tied weights": Model(Tied, sentences, mapping=True),
    "frozen layers": Model(lambda: Witnessed(frozen()), vectors, nn.CrossEntropyLoss(reduction="none")),
    "reentrant checkpoint": Model(
        lambda: Witnessed(Checkpointed(use_reentrant=True)), vectors, nn.CrossEntropyLoss(reduction="sum")
    ),
    "checkpoint": Model(lambda: Witnessed(Checkpointed(use_reentrant=False)), vectors, pair),
    "own buffers": Model(lambda: Witnessed(Moody()), vectors, plain),
    "own weights": Model(lambda: Witnessed(Renormed()), words, nn.CrossEntropyLoss(), writes_parameters=True),
    "several losses": Model(lambda: Witnessed(mlp()), vectors, [entropy, energy], forwards=2),
    "named losses": Model(lambda: Witnessed(mlp()), vectors, named),
    "window loss": Model(lambda: Witnessed(mlp()), views, contrast, {"loss_scope": "window"}),
}


PRECISIONS = ("fp32", "bf16", "fp16")
OPTIMIZERS = {
    f"{name}, {form}": (kind, {**settings, "foreach": form == "foreach"})
    for name, kind, settings in (
        ("SGD", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("Adam", torch.optim.Adam, {"lr": 1e-2}),
        ("AdamW", torch.optim.AdamW, {"lr": 1e-2}),
        ("RMSprop", torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5}),
        ("Adagrad", torch.optim.Adagrad, {"lr": 1e-2}),
    )
    for form in ("foreach", "loop")
}
CUTS = ((6, 6), (4, 4, 4), (5, 4, 3), (3, 3, 3, 3))


@dataclass(frozen=True)
class Case:
    """A training of a few windows, the same in every run."""

    model: str  # name in `SMALL`
    precision: str = "fp32"  # one of `PRECISIONS`
    optimizer: str = "Adam, loop"  # name in `OPTIMIZERS`, or what a runner takes by name
    sizes: tuple[int, ...] = (6, 6)  # the cut to begin with
    clip: float | None = None  # norm to which gradients are clipped
    pieces: tuple[int, ...] = (SAMPLES,)  # sizes of the loader's batches that make a window; several are joined

    def __str__(self):
        return "; ".join(filter(None, (self.model, self.precision, self.optimizer)))

    @property
    def kind(self):
        return SMALL[self.model]

    def windows(self):
        """Return the windows, each a list of batches; samples are numbered through."""
        torch.manual_seed(5)
        return [self._window(number) for number in range(WINDOWS)]

    def runner(self, *, device="cpu", callbacks=()):
        """Return the model and a runner of it, the random generators seeded on the way."""
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - the global generator, which models draw from
        model = self.kind.make()
        make, settings = OPTIMIZERS.get(self.optimizer, (None, {}))
        runner = autoaccum.Runner(
            model,
            self.optimizer if make is None else lambda parameters: make(parameters, **settings),
            autoaccum.Plan(SAMPLES, self.sizes),
            loss=self.kind.loss,
            precision=self.precision,
            device=device,
            clip_grad_norm=self.clip,
            callbacks=callbacks,
            **self.kind.options,
        )
        return model, runner

    def _window(self, number):
        inputs, targets = self.kind.window()
        ids = torch.arange(number * SAMPLES, (number + 1) * SAMPLES)
        parts = zip(*(tensor.split(self.pieces) for tensor in (inputs, ids, targets)), strict=True)
        if self.kind.mapping:
            return [{"tokens": inputs, "ids": ids, "labels": targets} for inputs, ids, targets in parts]
        return [((inputs, ids), targets) for inputs, ids, targets in parts]


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
