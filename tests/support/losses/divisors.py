"""Forms of losses by what they are divided by: max(k, n), learned weights, 0, few labels, numbers of the batch."""

import functools
import random

import torch
from torch import nn
from torch.nn import functional

from support.losses.forms import (
    CUT,
    TEXT,
    WINDOWS,
    C,
    CustomCE,
    Form,
    N,
    Net,
    T,
    Tagger,
    WithPenalty,
    ce,
    drawn,
    each,
    entries,
    focal,
    of_digits,
    of_model,
    of_module,
    transformer,
)

DIVISORS = {}


def two_of(samples, seed):
    """The digits of a window in which two are positive."""
    some = random.Random(seed).sample(range(samples), 2)  # noqa: S311 - of a test
    return "".join(str(int(place in some)) for place in range(samples))


def square(o):
    """One value a sample."""
    return o.square().mean((1, 2))


def itself(n):
    return n


def at_least_1(n):
    return n.clamp(min=1)


def over(n, of=square, entry="has"):
    """A mean over the positive samples, divided by a function of their number."""
    return lambda o, b: (of(o) * b[entry]).sum() / n(b[entry].sum())


def clamped(o, b, least=1, entry="has"):
    return over(lambda n: n.clamp(min=least), entry=entry)(o, b)


def boxes(o, b):
    return (functional.mse_loss(o, b["z"], reduction="none").mean((1, 2)) * b["has"]).sum()


def tokens_kept(windows, *, starts=False):
    """Makes windows of 12 samples whose tokens count all in the first two, and few in the others; the first may."""

    def made(seed):
        found = []
        for number, one in enumerate(drawn(*[1.0] * windows, samples=12)(seed)):
            chance = torch.Generator().manual_seed(1000 * seed + number)
            kept = torch.rand(12, 5, generator=chance) < (1.0 if number < 2 else 0.15)
            kept[0, 0] |= starts
            found.append({"x": one["x"][:, :1], "kept": kept.double()})
        return found

    return made


# --- max(k, n) --------------------------------------------------------------------------------------------------------

