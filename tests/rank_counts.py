"""A training whose batches carry the count that their loss is divided by, for tests of several ranks."""

import torch
from torch.nn import functional

import autoaccum


def divided(outputs, batch):
    return functional.cross_entropy(outputs, batch["targets"], reduction="sum") / batch["num_items_in_batch"]


def train(rank, size):
    batch = {"input": torch.randn(6, 4), "targets": torch.arange(6) % 3, "num_items_in_batch": 6}
    model, options = torch.nn.Linear(4, 3), {"device": "cpu", "progress": False}
    autoaccum.fit(model, [batch], target_batch=6 * size, micro_batch=3, loss=divided, **options)
