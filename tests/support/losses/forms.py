"""Forms of losses that people write, each with what autoaccum may do about it.

A form is a model, what of a window the loader gives, and the loss of it. `allowed` says what may come of it:

- "exact": each update is that of a plain loop over whole batches, to `tolerance`, without a warning.
- "warned": a warning came before the first update that is not exact, or with it. Some exact forms may be warned of as
  well: a count that is exactly 1 may be a clamp.
- "late": it came one window later, as for divisors that are clamped. An error counts as well.
- "refused": InvalidInputError before the first update.
- "stopped": InvalidInputError before a later one, and all updates until then were exact.
"""

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from support.models.tiny_transformers import tiny

N, T, C, D = 10, 6, 5, 8  # samples, tokens, classes, features
CUT = (3, 1, 4, 2)
CLASS_WEIGHTS = torch.tensor([1.0, 2.0, 0.5, 4.0, 0.1])

# --- four windows, of which none is like another ----------------------------------------------------------------------

LENGTHS = (
    (6, 6, 6, 6, 3, 2, 5, 1, 4, 6),  # long ones first, as in many a dataset
    (2, 6, 1, 3, 5, 5, 6, 6, 2, 4),
    (1, 1, 3, 2, 6, 6, 6, 6, 6, 5),
    (6, 2, 4, 6, 1, 1, 2, 3, 5, 6),
)
POSITIVES = (
    (1, 1, 1, 1, 0, 0, 1, 0, 1, 1),
    (1, 0, 1, 1, 0, 0, 0, 0, 1, 1),  # the third micro-batch has none
    (0, 0, 0, 0, 0, 1, 0, 0, 0, 0),  # one only
    (0, 0, 0, 1, 1, 1, 0, 1, 0, 0),  # the first and the last have none
)


def window(number, lengths, positives, seed=0):
    chance = torch.Generator().manual_seed(10 * seed + number)
    real = functools.partial(torch.randn, generator=chance, dtype=torch.float64)
    y = torch.randint(0, C, (N, T), generator=chance)
    is_there = torch.arange(T) < torch.tensor(lengths)[:, None]
    has = torch.tensor(positives, dtype=torch.float64)
    w = torch.rand(N, generator=chance, dtype=torch.float64) * 3 + 0.1
    w_later = w if number > 1 else torch.ones_like(w)
    token_weights = torch.rand(N, T, generator=chance, dtype=torch.float64) + 0.05
    z = real(N, T, C)
    ids = torch.randint(3, 30, (N, T), generator=chance)
    return {
        "x": real(N, T, D),
        "z": z,  # targets for a regression
        "p": z.softmax(-1),  # probabilities
        "y": y,
        "labels": y.masked_fill(~is_there, -100),
        "labels_0": (y.clamp(min=1)).masked_fill(~is_there, 0),
        "labels_255": y.masked_fill(~is_there, 255),
        "labels_of_some": y.masked_fill(has[:, None] == 0, -100),  # those of some samples are all ignored
        "mask": is_there.double(),
        "has": has,
        "w": w,
        "w_later": w_later,  # sums like the samples in the first two windows
        "w_tokens": token_weights * w_later[:, None] * T / token_weights.sum(1, keepdim=True),  # like the tokens
        "cls": y[:, 0],
        "cls_rejected": (y[:, 0] + 1) % C,
        "signs": z[:, 0].sign(),
        "number": torch.arange(N) + N * number,
        "input_ids": ids.masked_fill(~is_there, 0),
        "attention_mask": is_there.long(),
        "ids_labels": ids.masked_fill(~is_there, -100),
        "ids_masked": ids.masked_fill(~is_there | (torch.rand(N, T, generator=chance) > 0.4), -100),
    }


WINDOWS = [window(number, *each) for number, each in enumerate(zip(LENGTHS, POSITIVES, strict=True))]


# --- models -----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(D, 16), nn.Linear(16, C)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


class Tagger(Net):
    def forward(self, x):
        return super().forward(x).transpose(1, 2)


class Classifier(Net):
    def forward(self, x):
        return super().forward(x).mean(1)


class LogProbabilities(Classifier):
    def forward(self, x):
        return super().forward(x).log_softmax(-1)


class Autoencoder(Net):
    def __init__(self):
        super().__init__()
        self.b = nn.Linear(16, D)


class WithPenalty(Net):
    """Gives the sum of its parameters' squares too."""

    def forward(self, x):
        return super().forward(x), sum(p.square().sum() for p in self.parameters())


class WithLoss(Net):
    """Computes its loss itself, with class weights."""

    def __init__(self):
        super().__init__()
        self.loss = nn.CrossEntropyLoss(weight=CLASS_WEIGHTS.clone())

    def forward(self, x, labels):
        logits = super().forward(x)
        return {"loss": self.loss(logits.flatten(0, 1), labels.flatten()), "logits": logits}


