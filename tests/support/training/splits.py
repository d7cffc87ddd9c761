"""Trainings on batches that only a split can cut, on one or several ranks, and the same without autoaccum."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader

import autoaccum
from support.ranks.training import outcome, sgd

SAMPLES, WIDTH, CLASSES = 44, 6, 4


def rows(samples=SAMPLES):
    """Samples of one to seven rows each, with a class for every row."""
    chance = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 8, (samples,), generator=chance).tolist()
    return [
        (
            torch.randn(length, WIDTH, generator=chance, dtype=torch.float64),
            torch.randint(CLASSES, (length,), generator=chance),
        )
        for length in lengths
    ]


def collate(samples):
    inputs, targets = zip(*samples, strict=True)
    return {"inputs": torch.cat(inputs), "targets": torch.cat(targets)}


def mean(outputs, batch):
    """A mean over rows, which the shape of a batch does not tell from samples."""
    return functional.cross_entropy(outputs, batch["targets"])


def number(samples):
    return float(sum(len(targets) for _, targets in samples))


def forward(model, batch):
    return model(batch["inputs"])


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def split():
    return autoaccum.ListOfSamples(collate, weight=number)


def train(rank, _, **arguments):
    model = net(seed=rank)
    loader = DataLoader(rows(), batch_size=7, collate_fn=list)
    given = {"optimizer": sgd, "device": "cpu", "progress": False}
    result = autoaccum.fit(model, loader, loss=mean, forward=forward, split=split(), **{**given, **arguments})
    return outcome(model, result)


def by_hand(target, epochs=1):
    model, data = net(), rows()
    optimizer = sgd(model.parameters())
    for _ in range(epochs):
        for start in range(0, len(data), target):
            batch = collate(data[start : start + target])
            optimizer.zero_grad()
            mean(forward(model, batch), batch).backward()
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]
