"""Trainings whose batches carry the count that their loss is divided by, for tests of several ranks."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, default_collate

import autoaccum
import rank_training


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = rank_training.net()

    def forward(self, inputs):
        return self.net(inputs)


def with_count(samples):
    inputs, targets = default_collate(samples)
    return {"inputs": inputs, "targets": targets, "num_items_in_batch": int((targets != -100).sum())}


def divided(outputs, batch):
    total = functional.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten(), reduction="sum")
    return total / batch["num_items_in_batch"]


def mean(outputs, batch):
    return functional.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())


def train(rank, size, loss):
    torch.manual_seed(0)
    model = Net()
    result = autoaccum.fit(
        model,
        DataLoader(rank_training.texts(), batch_size=7, collate_fn=with_count),
        target_batch=25,
        micro_batch=5,
        loss={"divided": divided, "mean": mean}[loss],
        optimizer=rank_training.sgd,
        epochs=2,
        shard=True,
        device="cpu",
        progress=False,
        val_loader=DataLoader(rank_training.texts(20, seed=5), batch_size=3, collate_fn=with_count),
    )
    return {
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "losses": [report.loss for report in result.history],
        "evaluations": [one.loss for one in result.evaluations],
    }