# What was drawn for each sample in the last pass that went backward, by the sample's number.
DRAWN: dict[int, Any] = {}


class Noisy(Net):
    """Adds noise of its own, at a strength of its own; `replays` takes what was drawn before."""

    replays = False

    def forward(self, x, number):
        if self.replays:
            noise, time = (torch.stack(each) for each in zip(*(DRAWN[int(n)] for n in number), strict=True))
        else:
            noise, time = torch.randn(len(x), T, D, dtype=x.dtype), torch.rand(len(x), dtype=x.dtype)
        out = super().forward(x + noise * time[:, None, None])
        if out.requires_grad and not self.replays:
            rows = dict(zip(map(int, number), zip(noise, time, strict=True), strict=True))
            out.register_hook(lambda _: DRAWN.update(rows))
        return {"out": out, "noise": noise, "time": time}


def transformer(name, **options):
    return functools.partial(tiny, name, 30, T, seed=1, **options)


# --- forms ------------------------------------------------------------------------------------------------------------


def of_x(model, batch):
    return model(batch["x"])


def entries(**names):
    """Makes a batch of some of a window's entries, under other names."""
    return lambda window: {name: window[entry] for name, entry in names.items()}


def pair(x, y):
    return lambda window: (window[x], window[y])


@dataclass(frozen=True)
class Form:
    """A model and its loss.

    Attributes:
        loss: As `Runner` takes it; None for the model's own.
        model: Makes the model.
        batch: What the loader gives of a window; all of it by default.
        forward: As `Runner` takes it.
        cut: The sizes of the micro-batches.
        dtype: Of the parameters and the batch.
        precision: As `Runner` takes it.
        lr: The learning rate.
        tolerance: How far the training may be from the plain loop, relative to how far that came.
        mixes: Whether one number mixes terms with divisors of their own, so that its reported value, which weighs
            micro-batches by their samples, is close to that of the whole and not the same.
        allowed: What may come of it, joined by " or ".
    """

    loss: Any = None
    model: Callable[[], nn.Module] = Net
    batch: Callable[[dict[str, Any]], Any] = lambda window: window
    forward: Callable[..., Any] | None = of_x
    cut: tuple[int, ...] = CUT
    dtype: torch.dtype = torch.float64
    precision: str = "fp32"
    lr: float = 0.01
    tolerance: float = 1e-9
    mixes: bool = False
    allowed: str = "exact"

    def raw(self, model, batch):
        if self.loss is None:
            return model(**batch)["loss"]
        outputs = self.forward(model, batch) if self.forward else model(batch[0])
        return self.loss(outputs, batch[1] if isinstance(batch, tuple) else batch)


def of_module(loss, model, x, y, **options):
    return Form(loss, model, pair(x, y), forward=None, **options)


def of_model(model, batch, tolerance=1e-5):
    """A model with its own loss; those of Transformers are in float32, whatever the model is in."""
    return Form(None, model, batch, forward=None, tolerance=tolerance)


def ce(o, y, **options):
    if "weight" in options:
        options["weight"] = options["weight"].to(o.dtype)
    return functional.cross_entropy(o.flatten(0, 1), y.flatten(), **options)


def each(o, b, y="y"):
    return ce(o, b[y], reduction="none").view(o.shape[0], T)


def row(o, b):
    return each(o, b).mean(1)


def mse(o, b):
    return functional.mse_loss(o, b["z"])


def penalised():
    loss = nn.CrossEntropyLoss()
    loss.register_forward_hook(lambda _, inputs, value: value + 0.1 * inputs[0].square().mean())
    return loss


class CustomCE(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, y):
        with torch.enable_grad():
            leaf = o.detach().requires_grad_()
            value = ce(leaf, y)
            (ctx.gradient,) = torch.autograd.grad(value, leaf)
        return value.detach()

    @staticmethod
    def backward(ctx, given):
        return ctx.gradient * given, None


def label_smoother(o, b, epsilon=0.1):
    """Of Transformers' Trainer."""
    logp, ignored = -o.log_softmax(-1), b["labels"].eq(-100)[..., None]
    nll = logp.gather(-1, b["labels"].clamp(min=0)[..., None]).masked_fill(ignored, 0)
    smooth = logp.sum(-1, keepdim=True).masked_fill(ignored, 0)
    n = ignored.numel() - ignored.long().sum()
    return (1 - epsilon) * nll.sum() / n + epsilon * smooth.sum() / (n * C)


def dice(o, b):
    p, t = o.softmax(-1), functional.one_hot(b["y"], C)
    return 1 - (2 * (p * t).sum() + 1) / (p.sum() + t.sum() + 1)


