"""Losses of texts in many forms, and texts that show sooner or later, on all ranks or on one, what they count."""

from torch.nn import functional

from support.ranks.training import texts, texts_of_one_length


def _entropy(outputs, targets, **options):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), **options)


def _counted(targets):
    return (targets != -100).sum()


def masked(outputs, targets):
    return (outputs.abs().mean(2) * (targets != -100)).sum() / _counted(targets)


def _of_samples(outputs, targets):
    return _entropy(outputs, targets, reduction="none").view(targets.shape).sum(1)


def _with(reported):
    return lambda outputs, targets: {"loss": _entropy(outputs, targets), **reported(outputs.detach(), targets)}


def _right(outputs, targets):
    return (outputs.argmax(-1) == targets).double().sum()


LOSSES = {
    "tokens": _entropy,
    "at least one token": lambda outputs, targets: (
        _entropy(outputs, targets, reduction="sum") / _counted(targets).clamp(min=1)
    ),
    "sum": lambda outputs, targets: 1e-3 * _entropy(outputs, targets, reduction="sum"),
    "sum by samples": lambda outputs, targets: _entropy(outputs, targets, reduction="sum") / len(outputs),
    "vector": _of_samples,
    "pair": lambda outputs, targets: (_entropy(outputs, targets, reduction="sum"), _counted(targets)),
    "two divisors": lambda outputs, targets: _entropy(outputs, targets) + outputs.pow(2).mean(),
    "two divisors, scaled": lambda outputs, targets: 3 * _entropy(outputs, targets) + 0.5 * outputs.abs().mean(),
    "two means": lambda outputs, targets: {"tokens": _entropy(outputs, targets), "size": outputs.pow(2).mean()},
    "three means": lambda outputs, targets: {
        "tokens": _entropy(outputs, targets),
        "size": outputs.pow(2).mean(),
        "masked": masked(outputs, targets),
    },
    "pair and mean": lambda outputs, targets: {
        "tokens": (_entropy(outputs, targets, reduction="sum"), _counted(targets)),
        "size": outputs.pow(2).mean(),
    },
    "mean and vector": lambda outputs, targets: {
        "tokens": _entropy(outputs, targets),
        "size": outputs.pow(2).mean((1, 2)),
    },
    "two vectors": lambda outputs, targets: {
        "tokens": _of_samples(outputs, targets),
        "size": outputs.pow(2).mean((1, 2)),
    },
    "mean and sum": lambda outputs, targets: {
        "tokens": _entropy(outputs, targets),
        "size": 1e-3 * outputs.pow(2).sum(),
    },
    "reported number": _with(lambda outputs, targets: {"right": _right(outputs, targets) / _counted(targets)}),
    "reported pair": _with(lambda outputs, targets: {"right": (_right(outputs, targets), _counted(targets))}),
    "list": [
        lambda model, batch: _entropy(model(batch[0]), batch[1]),
        lambda model, batch: model(batch[0]).pow(2).mean(),
    ],
}
PAIRS = {
    "tokens": lambda outputs, targets: (_entropy(outputs, targets, reduction="sum"), _counted(targets)),
    "of one class": lambda outputs, targets: (
        (outputs.abs().sum(-1) * (targets == 1)).sum(),
        (targets == 1).sum(),
    ),
}
DATA = {
    "of all lengths": lambda: texts(48),
    "of one length, but for one": lambda: texts_of_one_length(32, but=17) + texts(16, seed=2),
    "some in which nothing counts": lambda: (
        texts(16, nothing_counts_below=3) + texts(32, seed=1, nothing_counts_below=5)
    ),
}


def two_pairs(outputs, targets):
    return {name: pair(outputs, targets) for name, pair in PAIRS.items()}