ONES, EIGHT = (1,) * N, (2, 2, 1, 3)
FEW = ("1000000000", "1100000000", "1111111110")
SOUND = "exact or warned or refused or stopped"
OF_HAS = entries(x="x", z="z", y="y", has="has")
of_has = functools.partial(Form, batch=OF_HAS)
OF_Y, OF_Z = entries(x="x", y="y"), entries(x="x", z="z")
PARTS = (0.06, 0.25, 0.03, 0.12, 0.5)
DIVISORS |= {
    f"{name}, n at least {least}": of_has(
        lambda o, b, of=of, least=least: of(o, b, b["has"].sum().clamp(min=least)),
        windows=lambda seed: drawn(*PARTS[seed % 5 :][:1] * 5, samples=32)(seed),
        seeds=2,
        swept=20,
        cut=(8, 3, 5, 9, 2, 1, 4),
        tolerance=1e-6,
        mixes="+" in name,
        allowed=f"{SOUND} or late",
    )
    for least in (1.0, 4.0)
    for name, of in {
        "focal / n": lambda o, b, n: focal(o, b).sum() / n,
        "boxes / n": lambda o, b, n: boxes(o, b) / n,
        "ce + boxes / n": lambda o, b, n: ce(o, b["y"]) + boxes(o, b) / n,
        "(focal + boxes) / n": lambda o, b, n: (focal(o, b).sum() + boxes(o, b)) / n,
        "focal / n + boxes / n": lambda o, b, n: focal(o, b).sum() / n + boxes(o, b) / n,
        "focal / n, boxes / n by name": lambda o, b, n: {"classes": focal(o, b).sum() / n, "boxes": boxes(o, b) / n},
    }.items()
}
DIVISORS |= {
    # The batch does not count what is clamped.
    f"clamp at {least} of what no mask says, in {cut}": Form(
        lambda o, b, least=least: clamped(o, b | {"has": (b["z"][:, 0, 0] < 0).double()}, least),
        batch=OF_Z,
        windows=drawn(*[0.5] * 5, samples=sum(cut)),
        swept=6,
        cut=cut,
        allowed=SOUND,
    )
    for least in (1, 2)
    for cut in (ONES, EIGHT)
}
DIVISORS |= {
    "clamp of real weights below 1 that no entry holds": Form(
        lambda o, b: clamped(o, b | {"has": b["z"][:, 0, 0].abs() / 2}),
        batch=OF_Z,
        windows=drawn(*[0.5] * 3),
        seeds=6,
        cut=(1, 2, 1, 1, 1, 2, 2),
        allowed="warned or refused",
    ),
    "clamp, another entry counts as much": Form(
        clamped,
        windows=[of_digits("1100")[0] | {"other": torch.tensor([1.0, 0.0, 1.0, 0.0])}],
        cut=(1,) * 4,
        allowed="warned",
    ),
    "clamp at 2, fewer in a window": of_has(
        lambda o, b: clamped(o, b, 2), windows=of_digits("11110000", "11111110", "10000000"), cut=(2,) * 4
    ),
    # The samples of a check have no more of them than that.
    "max(8, n) where n is 10": of_has(
        over(lambda n: max(8, int(n))),
        windows=of_digits("1" * 10),
        cut=(4, 4, 2),
        allowed="warned",
        said="is divided by 8 in all micro-batches",
    ),
    "twice a clamped count": of_has(
        over(lambda n: 2.0 * n.clamp(min=2)),
        windows=of_digits("1" * 12, "111111110110"),
        cut=(4, 4, 2, 2),
        allowed="warned",
    ),
    "something counts where a count says nothing": Form(
        lambda o, b: clamped(o, b | {"has": (b["sign"] != 0).double()}),
        batch=entries(x="x", sign="sign"),
        windows=[
            one | {"sign": torch.tensor(sign, dtype=torch.float64)}
            for one, sign in zip(
                of_digits("1" * 8, "1" * 8), ([1, 2, 0, 3, 0, 1, 1, 2], [1, -2, 0, 0, 3, 1, 1, 2]), strict=True
            )
        ],
        cut=(1,) * 8,
        allowed="warned",
        said="divides by more in a micro-batch than is counted there",
    ),
    "a loss is 0 where something counts": Form(
        lambda o, b: over(at_least_1, lambda o: (o[:, 0, 0] - 9).relu())(
            o, b | {"has": (b["x"][:, 0, 0] < 0).double()}
        ),
        batch=entries(x="x"),
        cut=ONES,
        allowed="warned",
        said="divides by more in a micro-batch than is counted there",
    ),
    # The 8 samples of a check have no more of them than max(k, n) has at least, and the window has more.
    **{
        f"clamp at {least}, met by a later check, in {size}": of_has(
            lambda o, b, least=least: clamped(o, b, least),
            windows=drawn(0.8, 0.2, 0.1, 0.2, samples=32),
            swept=3,
            cut=(size,) * (32 // size),
            allowed="exact or doubted",
        )
        for least in (2, 3, 4)
        for size in (4, 8)
    },
    # The batch does not count what is clamped, and a later check may meet it.
    **{
        f"clamp at {least} of weights, not met at first, in {cut}": Form(
            lambda o, b, least=least: (
                (square(o) * b["w"] * b["has"]).sum()
                / ((b["w"] * b["has"]).sum() * (1e-3 if least < 1 else 4)).clamp(min=least)
            ),
            batch=entries(x="x", w="w", has="has"),
            windows=drawn(1.0, 1.0, 0.4, 0.4),
            cut=cut,
            allowed="exact or warned or stopped",
        )
        for least in (1e-3, 4.0)
        for cut in ((2,) * 5, ONES, (7, 1, 2))
    },
    **{
        f"n of 64 at least 32 by {name}": of_has(
            over(n), windows=drawn(*[0.7] * 4, samples=64), cut=(16,) * 4, allowed=allowed
        )
        for name, allowed, n in (
            ("clamp", "exact", lambda n: n.clamp(min=32)),
            ("torch.clamp", "exact", lambda n: torch.clamp(input=n, min=32)),
            ("max", "exact", lambda n: max(32, n)),
            ("max of a tensor", "exact", lambda n: max(n, torch.tensor(32.0))),
            ("twice a clamp", "doubted", lambda n: 2 * n.clamp(min=32)),
            ("max of an int", "warned", lambda n: max(32, int(n))),
        )
    },
    **{
        f"{factor} * clamped{' + mean' * both}": of_has(
            lambda o, b, factor=factor, both=both: factor * clamped(o, b) + (0.1 * o.abs().mean() if both else 0.0),
            windows=of_digits("1" * 10, "1" * 10, "1000111111", "1" * 10, "0000111111", "1" * 10),
            cut=(4, 3, 3),
            mixes=both,
        )
        for factor in (-1.0, 2.0)
        for both in (False, True)
    },
    # As of RetinaNet: micro-batches without a positive have a loss.
    "negatives / positives, reported twice": of_has(
        lambda o, b: {"loss": (loss := o.square().sum() / b["has"].sum().clamp(min=1)), "same": loss.detach()},
        windows=of_digits("1011000100", "0000110000", "0" * 10),
        cut=(2,) * 5,
        allowed="doubted",
    ),
    # It is divided by 1 for two samples, though nothing is clamped.
    "hinge over half of the samples": Form(
        lambda o, b: torch.relu(1.0 - o[:, 0, 0] * b["x"][:, 0, 0].sign()).sum() / (len(o) * 0.5),
        batch=entries(x="x"),
        windows=drawn(*[0.5] * 4, samples=16),
        cut=(2,) * 8,
        lr=0.3,
    ),
    **{
        f"label of class 0 is no clamp, in {cut}": Form(
            lambda o, b: ce(o[:, :1], b["y"], ignore_index=-1) + 0.1 * o.square().mean(),
            batch=lambda window: {"x": window["x"], "y": (window["cls"] - 1).index_fill(0, torch.tensor(0), 1)},
            windows=drawn(*[0.5] * 5),
            seeds=4,
            cut=cut,
            mixes=True,
            allowed="exact or warned",
        )
        for cut in (ONES, CUT)
    },
    # What micro-batches are divided by may add up to what the batch counts by accident.
    "mean over samples in which something counts": Form(
        lambda o, b: clamped(o, {"has": (b["kept"].sum(1) > 0).double()}),
        windows=tokens_kept(5, starts=True),
        seeds=2,
        swept=40,
        cut=(5, 1, 4, 2),
        allowed=SOUND,
    ),
    **{
        # Another mean has a clamp of the same count.
        f"mean beside a {name} one of the same count": of_has(
            lambda o, b, n=n: {"mean": over(itself)(o, b), "other": 0.5 * over(n, lambda o: o[:, 0, 0])(o, b)},
            windows=drawn(1.0, 0.7, 0.0),
            allowed="stopped",
            said="division by 0",
        )
        for name, n in (("clamped", at_least_1), ("compared", lambda n: n if n > 1 else n * 1.0))
    },
    "sum / 64 beside a clamp that is not its own": of_has(
        lambda o, b: (100.0 / ((o[:, 0, 0] > 0) * b["has"]).sum().clamp(min=1), o.square().sum() / 64)[1],
        windows=drawn(0.9, 0.9, 0.9),
        cut=(2,) * 5,
    ),
}

# --- pairs ------------------------------------------------------------------------------------------------------------


def pair(weight, entry="has"):
    return lambda o, b: ((square(o) * b[entry]).sum(), weight(b[entry].sum()))


CLAMPS = {
    "clamp": lambda n: n.clamp(min=2),
    "clamp_min": lambda n: torch.clamp_min(n, 2),
    "maximum": lambda n: torch.maximum(n, torch.tensor(2.0).to(n)),
}
DIVISORS |= {
    f"pair, {name} of a weight where all count": Form(
        pair(clamp), windows=drawn(1.0, 0.3), cut=(2,) * 5, allowed="refused", said="weight"
    )
    for name, clamp in CLAMPS.items()
}
DIVISORS |= {
    "pair, clamped weight, nothing in a part": Form(
        pair(at_least_1), windows=of_digits("0010000000"), cut=(2,) * 5, allowed="refused"
    ),
    "pair, weight kept from 0": Form(
        pair(lambda n: n.clamp(min=1e-9) / 1e3), windows=drawn(1.0, 0.3), cut=(2,) * 5, tolerance=1e-8
    ),
    # A single one that counts makes no difference.
    "pair, a mean in place of the sum": Form(
        lambda o, b: (clamped(o, b), b["has"].sum()),
        windows=drawn(*[0.35] * 12, samples=8),
        seeds=12,
        cut=(2,) * 4,
        allowed="refused or stopped",
        said="sum",
    ),
    "pair, a mean where all count": Form(
        lambda o, b: (over(itself)(o, b), b["has"].sum()),
        windows=of_digits("1" * 10),
        allowed="refused",
        said="loss 'loss' is a pair whose first half is a mean; a pair means",
    ),
    "pair, the mean of a mask for a weight": Form(
        lambda o, b: ((square(o) * b["has"]).sum(), b["has"].mean()),
        allowed="refused",
        said="the weights of loss 'loss' do not add up: .* a pair means",
    ),
    "pair beside a mean of the arguments": Form(
        lambda o, b: {"pair": pair(itself)(o, b), "mean": o.exp().mean()}, options={"loss_reduction": "mean"}
    ),
    "pair of even sizes": Form(
        lambda o, b: pair(itself)(o, b) if len(o) % 2 == 0 else raise_("pairs of samples"),
        windows=of_digits("1" + "0" * 19, "11" + "0" * 18),
        cut=(4,) * 5,
    ),
}


def raise_(text):
    raise ValueError(text)


# --- learned weights --------------------------------------------------------------------------------------------------


class Learned(Net):
    """Outputs, and a weight of the loss that is learned."""

    def __init__(self):
        super().__init__()
        self.log = nn.Parameter(torch.tensor(0.3))

    def forward(self, x):
        return super().forward(x), self.log


def rest(o, b):
    return (square(o) * b["has"]).sum()


def full_at_first(windows):
    """Makes windows that are not full by an even seed; by an odd one, the mask tells nothing in the first two."""
    return lambda seed: [*drawn(*[1.0] * (2 * (seed % 2)), *[0.5] * windows)(seed)][:windows]


DIVISORS |= {
    f"learned weight {name}": Form(
        loss,
        Learned,
        windows=full_at_first(4),
        seeds=2,
        lr=0.03,
        cut=(4, 4, 2),
        mixes=name in ("before the division", "after it", "beside a mean"),
    )
    for name, loss in {
        "before the division": lambda o, b: torch.exp(-o[1]) * rest(o[0], b) / b["has"].sum() + o[1],
        "after it": lambda o, b: torch.exp(-o[1]) * (rest(o[0], b) / b["has"].sum()) + o[1],
        "as a divisor": lambda o, b: rest(o[0], b) / (2 * o[1] ** 2) / b["has"].sum(),
        "clamped": lambda o, b: o[1] * rest(o[0], b) / b["has"].sum().clamp(min=1),
        "beside a mean": lambda o, b: o[1] * rest(o[0], b) / b["has"].sum() + torch.exp(-o[1]) * o[0].abs().mean(),
    }.items()
}
DIVISORS |= {
    "learned weight in the divisor, full at first": Form(
        lambda o, b: rest(o[0], b) / (b["has"].sum() * 2 * o[1]),
        Learned,
        windows=drawn(*[1.0] * 4, 0.5, 0.5),
        allowed="refused or stopped",
        said="neither a mean nor a sum|cannot be read",
    )
}

# --- several divisors, which the batch does not count -----------------------------------------------------------------


def above_0(o, b, number):
    return over(itself, lambda o: o[..., number % C].square().mean(1))(o, {"has": (b["x"][:, 0, number] > 0).double()})


DIVISORS |= {
    f"{count} divisors that no entry counts": Form(
        lambda o, b, count=count: sum(above_0(o, b, number) for number in range(count)),
        batch=entries(x="x"),
        windows=drawn(*[0.5] * 5, samples=60),
        cut=(20,) * 3,
        mixes=count > 1,
    )
    for count in (1, 2, 4, 5)
}
DIVISORS |= {
    "a count fits by accident until the fifth window": Form(
        lambda o, b: over(itself)(o, b if b["number"][0] < 50 else {"has": b["x"][:, 0, 0].abs()}) + o.abs().mean(),
        windows=of_digits(*["1110110101"] * 8),
        cut=(4, 4, 2),
        mixes=True,
    ),
    "ce + a mean whose weight grows": Form(
        lambda o, b: ce(o, b["labels"]) + min(1.0, 0.1 + float(b["window"][0]) / 6) * o.square().mean(),
        windows=drawn(*[0.5] * 8),
        mixes=True,
    ),
    "ce + L1 of weights": Form(lambda o, b: ce(o[0], b["labels"]) + 1e-2 * o[1].sqrt(), WithPenalty, mixes=True),
}

# --- divisors of 0 ----------------------------------------------------------------------------------------------------

CLASSES = torch.tensor([0, 0, 0, 2, 3, 1, 2, 3, 1, 2, 3, 1])
OF_CLASSES = torch.tensor([0.0, 1.0, 2.0, 3.0, 1.0], dtype=torch.float64)
SIGNED = torch.tensor([1.0, -1.0, 2.0] * 4, dtype=torch.float64)
LOST = "divides by 0 in a micro-batch in which something counts"


class First(Net):
    """Of the first token alone."""

    def forward(self, x):
        return super().forward(x)[:, 0]


def with_entries(*windows):
    """Windows of 12 samples with entries of these."""
    return [one | own for one, own in zip(drawn(*[0.5] * len(windows), samples=12)(0), windows, strict=True)]


SMOOTHED = nn.CrossEntropyLoss(OF_CLASSES, label_smoothing=0.1)
OF_ALL_CLASSES = with_entries({"cls": CLASSES})
of_classes = functools.partial(of_module, model=First, x="x", y="cls", windows=OF_ALL_CLASSES)
DIVISORS |= {
    f"smoothing of classes of weight 0{', a function' * by_hand}, {size} at once": of_classes(
        (lambda *pair: 1.0 * SMOOTHED(*pair)) if by_hand else SMOOTHED,
        cut=(size,) * (12 // size),
        allowed="exact" if size == 4 else "refused",
        said=LOST if size == 3 else "",
    )
    for by_hand in (False, True)
    for size in (3, 4)
}
DIVISORS |= {
    f"micro-batch of {name}": of_classes(loss, cut=(3,) * 4)
    for name, loss in {
        "ignored targets": nn.CrossEntropyLoss(OF_CLASSES + 1, ignore_index=0),
        "ignored targets, smoothing": nn.CrossEntropyLoss(OF_CLASSES + 1, ignore_index=0, label_smoothing=0.1),
        "targets of weight 0": nn.CrossEntropyLoss(OF_CLASSES),
    }.items()
}
for checked in (0, 1, 2):  # the third window is not
    plain = [{"has": SIGNED.abs()}] * checked
    DIVISORS |= {
        f"weights that cancel after {checked}": of_has(
            over(itself),
            windows=with_entries(*plain, {"has": SIGNED}),
            cut=(2,) * 6,
            allowed="stopped" if checked else "refused",
            said=LOST,
        ),
        f"NaN among the weights after {checked}": of_has(
            over(itself),
            windows=with_entries(*plain, {"has": SIGNED.abs().index_fill(0, torch.tensor(5), torch.nan)}),
            cut=(2,) * 6,
            allowed="stopped" if checked else "refused",
            said="look for NaN among the weights" if checked else "not finite from the start",
        ),
    }
DIVISORS |= {
    "weights that cancel, a pair": Form(pair(itself), windows=with_entries({"has": SIGNED}), cut=(2,) * 6),
    "no clamp where a count fits by accident, a function": Form(
        lambda o, b: over(itself, lambda o: functional.cross_entropy(o, b["cls"], reduction="none"), "kept")(
            o, {"kept": (b["cls"] != 1).double()}
        ),
        First,
        entries(x="x", cls="cls"),
        windows=lambda seed: 4 * drawn(0.5, samples=12)(seed),
        seeds=4,
        cut=(3,) * 4,
    ),
    "no clamp where a count fits by accident": of_module(
        nn.CrossEntropyLoss(label_smoothing=0.2, ignore_index=1),
        First,
        "x",
        "cls",
        windows=lambda seed: 4 * drawn(0.5, samples=12)(seed),
        seeds=4,
        cut=(3,) * 4,
    ),
}

# --- what counts is rare, or counts nowhere ---------------------------------------------------------------------------


def at_least_one(o, b, entry="labels_of_some"):
    return ce(o, b[entry], reduction="sum") / (b[entry] != -100).sum().clamp(min=1)


def if_any(o, b):
    there = b["labels_of_some"] != -100
    return functional.cross_entropy(o[there], b["labels_of_some"][there]) if there.any() else 0.0 * o.sum()


def not_quite_0(o, b):
    return ce(o, b["labels_of_some"], reduction="sum") / ((b["labels_of_some"] != -100).double().sum() + 1e-8)


OF_LABELS = entries(x="x", labels_of_some="labels_of_some")
DIVISORS |= {
    f"few labels, {name}": Form(
        loss,
        batch=OF_LABELS,
        windows=drawn(*[0.1] * 8, samples=64),
        seeds=2,
        swept=6,
        cut=(16,) * 4,
        mixes=name == "penalised",
        tolerance=1e-7,
    )
    for name, loss in {
        "guarded": if_any,
        "clamped": at_least_one,
        "not quite 0": not_quite_0,
        "penalised": lambda o, b: ce(o, b["labels_of_some"]) + 0.1 * o.square().mean(),
    }.items()
}
DIVISORS |= {
    f"few labels, nn.CrossEntropyLoss {reduction}, {cut}": of_module(
        nn.CrossEntropyLoss(reduction=reduction), Tagger, "x", "labels_of_some", windows=of_digits(*FEW), cut=cut
    )
    for reduction in ("mean", "sum")
    for cut in (ONES, (4, 4, 2))
}
DIVISORS |= {
    f"labels in 2 of {samples}, {reduction}": Form(
        lambda o, b, reduction=reduction: ce(o, b["labels_of_some"], reduction=reduction),
        windows=lambda seed, samples=samples: of_digits(two_of(samples, seed)),
        swept=2,
        cut=(1, samples - 2, 1),
    )
    for reduction in ("mean", "sum")
    for samples in (5, 300)
}
DIVISORS |= {
    "focal / few positives": of_has(
        lambda o, b: focal(o, b).sum() / max(1, int(b["has"].sum())),
        windows=drawn(*[0.05] * 8, samples=64),
        seeds=3,
        swept=8,
        cut=(16,) * 4,
        allowed="exact or warned",
        said=r"max\(1, n\)",
    ),
    "custom autograd, full at first": Form(
        lambda o, b: CustomCE.apply(o, b["labels_of_some"]), batch=OF_LABELS, windows=drawn(*[1.0] * 5, *[0.5] * 5)
    ),
    "a sum + 0 times what counts nothing": Form(
        lambda o, b: o.square().sum() + 0.0 * ce(o, b["labels_of_some"]),
        windows=of_digits(*["1" * 10] * 3, *["000" + "1" * 7] * 5),
        allowed=SOUND,
    ),
    "mean, rare by name": Form(
        lambda o, b: {"all": o.square().mean(), "rare": over(at_least_1, lambda o: o.abs().mean((1, 2)))(o, b)},
        windows=drawn(0.5, 0.0, 0.5, 0.5, 0.0, 0.5),
    ),
    # The boxes' loss has no graph where no sample has a box.
    "boxes that are not there": of_has(
        lambda o, b: {
            "classes": ce(o, b["y"]),
            "boxes": boxes(o, b) / b["has"].sum() if b["has"].any() else torch.zeros(()),
        },
        windows=of_digits("001000100001"),
        cut=(2,) * 6,
    ),
    # No sample changes what is trained at first.
    "penalty, then a mean": Form(
        lambda o, b: ce(o[0], b["labels_of_some"]) if b["window"][0] > 3 else 0.1 * o[1],
        WithPenalty,
        windows=drawn(*[0.5] * 8),
    ),
    **{
        f"nothing counts in a window, {name} in {cut}": Form(
            loss,
            batch=OF_LABELS,
            windows=of_digits(*("0" * n + "1" * (10 - n) for n in (0, 1, 10, 3, 4, 10, 6, 7))),
            cut=cut,
        )
        for name, loss in (("guarded", if_any), ("clamped", at_least_one))
        for cut in ((10,), (3, 3, 3, 1))
    },
}
# One sample alone counts in the samples of the first window, or few do.
DIVISORS |= {
    f"sum / {name}, {first} at first": of_has(
        lambda o, b, divisor=divisor: (square(o) * b["has"]).sum(0) / divisor,
        windows=of_digits(first, "1011011101", "1110101001"),
        cut=(4, 4, 2),
        allowed="doubted",
        said=said,
    )
    for first, said, divisors in (
        (
            "0000010000",
            "in none of the samples that were tried",
            {"16": 16, "16.0": 16.0, "a tensor": torch.tensor(16.0)},
        ),
        ("1111111000", "is divided by 1 in all micro-batches", {"1": 1}),
    )
    for name, divisor in divisors.items()
}

# --- numbers of a batch -----------------------------------------------------------------------------------------------


def items(entry="labels", of=int):
    """Makes a batch with a number of its own: how many labels count."""
    return lambda window: {"x": window["x"], "labels": window[entry], "items": of((window[entry] != -100).sum())}


def fitting(fits):
    """What is said where no two samples fit at once."""
    told = {"allowed": "doubted", "said": "two samples that can be joined do not fit at once"}
    return {"fits": fits} | (told if fits == 1 else {})


def divided(o, b):
    return ce(o, b["labels"], reduction="sum") / b["items"]


DIVISORS |= {
    f"sum / number of the batch, {entry} by {of.__name__} in {cut} of {fits or N}": Form(
        divided, batch=items(entry, of), cut=cut, **fitting(fits)
    )
    for entry, of, cut, fits in (
        ("labels", int, (10,), 0),
        ("labels", int, CUT, 0),
        ("labels", int, ONES, 0),
        ("labels", int, ONES, 1),
        ("labels", torch.as_tensor, ONES, 1),
        ("labels_of_some", int, (4, 4, 2), 2),
    )
}
DIVISORS |= {
    "sum / number of the batch, said to be a sum": Form(divided, batch=items(), options={"loss_reduction": "sum"}),
    "num_items_in_batch, which T5 ignores": of_model(
        transformer("T5ForConditionalGeneration"),
        lambda window: entries(**TEXT, labels="ids_labels")(window) | {"num_items_in_batch": 7},
    ),
}

# --- one sample fits at once ------------------------------------------------------------------------------------------


def some_of_few(seed):
    return of_digits(("0101111011", "1011001010", "0000000001")[seed])


DIVISORS |= {
    f"one fits, {name}": Form(
        loss,
        model,
        batch,
        windows=windows,
        seeds=3 if windows is some_of_few else 1,
        cut=ONES,
        mixes="+" in name,
        **fitting(1),
    )
    for name, loss, model, batch, windows in (
        ("clamped", at_least_one, Net, OF_LABELS, some_of_few),
        ("guarded", if_any, Net, OF_LABELS, some_of_few),
        (
            "smoothing",
            lambda o, b: ce(o, b["labels_of_some"], label_smoothing=0.1),
            Net,
            OF_LABELS,
            of_digits("0101111111"),
        ),
        # Divided by the same in each sample, as by a number of the whole batch, and means all the same.
        ("a number is the length", lambda o, b: each(o, b).mean(), Net, lambda w: OF_Y(w) | {"longest": T}, WINDOWS),
        (
            "a number is one sample",
            lambda o, b: each(o, b).sum() / len(o),
            Net,
            lambda w: OF_Y(w) | {"epoch": 1},
            WINDOWS,
        ),
        ("a mask of the loss", lambda o, b: each(o, b)[:, 1:4].sum() / (3 * len(o)), Net, OF_Y, WINDOWS),
        ("masked + L2", lambda o, b: clamped(o[0], b, 0) + 0.1 * o[1], WithPenalty, OF_HAS, drawn(*[1.0] * 3)),
        (
            "weighted, L2 by name",
            lambda o, b: {"mean": over(itself, entry="w")(o[0], b), "l2": 0.1 * o[1]},
            WithPenalty,
            entries(x="x", w="w"),
            WINDOWS,
        ),
    )
}
DIVISORS |= {
    f"mask in {cut}, {fits or 'all'} fit": of_has(
        clamped,
        windows=lambda seed: of_digits(("011100", "001010", "100001", "110011")[seed]),
        seeds=4,
        cut=cut,
        fits=fits,
    )
    for cut, fits in (((2, 2, 2), 2), ((3, 3), 3), ((2, 2, 2), 0), ((1, 2, 1, 2), 0))
}
DIVISORS |= {
    # The two of a check do not tell the mask from samples.
    "mask leaves out a sample alone": of_has(clamped, windows=of_digits("110011"), cut=(3, 1, 2), fits=3),
    "one fits, cannot be read": Form(
        lambda o, b: o.square().mean() + o.square().mean().sqrt(),
        cut=ONES,
        fits=1,
        allowed="refused",
        said=r"cannot be read from its graph.*\(sum, weight\) pair",
    ),
}


# --- what multiplies a mean is another number in each micro-batch -----------------------------------------------------


def mixup(o, b):
    """Of two classes for each token, the first by a part that is drawn, as a training loop's own mixup does."""
    part = torch.rand(()).item()
    return part * ce(o, b["y"]) + (1 - part) * ce(o, (b["y"] + 1) % C)


def times_what_is_drawn(loss):
    return lambda o, b: (0.1 + torch.rand(()).item()) * loss(o, b)


DIVISORS |= {
    f"{name} times what is drawn": Form(loss, allowed="refused", said="times a number that differs")
    for name, loss in {
        "two means": mixup,
        "a mean": times_what_is_drawn(lambda o, b: ce(o, b["labels"])),
        "a mean over at least one": times_what_is_drawn(clamped),
        "a sum over samples": times_what_is_drawn(lambda o, b: ce(o, b["y"], reduction="sum") / len(o)),
        "a mean beside a mean": lambda o, b: (
            ce(o, b["labels"]) + times_what_is_drawn(lambda o, b: square(o).mean())(o, b)
        ),
    }.items()
}

DIVISORS["over a mask in bfloat16"] = Form(  # whose sums are exact up to 256, and so in the checks
    lambda o, b: (each(o, b) * b["mask"]).sum() / b["mask"].bfloat16().sum(),
    windows=of_digits("1" * 149),
    cut=(80, 69),
    tolerance=1e-2,
    allowed="exact or warned",
)
