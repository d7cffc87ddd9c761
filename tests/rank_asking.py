"""Trainings of ranks of which it is counted how often they send samples to each other."""

import torch
from torch import nn
from torch.nn import functional

import autoaccum
import rank_single
from autoaccum._distributed.process_group import Ranks

CLASSES = 3


def plain(outputs, targets):
    return functional.cross_entropy(outputs, targets)


def counted(train):
    """Return how often samples are sent in a training."""
    sent, tell = [], Ranks.tell

    def counting(ranks, value, source):
        sent.append(source)
        return tell(ranks, value, source)

    Ranks.tell = counting
    try:
        train()
    finally:
        Ranks.tell = tell
    return len(sent)


def texts(rank, size, lengths):
    return counted(lambda: rank_single.train(rank, size, lengths))


def classify(rank, size):
    """Train a classifier, whose loss never shows whether it runs over samples or targets, nor does it matter."""
    chance = torch.Generator().manual_seed(rank)
    inputs, targets = torch.rand(20, 4, generator=chance), torch.randint(CLASSES, (20,), generator=chance)
    loader = [(inputs[row : row + 1], targets[row : row + 1]) for row in range(20)]
    options = {"device": "cpu", "precision": "fp32", "shard": False, "progress": False}
    return counted(lambda: autoaccum.fit(nn.Linear(4, CLASSES), loader, size, loss=plain, **options))
