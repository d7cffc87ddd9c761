"""Trainings with mappings of losses, for tests of several ranks; alone where `size` is 1."""

import torch
from torch.utils.data import DataLoader

import autoaccum
from support.ranks import training
from support.ranks.training import of_tokens, pair


def right(outputs, targets):
    return ((outputs.argmax(-1) == targets) & (targets != -100)).double()


def metrics(outputs, targets):
    counts = (targets != -100).sum()
    return {
        "accuracy": right(outputs, targets).sum() / counts,
        "as pair": (right(outputs, targets).sum(), counts),
        "each": right(outputs, targets).sum(1),
    }


def total(outputs, targets):
    return {"loss": of_tokens(outputs, targets), **metrics(outputs, targets)}


def detached(outputs, targets):
    return {"ce": of_tokens(outputs, targets), **metrics(outputs, targets)}


def total_pair(outputs, targets):
    return {"loss": pair(outputs, targets), **metrics(outputs, targets)}


def several(outputs, targets):
    found = metrics(outputs, targets)
    return {"tokens": of_tokens(outputs, targets), "size": outputs.pow(2).mean(), "as pair": found["as pair"]}


LOSSES = {"total": total, "detached": detached, "total_pair": total_pair, "several": several}


def train(rank, size, kind, only_on=None):
    """Train, and return the losses of every window and of the evaluation; some entries come from one rank alone."""

    def loss(outputs, targets):
        found = LOSSES[kind](outputs, targets)
        if only_on not in (None, rank):
            found = {name: value for name, value in found.items() if name in ("loss", "ce", "tokens", "size")}
        return found

    torch.manual_seed(0)
    model = training.net()
    result = autoaccum.fit(
        model,
        DataLoader(training.texts(), batch_size=7),
        target_batch=25,
        micro_batch=5,
        loss=loss,
        optimizer=training.sgd,
        epochs=2,
        shard_data=True,
        device="cpu",
        progress=False,
        val_loader=DataLoader(training.texts(20, seed=5), batch_size=3),
    )
    return {
        "parameters": [parameter.detach().clone() for parameter in model.parameters()],
        "losses": [(report.loss, dict(report.losses)) for report in result.history],
        "evaluations": [(one.loss, dict(one.losses)) for one in result.evaluations],
    }


def divided_by_own_count(rank, size):
    """Train with a loss that is divided by the count that each rank's batch carries."""

    def loss(outputs, batch):
        summed = torch.nn.functional.cross_entropy(outputs, batch["targets"], reduction="sum")
        return summed / batch["num_items_in_batch"]

    batch = {"input": torch.randn(6, 4), "targets": torch.arange(6) % 3, "num_items_in_batch": 6}
    model, options = torch.nn.Linear(4, 3), {"device": "cpu", "progress": False}
    autoaccum.fit(model, [batch], target_batch=6 * size, micro_batch=3, loss=loss, **options)
