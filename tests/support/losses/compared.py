"""Forms of losses and models that compare samples, keep state, draw random numbers, or change between windows."""

import torch
from torch import nn
from torch.nn import functional

from support.losses.divisors import SOUND, clamped, over, square, tokens_kept, with_entries
from support.losses.forms import (
    C,
    Classifier,
    D,
    Form,
    N,
    Net,
    Noisy,
    T,
    ce,
    drawn,
    each,
    entries,
    info_nce,
    mse,
    of_digits,
    of_module,
    of_noise,
    router,
    row,
    weighted,
)

COMPARED = {}
NEITHER = "neither a mean nor a sum"
DEPENDS = "a sample depend on the others of its micro-batch"
OF_TWELVE = drawn(*[0.5] * 2, samples=12)

# --- models that compare samples --------------------------------------------------------------------------------------


class Mixing(Net):
    """Changes its inputs by a function of all of them."""

    def __init__(self, mix):
        super().__init__()
        self.mix = mix

    def forward(self, x):
        return super().forward(self.mix(x))


class OverTime(nn.Module):
    """A layer that takes the first dimension for time."""

    def __init__(self, layer):
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.head = layer(), nn.Linear(D, C)

    def forward(self, x):
        hidden = self.layer(x)
        return self.head(hidden[0] if isinstance(hidden, tuple) else hidden).mean(1)


def hooked():
    model = Net()
    model.a.register_forward_hook(lambda _, __, outputs: outputs / outputs.norm(dim=0))
    return model


MIXES = {
    "mixup": lambda x: 0.5 * x + 0.5 * x.flip(0),
    "centred": lambda x: x - x.mean(0),
    "scaled": lambda x: x / x.std(0),
    "batch_norm": lambda x: functional.batch_norm(x.transpose(1, 2), None, None, training=True).transpose(1, 2),
}
OF_TORCH = {
    "loss=None": None,
    "F.mse_loss": functional.mse_loss,
    "nn.MSELoss": nn.MSELoss(),
    "its sum": nn.MSELoss(reduction="sum"),
}
LAYERS = {"GRU": lambda: nn.GRU(D, D), "encoder layer": lambda: nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0)}
COMPARED |= {
    f"{name}, {of_loss}": of_module(
        loss, lambda mix=mix: Mixing(mix), "x", "z", windows=OF_TWELVE, cut=(3,) * 4, allowed="warned", said=DEPENDS
    )
    for place, (name, mix) in enumerate(MIXES.items())
    for number, (of_loss, loss) in enumerate(OF_TORCH.items())
    if (place + number) % 2 == 0
}
COMPARED |= {
    "a hook that compares": of_module(
        nn.MSELoss(), hooked, "x", "z", windows=OF_TWELVE, cut=(3,) * 4, allowed="warned", said=DEPENDS
    ),
    "parts of a check are no batch": of_module(
        nn.MSELoss(),
        lambda: Mixing(lambda x: x.view(-1, 6, T, D).flatten(0, 1)),
        "x",
        "z",
        windows=OF_TWELVE,
        cut=(6, 6),
    ),
    **{
        f"time first in a {name}{', a function' * by_hand}": of_module(
            (lambda *pair: 2 * functional.cross_entropy(*pair)) if by_hand else nn.CrossEntropyLoss(),
            lambda layer=layer: OverTime(layer),
            "x",
            "cls",
            allowed="refused" if by_hand else "warned",
            said=NEITHER if by_hand else DEPENDS,
        )
        for name, layer in LAYERS.items()
        for by_hand in (False, True)
    },
}

# --- losses that compare samples --------------------------------------------------------------------------------------