def mean_of_classes(o, b):
    losses = row(o, b)
    return torch.stack([losses[b["cls"] == k].mean() for k in b["cls"].unique()]).mean()


def over_time(o, b):
    """As older tutorials of seq2seq do it."""
    losses = [ce(o[:, t : t + 1], b["labels"][:, t]) for t in range(T) if (b["labels"][:, t] != -100).any()]
    return sum(losses) / T


def balanced(a, b):
    return a + b * (a / b).detach()


def over_itself(o, b):
    loss = ce(o, b["labels"])
    return loss / loss.detach()


def focal(o, b):
    losses = each(o, b)
    return (1 - torch.exp(-losses)) ** 2 * losses


def longest(o, b):
    """Of tokens up to the longest of those in the batch, padding included."""
    until = int(b["mask"].sum(1).max())
    return (each(o, b) * b["mask"])[:, :until].mean()


def hard_negatives(o, b):
    """Positives, and three times as many of the negatives that are furthest off."""
    own, positives = row(o, b), b["has"]
    negatives = (own * (1 - positives)).sort(descending=True).values
    return ((own * positives).sum() + negatives[: 3 * int(positives.sum())].sum()) / positives.sum().clamp(min=1)


def hard_triplet(o, b):
    """Of each sample the furthest of its own kind, and the nearest of another."""
    far, same = torch.cdist(o.flatten(1), o.flatten(1)), b["has"][:, None] == b["has"]
    furthest, nearest = (far * same).max(1).values, (far + 10 * same).min(1).values
    return (furthest - nearest + 9).relu().mean()


def info_nce(o, b):
    similar = functional.normalize(o[:, 0]) @ functional.normalize(o[:, 1]).T / 0.1
    return functional.cross_entropy(similar, torch.arange(len(o)))


def ctc(o, b, reduction="mean"):
    n, logp = len(o), o.log_softmax(-1).transpose(0, 1)
    targets = torch.stack([b["cls"].clamp(min=1, max=2), torch.full_like(b["cls"], 3)], dim=1)
    return functional.ctc_loss(logp, targets, torch.full((n,), T), torch.full((n,), 2), reduction=reduction)


