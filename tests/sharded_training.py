"""Trainings of models to which `fully_shard` was applied."""

import json
import os
import sys
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

import rank_training


def sharded(model):
    """Spread a sequence of layers over all ranks, as is usual: the larger layers by themselves, then the whole."""
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    return fully_shard(model)


def whole(outcome):
    """Return an outcome whose parameters are gathered, so that it can leave its process."""
    return {**outcome, "parameters": [one.full_tensor() for one in outcome["parameters"]]}


def train(rank, size, *, norm=False, dropout=0.0, model=None, **arguments):
    model = model or rank_training.net(norm=norm, dropout=dropout)
    return whole(rank_training.train(rank, size, model=sharded(model), **arguments))


def with_own_samples(rank, size, lengths, **arguments):
    return train(rank, size, make_loader=rank_training.own_loader(lengths), **arguments)


def alone(rank, size, **arguments):
    return rank_training.train(rank, size, **arguments)