class Counting(Net):
    """Counts its passes in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return super().forward(x)


class Spectral(Net):
    def __init__(self):
        super().__init__()
        self.a = nn.utils.parametrizations.spectral_norm(self.a)


class Balanced(Net):
    """Adds a router's loss in training mode, or its gradient alone, as DeepSeek's gate does; has dropout."""

    def __init__(self, *, adds):
        super().__init__()
        self.adds = adds

    def forward(self, x):
        out = super().forward(functional.dropout(x, 0.1, self.training))
        if not self.training:
            return out, 0.0
        return (out, 0.1 * router(out)) if self.adds else (GradientOnly.apply(out, 0.1 * router(out)), 0.0)


class GradientOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx, outputs, loss):
        return outputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype)


def at_least_3(o, b):
    return clamped(o, {"has": b["kept"][:, 0, 0]}, 3)


# Three dimensions, which the batch does not count.
KEPT = with_entries({"kept": torch.tensor([1.0, 1, 0, 1, 0, 0, 0, 1, 0, 0, 1, 1]).view(12, 1, 1)})


def pairwise(o, _):
    return -functional.logsigmoid(o[0::2, 0] - o[1::2, 0]).mean()


def even_pairs(o, _):
    return -functional.logsigmoid(o[:, 0, 0].view(-1, 2).diff(dim=1)).mean()


def supervised_contrastive(o, b):
    normal = functional.normalize(o.flatten(1))
    similar, same = normal @ normal.T / 0.1, (b["has"][:, None] == b["has"]).to(o)
    return (similar.logsumexp(1) - (similar * same).sum(1) / same.sum(1)).mean()


REFUSED = {"allowed": "refused", "said": NEITHER}
COMPARED |= {
    "contrastive, a buffer moves": Form(
        info_nce,
        Counting,
        allowed="refused",
        said=r"sums over parts of a batch do not add up \(it is .* for 8 samples, and .* for 3 and .* for 5 of them\)",
    ),
    "the hardest half, spectral norm": Form(
        lambda o, b: row(o, b).topk(len(o) // 2).values.mean(), Spectral, **REFUSED
    ),
    "standard deviation, spectral norm": Form(lambda o, b: row(o, b).std(), Spectral, **REFUSED),
    "at least 3 of what no entry counts": Form(
        at_least_3,
        batch=entries(x="x", kept="kept"),
        windows=KEPT,
        cut=(3,) * 4,
        allowed="refused",
        said=r"sums over parts .* add up, and what they are divided by does not \(\d for 8 samples, and 3 for 3 and \d",
    ),
    "a root beside another refused term": Form(
        lambda o, b: o.abs().mean() + o.square().mean().sqrt() + at_least_3(o, b),
        batch=entries(x="x", kept="kept"),
        windows=KEPT,
        cut=(3,) * 4,
        allowed="refused",
        said=r"term 2 of 3 .* do not add up \(it is .* for 8 samples",
    ),
    **{
        f"{name} of a mean, parts nearly alike": Form(
            lambda o, b, root=root: root((o - b["z"]).square().mean()),
            windows=drawn(0.5, samples=12),
            seeds=5,
            cut=(4,) * 3,
            dtype=torch.float32,
            allowed="refused",
            said="its sums over parts of a batch do not add up",
        )
        for name, root in (("sqrt", torch.sqrt), ("pow", lambda one: one.pow(0.5)), ("log", torch.log))
    },
    # The last window of a loader may be odd.
    **{
        f"interleaved pairs in {size}": Form(
            pairwise, Classifier, windows=OF_TWELVE, cut=(size,) * (12 // size), **REFUSED
        )
        for size in (3, 4)
    },
    "pairs in even micro-batches": Form(even_pairs, windows=OF_TWELVE, cut=(4, 2, 6)),
    "a term of training mode": Form(
        lambda o, b: ce(o[0], b["labels"]) + o[1],
        lambda: Balanced(adds=True),
        allowed="refused",
        said="term 2 of 2 of loss 'loss' is neither a mean nor a sum",
    ),
    "a gradient alone of training mode": Form(
        lambda o, b: ce(o[0], b["labels"]) + o[1], lambda: Balanced(adds=False), **REFUSED
    ),
    **{
        f"a term that compares beside a {beside}": Form(
            lambda o, b, beside=beside: ce(o, b["y"], reduction=beside) + 0.1 * o.mean((0, 1)).square().sum(),
            tolerance=1.0,
            allowed="refused" if beside == "mean" else "warned",
            said=NEITHER,
        )
        for beside in ("mean", "sum")
    },
    "a pair by samples of what compares them": Form(
        lambda o, b: {"mean": o.abs().mean(), "spread": ((o - o.mean(0)).square().mean() * len(o), len(o))},
        allowed="warned",
        said="'spread' gives samples other losses together .* as its pair says",
    ),
    # Once none of the counts that explained its divisor does, samples are tried whose divisors are unlike.
    **{
        f"mean up to the longest, alike at first, in {cut}": Form(
            lambda o, b: (square(o)[:, None] * b["kept"])[:, : int(b["kept"].sum(1).max().clamp(min=1))].mean(),
            windows=lambda seed: tokens_kept(4)(seed + 3),
            seeds=4,
            swept=8,
            cut=cut,
            allowed="exact or warned or stopped",
        )
        for cut in ((5, 1, 4, 2), (3,) * 4)
    },
    # A sum where something rare occurs, and a mean elsewhere.
    **{
        f"a sum in one micro-batch of {size}": Form(
            lambda o, b: square(o).sum() / (1 if (b["rare"] > 2).any() else len(o)),
            batch=lambda window: {"x": window["x"], "rare": window["has"] * 3},
            windows=lambda seed: of_digits(f"{1 << seed:012b}"),
            seeds=12,
            cut=(size,) * (12 // size),
            allowed="refused",
            said="loss 'loss'",
        )
        for size in (2, 3)
    },
    "a mean that does not divide one sample, later": Form(
        lambda o, b: square(o).sum() / (1 if len(o) == 1 and b["window"][0] >= 4 else len(o)),
        windows=drawn(*[0.5] * 6),
        cut=(5, 4, 1),
    ),
}

# --- passes that draw, or leave something behind ----------------------------------------------------------------------


class Experts(nn.Module):
    """Two layers, each for a part of the samples."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.both = nn.ModuleList([nn.Linear(D, C), nn.Linear(D, C)])

    def forward(self, x, route):
        out = x.new_zeros(len(x), T, C)
        for number, expert in enumerate(self.both):
            rows = (route == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_copy(0, rows, expert(x[rows]))
        return out


class Begins(Net):
    """Sets a buffer in the first pass, which a flag says is done."""

    is_ready = False

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        if not self.is_ready:
            self.scale.fill_(0.5)
            self.is_ready = True
        return super().forward(x) * self.scale


class Reuses(nn.Module):
    """Returns its buffers, which the next micro-batch overwrites."""

    def __init__(self, *, is_reported):
        super().__init__()
        self.is_reported = is_reported
        for name in ("weight", "near"):
            self.register_buffer(name, torch.zeros((), dtype=torch.float64))

    def forward(self, o, b):
        self.weight.copy_(b["mask"].sum())
        if not self.is_reported:
            return (each(o, b) * b["mask"]).sum(), self.weight
        return {"loss": mse(o, b), "near": (self.near.copy_((o < 0.9).sum()), self.weight)}


def tasks(o, b):
    """A sum of masked means; its graph ends like that of a sum over samples."""
    return (
        torch.stack([clamped(o, b), over(lambda n: n.clamp(min=1), row_of_abs)(o, b)]) * torch.tensor([1.0, 0.5])
    ).sum()


def row_of_abs(o):
    return o.abs().mean((1, 2))


def overwritten():
    made = []

    def loss(o, b):
        for earlier in made:
            earlier.data.zero_()
        made.append(square(o).sum())
        return made[-1]

    return loss


def thinned():
    """Weights that differ between two passes over a window: from the sixth on, which no other pass checks."""
    draws = iter(range(10**6))

    def loss(o, b):
        kept = torch.ones(len(o), dtype=torch.float64)
        if b["window"][0] >= 5:
            kept[(torch.arange(len(o)) + next(draws)) % 3 == 0] = 0.0
        return {"a": ((square(o) * kept).sum(), kept.sum()), "b": (o.abs().sum(), len(o))}

    return loss


MOVES = {"allowed": "doubted", "said": r"forward\(\) moves"}


def with_route(window):
    kept = torch.arange(N) < 8
    labels = window["y"] if window["window"][0] == 0 else window["y"].masked_fill(~kept[:, None], -100)
    return {"x": window["x"], "route": (~kept).long(), "labels": labels}


COMPARED |= {
    "experts that only ignored samples reach": Form(
        lambda o, b: ce(o, b["labels"]), Experts, with_route, lambda model, batch: model(batch["x"], batch["route"])
    ),
    **{
        f"inputs of {samples} that forward changes": Form(
            lambda o, b: ce(o, b["y"]),
            batch=entries(x="x", y="y"),
            forward=lambda model, batch: model(batch["x"].mul_(2.0)),
            windows=of_digits("1" * samples),
            cut=(1,) * samples,
        )
        for samples in (2, 3)
    },
    "a flag that a buffer is set": Form(
        lambda o, b: {"one": (square(o).sum(), len(o)), "other": (o.abs().sum(), len(o))}, Begins, **MOVES
    ),
    "a pair whose weight is overwritten": Form(Reuses(is_reported=False), **MOVES),
    "reported values that are overwritten": Form(Reuses(is_reported=True), **MOVES),
    "a sum that is overwritten": Form(overwritten(), options={"loss_reduction": "sum"}),
    "pairs whose weights change from pass to pass": Form(
        thinned(),
        windows=drawn(*[0.5] * 6, samples=20),
        cut=(5,) * 4,
        allowed="warned",
        said="not the same in two passes over a window",
    ),
    "a sum of masked means": Form(
        tasks, windows=lambda seed: drawn(*[0.2 + seed % 2 / 10] * 3)(seed), seeds=4, swept=8, allowed=SOUND
    ),
    "a sum of masked means, noisy": Form(
        lambda o, b: tasks(o["out"], b), Noisy, forward=of_noise, windows=of_digits("1" * 10), **REFUSED
    ),
    **{
        f"mean of a mean, {name}{', noisy' * noisy}": Form(
            lambda o, _, shape=shape: (o["out"] if isinstance(o, dict) else o).square().mean().view(shape).mean(),
            **({"model": Noisy, "forward": of_noise} if noisy else {}),
        )
        for name, shape in (("(1,)", (1,)), ("(1, 1)", (1, 1)))
        for noisy in (False, True)
    },
    "a sum, noisy": Form(
        lambda o, b: (o["out"].log_softmax(-1).gather(-1, b["y"][..., None]) * -1.0).sum(),
        Noisy,
        forward=of_noise,
        windows=drawn(*[0.5] * 3),
        seeds=5,
        lr=1e-3,
    ),
    "contrastive, noisy": Form(lambda o, b: info_nce(o["out"], b), Noisy, forward=of_noise, **REFUSED),
    "contrastive beside a mean, noisy": Form(
        lambda o, b: ce(o["out"], b["labels"]) + 0.1 * info_nce(o["out"], b), Noisy, forward=of_noise, **REFUSED
    ),
    "supervised contrastive, noisy": Form(
        lambda o, b: supervised_contrastive(o["out"], b), Noisy, forward=of_noise, **REFUSED
    ),
    "a softmax over the tokens of each sample, noisy": Form(
        lambda o, b: -(o["out"][..., 0].log_softmax(1) * b["z"][..., 0].softmax(1)).sum(1).mean(),
        Noisy,
        forward=of_noise,
    ),
    "two sums of which one is noisy": Form(
        lambda o, b: (
            functional.mse_loss(o["out"][..., :2], b["z"][..., :2], reduction="sum") + o["out"][..., 2:].exp().sum()
        ),
        Noisy,
        forward=of_noise,
        lr=1e-3,
    ),
}

# --- losses that change between windows -------------------------------------------------------------------------------


def summed(o, b):
    return each(o, b).sum()


def mean(o, b):
    return each(o, b).mean()


def masked(o, b):
    return weighted(o, b, "mask")


CHANGES = {
    "sum to mean": ("exact", summed, mean),
    "mean to sum": ("exact", mean, summed),
    "mean to half a sum": ("exact", mean, lambda o, b: summed(o, b) / 2),
    "masked mean to sum": ("exact", masked, summed),
    "part of a sum to masked mean": ("exact", lambda o, b: summed(o, b) / 64, masked),
    "cross entropy to its sum": (
        "exact",
        lambda o, b: ce(o, b["labels"]),
        lambda o, b: ce(o, b["labels"], reduction="sum"),
    ),
    "a name more": (
        "exact",
        lambda o, b: {"ce": ce(o, b["labels"]), "mse": mse(o, b)},
        lambda o, b: {"ce": ce(o, b["labels"]), "mse": mse(o, b), "sum": summed(o, b)},
    ),
    "vector to sum": ("exact", row, summed),
    "mean to root": ("stopped", masked, lambda o, b: mse(o, b).sqrt()),
    "mean to mean and router": ("stopped", masked, lambda o, b: masked(o, b) + 0.1 * router(o)),
}
COMPARED |= {
    name: Form(
        # The third and the fifth window need no check.
        lambda o, b, at=2 + 2 * (place % 2), both=(before, after): both[int(b["window"][0]) >= at](o, b),
        windows=drawn(*[0.5] * 8),
        allowed=f"{allowed} or warned",
    )
    for place, (name, (allowed, before, after)) in enumerate(CHANGES.items())
}