# Most of the first are those of the design's prototype; what stands behind a name is what its author would call it.
FORMS = {
    "ce mean": Form(lambda o, b: ce(o, b["y"])),
    "ce ignore": Form(lambda o, b: ce(o, b["labels"])),
    "ce class weights": Form(lambda o, b: ce(o, b["labels"], weight=CLASS_WEIGHTS)),
    "ce smoothing, ignore": Form(lambda o, b: ce(o, b["labels"], label_smoothing=0.1)),
    "ce smoothing, weights": Form(lambda o, b: ce(o, b["labels"], label_smoothing=0.1, weight=CLASS_WEIGHTS)),
    "ce probabilities": Form(lambda o, b: functional.cross_entropy(o[:, 0], b["p"][:, 0])),
    "stack of two means, mean": Form(lambda o, b: torch.stack([ce(o, b["labels"]), mse(o, b)]).mean()),
    "masked sum / mask sum": Form(lambda o, b: (each(o, b) * b["mask"]).sum() / b["mask"].sum()),
    "masked mean / mask mean": Form(lambda o, b: (each(o, b) * b["mask"]).mean() / b["mask"].mean()),
    "masked mean * (numel / mask sum), float": Form(
        lambda o, b: (each(o, b) * b["mask"]).mean() * (b["mask"].numel() / b["mask"].sum().item())
    ),
    "sum / count.clamp(min=1)": Form(
        lambda o, b: (row(o, b) * b["has"]).sum() / b["has"].sum().clamp(min=1), allowed="exact or warned or late"
    ),
    "sum / max(1, count)": Form(
        lambda o, b: (row(o, b) * b["has"]).sum() / max(1, int(b["has"].sum())), allowed="exact or warned or late"
    ),
    "losses[mask].mean()": Form(lambda o, b: each(o, b)[b["mask"].bool()].mean()),
    "losses[has].mean() or 0": Form(
        lambda o, b: each(o, b)[b["has"].bool()].mean() if b["has"].any() else o.sum() * 0, allowed="exact or stopped"
    ),
    "all / positives in 3 dimensions, if any": Form(
        lambda o, b: each(o, b).sum() / n if (n := (b["z"] > 1.9).sum()) else each(o, b).sum(),
        allowed="refused or stopped",
    ),
    "sum / constant": Form(lambda o, b: each(o, b).sum() / 64),
    "sum": Form(lambda o, b: each(o, b).sum()),
    "mean of masked means": Form(lambda o, b: ((each(o, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean()),
    "einsum / mask sum": Form(
        lambda o, b: torch.einsum("bt,bt->", each(o, b), b["mask"]) / b["mask"].sum(), allowed="exact or refused"
    ),
    "einsum with weights": Form(
        lambda o, b: torch.einsum("b,bt->", b["w"] / b["w"].sum(), each(o, b)) / T, allowed="exact or refused"
    ),
    "(l * w / w.sum() * n).mean()": Form(lambda o, b: (row(o, b) * b["w"] / b["w"].sum() * len(o)).mean()),
    "l @ (w / w.sum())": Form(lambda o, b: row(o, b) @ (b["w"] / b["w"].sum()), allowed="exact or refused"),
    "softmax of weights": Form(
        lambda o, b: (row(o, b) * b["w"].softmax(0)).sum(), allowed="exact or warned or refused"
    ),
    "mse": Form(mse),
    "bce pos_weight": Form(
        lambda o, b: functional.binary_cross_entropy_with_logits(o, (b["z"] > 0).to(o), pos_weight=CLASS_WEIGHTS.to(o))
    ),
    "focal mean": Form(lambda o, b: focal(o, b).mean()),
    "focal / positives": Form(
        lambda o, b: (focal(o, b) * b["has"][:, None]).sum() / max(1.0, b["has"].sum().item()),
        allowed="exact or warned or late",
    ),
    "dice": Form(dice, allowed="warned or refused"),
    "kl batchmean": Form(lambda o, b: functional.kl_div(o.log_softmax(-1), b["p"], reduction="batchmean")),
    "ctc": Form(ctc),
    "0.3 * ce": Form(lambda o, b: 0.3 * ce(o, b["labels"])),
    "ce + L2 of weights": Form(lambda o, b: ce(o[0], b["labels"]) + 1e-2 * o[1], WithPenalty),
    "ce + mse": Form(lambda o, b: ce(o, b["labels"]) + mse(o, b)),
    "Trainer's LabelSmoother": Form(label_smoother),
    "divided by what is learnt": Form(
        lambda o, b: ce(o[0], b["labels"]) / (1 + o[1]) + 0.1 * o[1], WithPenalty, allowed="exact or warned or refused"
    ),
    "loss / loss.detach()": Form(over_itself, allowed="exact or refused"),
    "a + b * (a / b).detach()": Form(lambda o, b: balanced(ce(o, b["labels"]), mse(o, b)), allowed="warned or refused"),
    "mean of classes": Form(mean_of_classes, allowed="warned or refused"),
    "loop over samples": Form(
        lambda o, b: sum(functional.cross_entropy(*one) for one in zip(o, b["labels"], strict=True)) / len(o),
        allowed="exact or refused",
    ),
    "loop over time": Form(over_time, allowed="exact or refused"),
    "custom autograd": Form(lambda o, b: CustomCE.apply(o, b["labels"]), allowed="exact or refused"),
    "in place": Form(lambda o, b: each(o, b).mul_(b["mask"]).sum() / b["mask"].sum()),
    "rmse": Form(lambda o, b: mse(o, b).sqrt(), allowed="warned or refused"),
    "contrastive": Form(info_nce, allowed="refused"),
    "gather, -sum / mask sum": Form(
        lambda o, b: -(o.log_softmax(-1).gather(-1, b["y"][..., None])[..., 0] * b["mask"]).sum().div(b["mask"].sum())
    ),
    "mean up to the longest": Form(longest, allowed="warned or refused"),
    "masked mean * part kept": Form(
        lambda o, b: (row(o, b) * b["has"]).sum() / b["has"].sum().clamp(min=1) * b["has"].mean(),
        allowed="exact or warned",
    ),
    "median": Form(lambda o, b: row(o, b).median(), allowed="refused"),
    "mean of samples first": Form(lambda o, b: (o - b["z"]).square().mean(-3).sum()),
    "rows of unlike lengths": Form(
        lambda o, b: torch.cat([own[keep > 0] for own, keep in zip(each(o, b), b["mask"], strict=True)]).mean(),
        cut=(2, 1, 3, 4),  # both rows of a micro-batch have one token
    ),
    "all / max(1, positives in 3 dimensions)": Form(
        lambda o, b: each(o, b).sum() / (b["z"] > 1.9).sum().clamp(min=1), allowed="exact or warned"
    ),
    "hard negatives": Form(hard_negatives, allowed="refused"),  # in the first window all of them
    "batch-hard triplet": Form(hard_triplet, allowed="refused"),
    "hardest tokens of each": Form(lambda o, b: each(o, b).topk(2, dim=1).values.mean()),
    "logsumexp": Form(lambda o, b: row(o, b).logsumexp(0), allowed="warned or refused"),
    "smoothed ce, samples all ignored": Form(lambda o, b: ce(o, b["labels_of_some"], label_smoothing=0.1)),
    # Nothing tells it from max(41, n), where 39 labels are in the samples that are tried, and 45 in all.
    "num_items tensor": Form(
        lambda o, b: ce(o, b["labels"], reduction="sum") / torch.tensor(41.0), allowed="exact or warned"
    ),
    "nan_to_num": Form(lambda o, b: torch.nan_to_num(ce(o, b["labels"])), allowed="exact or refused"),
    "weights / their mean": Form(
        lambda o, b: (row(o, b) * (b["w"] / b["w"].mean())).mean(), allowed="exact or refused"
    ),
    "vmap": Form(lambda o, b: torch.vmap(functional.cross_entropy)(o, b["y"]).mean()),
}

# --- torch.nn and torch.nn.functional, each with every reduction ------------------------------------------------------

ELEMENTWISE = ("MSELoss", "L1Loss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss")
FORMS |= {
    f"nn.{name} {reduction}": of_module(
        getattr(nn, name)(reduction=reduction),
        Net,
        "x",
        "z",
        allowed="exact" if reduction != "none" else "exact or refused",
    )
    for name in ELEMENTWISE
    for reduction in ("mean", "sum", "none")
}
FORMS |= {
    f"nn.{name} {reduction}": of_module(getattr(nn, name)(reduction=reduction), model, "x", target)
    for name, model, target in (
        ("CrossEntropyLoss", Classifier, "cls"),
        ("NLLLoss", LogProbabilities, "cls"),
        ("MultiMarginLoss", Classifier, "cls"),
    )
    for reduction in ("mean", "sum", "none")
}
FORMS |= {
    f"nn.CrossEntropyLoss {name}": of_module(nn.CrossEntropyLoss(**options), Tagger, "x", labels, allowed=allowed)
    for name, allowed, labels, options in (
        ("of tokens", "exact", "labels", {}),
        ("of tokens, sum", "exact", "labels", {"reduction": "sum"}),
        ("of tokens, none", "exact or refused", "labels", {"reduction": "none"}),
        ("ignore_index=0", "exact", "labels_0", {"ignore_index": 0}),
        ("ignore_index=255, smoothing", "exact", "labels_255", {"ignore_index": 255, "label_smoothing": 0.2}),
        ("weight", "exact", "labels", {"weight": CLASS_WEIGHTS.double()}),
        ("weight, smoothing", "exact", "labels", {"weight": CLASS_WEIGHTS.double(), "label_smoothing": 0.1}),
        ("samples all ignored", "exact", "labels_of_some", {}),
    )
}


def functional_loss(name, reduction):
    return {
        "binary_cross_entropy": lambda o, b: functional.binary_cross_entropy(
            o.sigmoid(), b["p"], weight=b["mask"][..., None], reduction=reduction
        ),
        "triplet_margin_loss": lambda o, b: functional.triplet_margin_loss(
            o[:, 0], o[:, 1], o[:, 2], reduction=reduction
        ),
        "cross_entropy, weight": lambda o, b: functional.cross_entropy(
            o[:, 0], b["cls"], weight=CLASS_WEIGHTS.to(o), reduction=reduction
        ),
        "ctc_loss": lambda o, b: ctc(o, b, reduction),
        "kl_div": lambda o, b: functional.kl_div(o.log_softmax(-1), b["p"], reduction=reduction),
    }[name]


FORMS |= {
    f"F.{name} {reduction}": Form(
        functional_loss(name, reduction),
        allowed="exact or refused" if reduction == "none" and name == "binary_cross_entropy" else "exact",
    )
    for name in (
        "binary_cross_entropy",
        "triplet_margin_loss",
        "cross_entropy, weight",
        "ctc_loss",
    )
    for reduction in ("mean", "sum", "none")
} | {f"F.kl_div {reduction}": Form(functional_loss("kl_div", reduction)) for reduction in ("sum", "batchmean")}

# --- weights that sum like the samples or the tokens at first, and later do not ---------------------------------------


def weighted(o, b, name):
    """The weighted mean of a batch, whose weights are of samples or of tokens."""
    return ((row if b[name].dim() == 1 else each)(o, b) * b[name]).sum() / b[name].sum()


FORMS |= {
    f"weights {entry} as {name!r}": Form(
        lambda o, b, name=name: weighted(o, b, name),
        batch=lambda window, entry=entry, name=name: {"x": window["x"], "y": window["y"], name: window[entry]},
    )
    for entry in ("w_later", "w_tokens")
    for name in ("weights", "mask", "importance", "q7")
}
FORMS |= {
    "weights from the start": Form(lambda o, b: weighted(o, b, "w")),
    "weights in a tuple of targets": Form(
        lambda o, targets: weighted(o, dict(zip("yw", targets, strict=True)), "w"),
        batch=lambda window: (window["x"], (window["y"], window["w_tokens"])),
        forward=None,
    ),
    "weights of labels in a tuple of targets": Form(
        lambda o, targets: (ce(o, targets[0], reduction="none") * targets[1].flatten()).sum() / targets[1].sum(),
        batch=lambda window: (window["x"], (window["labels"], window["w_tokens"])),
        forward=None,
    ),
    "weights in a pair (sum, weight)": Form(lambda o, b: ((each(o, b) * b["w_tokens"]).sum(), b["w_tokens"].sum())),
    "weights by losses[has], none in some": Form(
        lambda o, b: (row(o, b) * b["w_later"] * b["has"]).sum() / (b["w_later"] * b["has"]).sum(),
        allowed="exact or warned",
    ),
}

# --- pairs and terms --------------------------------------------------------------------------------------------------

FORMS |= {
    "pair": Form(lambda o, b: (ce(o, b["labels"], reduction="sum"), (b["labels"] != -100).sum())),
    "pair, none in some": Form(lambda o, b: ((row(o, b) * b["has"]).sum(), b["has"].sum())),
    "pair beside a mean": Form(
        lambda o, b: {"pair": ((row(o, b) * b["has"]).sum(), b["has"].sum()), "ce": ce(o, b["labels"])}
    ),
    "dict of two, unlike divisors": Form(lambda o, b: {"ce": ce(o, b["labels"]), "mse": mse(o, b)}),
    "dict of three": Form(
        lambda o, b: {"ce": ce(o, b["labels"]), "mse": mse(o, b), "weighted": 0.1 * weighted(o, b, "w")}
    ),
    "dict with a sum": Form(lambda o, b: {"ce": ce(o, b["labels"]), "sum": 1e-2 * o.square().sum()}),
    "dict with L2 of weights": Form(lambda o, b: {"ce": ce(o[0], b["labels"]), "l2": 1e-2 * o[1]}, WithPenalty),
    "ce + mean square + L2": Form(
        lambda o, b: ce(o[0], b["labels"]) + 0.1 * o[0].square().mean() + 1e-2 * o[1], WithPenalty
    ),
    "ce + a sum": Form(lambda o, b: ce(o, b["labels"]) + 1e-2 * o.square().sum(), allowed="exact or refused"),
    "masked mean + mean of some": Form(
        lambda o, b: weighted(o, b, "mask") + 0.5 * (row(o, b) * b["has"]).sum() / b["has"].sum(),
        allowed="exact or warned",
    ),
    "three divisors": Form(
        lambda o, b: weighted(o, b, "mask") + 0.5 * weighted(o, b, "w") + 0.1 * weighted(o, b, "w_tokens"),
        allowed="exact or refused",
    ),
    "z-loss": Form(lambda o, b: ce(o, b["labels"]) + 1e-2 * o.logsumexp(-1).square().mean()),
}

# --- what weights alone do not show -----------------------------------------------------------------------------------


def and_half(o, b):
    """Two terms of which one is computed from the other, beside a mean of its own."""
    masked = weighted(o, b, "mask")
    return masked + 0.5 * masked + mse(o, b)


FORMS |= {
    "m + 0.5 * m + mse": Form(and_half, mixes=True),
    "sum / max(8, count)": Form(
        lambda o, b: (each(o, b) * b["mask"]).sum() / max(8, int(b["mask"].sum())), allowed="warned or late"
    ),
    "flooding": Form(lambda o, b: (weighted(o, b, "mask") - 1.6).abs() + 1.6, allowed="refused"),
    "larger of two": Form(lambda o, b: torch.maximum(weighted(o, b, "mask"), mse(o, b)), allowed="refused"),
    "one of two": Form(lambda o, b: torch.where(mse(o, b) > 1.0, weighted(o, b, "mask"), mse(o, b)), allowed="refused"),
    "vector of weights / their mean": Form(lambda o, b: row(o, b) * b["w"] / b["w"].mean(), allowed="refused"),
    "vector over its mean": Form(lambda o, b: row(o, b) / row(o, b).detach().mean(), allowed="refused"),
    "pair of weights / their mean": Form(
        lambda o, b: ((row(o, b) * b["w"] / b["w"].mean()).sum(), float(len(o))), allowed="refused"
    ),
    "a hook on the loss": of_module(penalised(), Tagger, "x", "labels", mixes=True),
    "keywords bound to the loss": of_module(
        functools.partial(functional.cross_entropy, ignore_index=0), Tagger, "x", "labels_0"
    ),
}

# --- models with their own loss ---------------------------------------------------------------------------------------

TEXT = {"input_ids": "input_ids", "attention_mask": "attention_mask"}
FORMS |= {
    "class weights in the model": Form(None, WithLoss, entries(x="x", labels="labels"), forward=None),
    "GPT-2": of_model(transformer("GPT2LMHeadModel"), entries(**TEXT, labels="ids_labels")),
    "Llama": of_model(transformer("LlamaForCausalLM"), entries(**TEXT, labels="ids_labels")),
    "T5": of_model(transformer("T5ForConditionalGeneration"), entries(**TEXT, labels="ids_labels")),
    "BERT, masked": of_model(transformer("BertForMaskedLM"), entries(**TEXT, labels="ids_masked")),
    "BERT, classes": of_model(
        transformer("BertForSequenceClassification", num_labels=C), entries(**TEXT, labels="cls")
    ),
}

# --- of other libraries, by hand where the library is large -----------------------------------------------------------


def logps(o, b, y):
    return -(each(o, b, y) * b["mask"]).sum(1)


def dpo(o, b):
    margins = (row(o, b) - b["z"][:, 0, 0]) - (each(o, b, "labels_0").mean(1) - b["z"][:, 0, 1])
    return -functional.logsigmoid(0.1 * margins).mean()


def grpo(o, b):
    """Clipped ratios of tokens with an advantage of their sample, (N, T)."""
    ratio = torch.exp(-each(o, b) + 1.5)
    advantage = b["w"][:, None] - 1.5
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)


def retinanet(o, b):
    """A mean over images of sums divided by each image's own positives."""
    losses = [(one * there).sum() / max(1, int(there.sum())) for one, there in zip(focal(o, b), b["mask"], strict=True)]
    return sum(losses) / max(1, len(losses))


def faster_rcnn(o, b):
    boxes = functional.smooth_l1_loss(o, b["z"], reduction="none") * b["has"][:, None, None]
    return {"classes": ce(o, b["labels"]), "boxes": boxes.sum() / b["labels"].numel()}


def detr(o, b):
    boxes = functional.l1_loss(o, b["z"], reduction="none") * b["has"][:, None, None]
    return {"classes": ce(o, b["y"], weight=CLASS_WEIGHTS), "boxes": boxes.sum() / max(1, int(b["has"].sum()))}


def of_noise(model, batch):
    return model(batch["x"], batch["number"])


def weighted_diffusion(o, b):
    return (functional.mse_loss(o["out"], o["noise"][..., :C], reduction="none").mean((1, 2)) / (o["time"] + 1)).mean()


def vae(o, b, reduction="sum"):
    mean, log_variance = o["out"][..., :2], o["out"][..., 2:4]
    reconstruction = functional.mse_loss(o["out"], b["z"], reduction=reduction)
    kl = -0.5 * (1 + log_variance - mean.square() - log_variance.exp())
    if reduction == "mean":
        return reconstruction + 0.1 * kl.mean()
    return (reconstruction + kl.sum()) / len(b["z"])


def router(o):
    """The balancing term of a mixture of experts: of no samples' losses a mean."""
    probabilities = o.softmax(-1).flatten(0, 1)
    share = functional.one_hot(probabilities.argmax(-1), C).to(o).mean(0)
    return C * (share * probabilities.mean(0)).sum()


FORMS |= {
    "dft": Form(lambda o, b: (each(o, b) * torch.exp(-each(o, b)).detach() * b["mask"]).sum() / b["mask"].sum()),
    "dpo": Form(dpo),
    "orpo": Form(
        lambda o, b: ce(o, b["labels"]) - 0.1 * functional.logsigmoid(logps(o, b, "y") - logps(o, b, "labels_0")).mean()
    ),
    "grpo": Form(lambda o, b: ((grpo(o, b) * b["mask"]).sum(1) / b["mask"].sum(1)).mean()),
    "bnpo": Form(
        lambda o, b: (grpo(o, b) * b["mask"]).sum() / b["mask"].sum().clamp(min=1.0), allowed="exact or warned or late"
    ),
    "dr_grpo": Form(lambda o, b: (grpo(o, b) * b["mask"]).sum() / (len(o) * T)),
    "distillation": Form(
        lambda o, b: (
            0.5 * ce(o, b["labels"]) + 2 * functional.kl_div((o / 2).log_softmax(-1), b["p"], reduction="batchmean")
        )
    ),
    "retinanet": Form(retinanet, allowed="exact or refused"),
    "faster r-cnn": Form(faster_rcnn),
    "detr": Form(detr, allowed="exact or warned or late or refused"),
    "fcos": Form(
        lambda o, b: {
            "classes": (focal(o, b) * b["mask"]).sum() / max(1, int(b["has"].sum())),
            "boxes": (o.square().mean((1, 2)) * b["has"]).sum() / max(1, int(b["has"].sum())),
        },
        allowed="exact or warned or late",
    ),
    "diffusion, min-snr": Form(weighted_diffusion, Noisy, forward=of_noise),
    "vae, sum / samples": Form(vae, Noisy, forward=of_noise),
    "vae, means": Form(lambda o, b: vae(o, b, "mean"), Noisy, forward=of_noise),
    "ce + router": Form(lambda o, b: ce(o, b["labels"]) + 0.1 * router(o), allowed="refused"),
    "dict with a router": Form(
        lambda o, b: {"ce": ce(o, b["labels"]), "router": 0.1 * router(o)}, allowed="warned or refused"
    ),
    "barlow twins": Form(
        lambda o, b: (o[:, 0].T @ o[:, 1] / len(o) - torch.eye(C)).square().sum(), allowed="warned or refused"
    ),
    "policy gradient, advantages normed": Form(
        lambda o, b: (row(o, b) * (b["w"] - b["w"].mean()) / (b["w"].std(correction=0) + 1e-3)).mean(),
        allowed="warned or refused",
    ),
}
if importlib.util.find_spec("torchvision"):
    FORMS |= {
        f"torchvision's focal {reduction}": Form(
            lambda o, b, reduction=reduction: torchvision_focal(o, b, reduction),
            allowed="exact" if reduction != "none" else "exact or refused",
        )
        for reduction in ("mean", "sum", "none")
    }


def torchvision_focal(o, b, reduction):
    from torchvision.ops import sigmoid_focal_loss  # noqa: PLC0415 - slow

    return sigmoid_focal_loss(o, (b["z"] > 0).to(o), reduction=reduction)


# --- how a loss is run ------------------------------------------------------------------------------------------------


def compiled(backend):
    """A compiled loss, the same in all calls; compiled at the first."""
    kept = []

    def loss(o, b):
        if not kept:
            kept.append(torch.compile(ce, backend=backend, dynamic=True))
        return kept[0](o, b["labels"])

    return loss


def needs_two(o, b):
    """Its author never had a batch of one."""
    if len(o) < 2:
        raise ValueError("at least two samples, please")
    return ce(o, b["labels"])


LOW = {"lr": 1.0, "tolerance": 3e-2}  # steps that such parameters can tell
FORMS |= {
    "torch.compile, eager": Form(compiled("eager")),
    "torch.compile, aot_eager": Form(compiled("aot_eager")),
    "checkpointed loss": Form(
        lambda o, b: checkpoint(ce, o, b["labels"], use_reentrant=False), allowed="exact or refused"
    ),
    "checkpointed loss, masked": Form(
        lambda o, b: checkpoint(weighted, o, b, "mask", use_reentrant=False), allowed="exact or refused"
    ),
    "bf16 autocast, ce": Form(lambda o, b: ce(o, b["labels"]), dtype=torch.float32, precision="bf16", **LOW),
    "bf16 autocast, masked": Form(lambda o, b: weighted(o, b, "mask"), dtype=torch.float32, precision="bf16", **LOW),
    "bf16 weights, masked": Form(lambda o, b: weighted(o, b, "mask"), dtype=torch.bfloat16, **LOW),
    "fp16 with a scaler, pair": Form(
        lambda o, b: (ce(o, b["labels"], reduction="sum"), (b["labels"] != -100).sum()),
        dtype=torch.float32,
        precision="fp16",
        **LOW,
    ),
    "no guard where nothing counts": Form(lambda o, b: each(o, b)[b["has"].bool()].mean()),
    "no guard, masked sum / sum": Form(lambda o, b: weighted(o, b, "has"), allowed="exact or warned"),
    "needs two samples": Form(needs_two, cut=(4, 2, 4), allowed="exact or refused"),
    "variance of the batch": Form(lambda o, b: o.var(0).mean(), cut=(4, 2, 4), allowed="warned or refused"),
    "inputs are the targets": Form(nn.MSELoss(), Autoencoder, lambda window: (window["x"], window["x"]), forward=None),
    "inputs are the targets, masked": Form(
        lambda o, b: (functional.mse_loss(o, b["x"], reduction="none").mean(-1) * b["mask"]).sum() / b["mask"].sum(),
        Autoencoder,
    ),
}
MIXED = [
    *("stack of two means, mean", "ce + L2 of weights", "ce + mse", "divided by what is learnt", "z-loss", "orpo"),
    *("ce + mean square + L2", "ce + a sum", "masked mean + mean of some", "three divisors", "distillation"),
]
FORMS |= {name: replace(FORMS[name], mixes=True) for name in MIXED}
