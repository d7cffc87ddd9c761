"""Trainings that tests run on several ranks, and alone to compare."""

import contextlib
import io
import random

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from support.ranks import sharded

SAMPLES, WIDTH, CLASSES, LENGTH = 50, 6, 4, 5
GIVEN = {"target_batch": 16, "micro_batch": 3, "shard_data": True}
# How far the parameters of several ranks may be from those of one process.
FAR = 1e-12


def far(one, other):
    return max(float((a - b).norm() / b.norm()) for a, b in zip(one, other, strict=True))


def assert_alike(outcomes):
    for other in outcomes[1:]:
        assert all(map(torch.equal, outcomes[0]["parameters"], other["parameters"]))
        assert all(map(torch.equal, outcomes[0]["buffers"], other["buffers"]))
        assert other["losses"] == outcomes[0]["losses"]


def assert_trained_as(found, expected, rounding=FAR):
    """All ranks alike, and as one process has trained."""
    assert_alike(found)
    assert far(found[0]["parameters"], expected["parameters"]) <= rounding


def vectors(samples=SAMPLES, seed=0):
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, WIDTH, generator=chance, dtype=torch.float64)
    return list(zip(inputs, torch.randint(CLASSES, (samples,), generator=chance), strict=True))


def texts(samples=SAMPLES, seed=0, nothing_counts_below=0):
    """Inputs (T, WIDTH) and targets (T,) of which -100 does not count, in other numbers for each sample."""
    chance = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, LENGTH, WIDTH, generator=chance, dtype=torch.float64)
    targets = torch.randint(CLASSES, (samples, LENGTH), generator=chance)
    lengths = torch.randint(1, LENGTH + 1, (samples,), generator=chance)
    targets[torch.arange(LENGTH) >= lengths[:, None]] = -100
    targets[:nothing_counts_below] = -100
    return list(zip(inputs, targets, strict=True))


def texts_of_one_length(samples, but):
    """`texts` in which everything counts but in one sample, of which one target does."""
    found = texts(samples)
    for number, (_, targets) in enumerate(found):
        targets.clamp_(min=0)
        targets[1:] = targets[1:] if number != but else -100
    return found


def net(seed=0, *, norm=False, dropout=0.0):
    torch.manual_seed(seed)
    layers = [nn.Linear(WIDTH, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, CLASSES)]
    return nn.Sequential(*layers).double()


def of_tokens(outputs, targets):
    return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def of_tokens_if_any(outputs, targets):
    return of_tokens(outputs, targets) if (targets != -100).any() else 0.0 * outputs.sum()


def two_means(outputs, targets):
    count = (targets != -100).sum().clamp(min=1)
    tokens = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum") / count
    return {"size": outputs.pow(2).mean(), "tokens": tokens}


def tokens_if_all_count(outputs, targets):
    return of_tokens(outputs, targets) if (targets != -100).all() else outputs.pow(2).sum()


def pair(outputs, targets):
    counts = targets != -100
    each = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="sum")
    return each, counts.sum()


def several(outputs, targets):
    return {
        "tokens": of_tokens(outputs, targets),
        "size": outputs.pow(2).mean(),
        "pair": (outputs.sum(), (targets != -100).sum()),
    }


def one_of_list(model, batch):
    return functional.cross_entropy(model(batch[0]), batch[1])


def other_of_list(model, batch):
    return model(batch[0]).pow(2).sum(1)


LOSSES = {
    "mean": (vectors, None),
    "sum": (vectors, nn.CrossEntropyLoss(reduction="sum")),
    "vector": (vectors, nn.CrossEntropyLoss(reduction="none")),
    "class weights": (vectors, nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0, 1.0, 0.1], dtype=torch.float64))),
    "tokens, found out": (texts, of_tokens),
    "tokens, if any": (texts, of_tokens_if_any),
    "two means": (texts, two_means),
    "pair": (texts, pair),
    "several": (texts, several),
    "list": (vectors, [one_of_list, other_of_list]),
}


class Seen(torch.utils.data.Dataset):
    """Samples that know how often each was loaded."""

    def __init__(self, samples):
        self.samples = samples
        self.loaded = []

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        self.loaded.append(index)
        return self.samples[index]


def train(
    rank,
    size,
    *,
    data=None,
    loss="mean",
    wrap=False,
    model=None,
    make_loader=None,
    is_spread=False,
    spreads=sharded.spread,
    seed=100,
    told=None,
    **arguments,
):
    """Train by `fit`; return what it has come to, and what is `told` by then.

    `spreads` spreads a model over ranks, and `make_loader` is a function of rank, size and samples.
    """
    made, function = LOSSES[loss] if isinstance(loss, str) else (texts, loss)
    model = model or net(seed=0 if is_spread else rank)  # whole ones are to take the weights of rank 0
    samples = made() if data is None else data
    seeded(seed + rank)
    trained = nn.parallel.DistributedDataParallel(model) if wrap else model
    trained = spreads(model) if is_spread else trained
    given = {"optimizer": sgd, "device": "cpu", "progress": False}
    loader = DataLoader(samples, batch_size=7) if make_loader is None else make_loader(rank, size, samples)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        result = autoaccum.fit(trained, loader, loss=function, **{**given, **arguments})
    return outcome(model, result) | {"said": said.getvalue(), "told": told() if callable(told) else told}


def outcome(model, result):
    return {
        "parameters": [sharded.whole(parameter).clone() for parameter in model.parameters()],
        "buffers": [
            buffer.to(torch.int32 if buffer.dtype is torch.uint16 else buffer.dtype, copy=True)
            for buffer in model.buffers()
        ],
        "losses": [report.loss for report in result.history],
        "named losses": [dict(report.losses) for report in result.history],
        "norms": [report.grad_norm for report in result.history if report.grad_norm is not None],
        "samples": [report.samples for report in result.history],
        "cuts": [report.micro_batches for report in result.history],
        "oom": result.oom_events,
        "recomputed": [report.recomputed_samples for report in result.history],
        "evaluations": [
            {"loss": one.loss, "losses": dict(one.losses), "metrics": dict(one.metrics), "samples": one.samples}
            for one in result.evaluations
        ],
        "savings": result.savings,
        "steps": result.steps,
        "stopped": result.stopped,
        "all samples": result.samples,
        "resumed from": result.resumed_from,
    }


def plain_sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def seeded(seed):
    torch.manual_seed(seed)
    random.seed(seed)


def own_loader(lengths):
    """Return what gives each rank the next so many samples."""

    def make(rank, size, samples):
        start = sum(lengths[:rank])
        return DataLoader(samples[start : start + lengths[rank]], batch_size=4)

    return make


def mean_size(outputs, targets):
    return outputs.abs().mean()


def stopping(rank, size, *, who, event, at):
    class Asks(autoaccum.Callback):
        times = 0

    def ask(self, *_, **__):
        self.times += 1
        if rank == who and self.times == at:
            raise autoaccum.StopTraining("good enough")

    setattr(Asks, event, ask)
    given = {"target_batch": 16, "micro_batch": 4, "shard_data": True, "epochs": 2, "callbacks": [Asks()]}
    return train(rank, size, val_loader=DataLoader(vectors(10, seed=1), batch_size=5), val_every=3, **given)


def evaluated_every(rank, size, *, every):
    given = {"target_batch": 16, "micro_batch": 4, "shard_data": True, "epochs": 2, "loss": "tokens, found out"}
    return train(rank, size, val_loader=DataLoader(texts(20, seed=5), batch_size=6), val_every=every, **given)
