"""Trainings that evaluate, for tests of several ranks; alone where `size` is 1."""

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import ClasswiseWrapper, Metric, MetricCollection, MinMaxMetric, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision

import autoaccum
from support.ranks import training
from support.ranks.faults import Seen

BATCH = 3


def in_order(samples, rank):
    return DataLoader(samples, batch_size=BATCH)


def shuffled(samples, rank):
    return DataLoader(samples, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(rank))


def shuffled_by_all(samples, rank):
    return DataLoader(samples, batch_size=BATCH, shuffle=True)


def with_workers(samples, rank):
    return DataLoader(samples, batch_size=BATCH, shuffle=True, num_workers=1)


def dropping(samples, rank):
    return DataLoader(samples, batch_size=BATCH, drop_last=True)


def in_one(samples, rank):
    return DataLoader(samples, batch_size=len(samples))


# The same batches in every process, none of which is cut.
ALIKE = (in_order, dropping)
LOADERS = {made.__name__: made for made in (*ALIKE, in_one, shuffled, shuffled_by_all, with_workers)}


def accuracy(outputs, targets):
    counts = targets != -100
    return ((outputs.argmax(-1) == targets) & counts).sum(1) / counts.sum(1)


def accuracy_of_batch(outputs, targets):
    """The share of right tokens of all, which depends on what is in the batch."""
    counts = targets != -100
    return float((outputs.argmax(-1) == targets)[counts].double().mean())


def flat_accuracy():
    class OfTokens(MulticlassAccuracy):
        def update(self, outputs, targets):
            super().update(outputs.flatten(0, 1), targets.flatten())

    return OfTokens(training.CLASSES, average="micro", ignore_index=-100)


def evaluated(rank, size, kind, samples, *, epochs=2, shard_data=True, **arguments):
    """Train and evaluate after each epoch; return what came of it, and which samples were loaded for that."""
    seen = Seen(training.texts(samples, seed=5))
    metrics = {"mean": training.mean_size, "accuracy": accuracy, "torchmetrics": flat_accuracy()}
    if LOADERS[kind] in ALIKE:
        metrics["of batch"] = accuracy_of_batch
    found = training.train(
        rank,
        size,
        model=training.net(),
        loss="tokens, found out",
        target_batch=25,
        micro_batch=5,
        epochs=epochs,
        shard_data=shard_data,
        val_loader=LOADERS[kind](seen, rank),
        metrics=metrics,
        **arguments,
    )
    return {**found, "loaded": seen.loaded}


def with_other_lengths(rank, size, kind):
    return evaluated(rank, size, kind, 12 if rank == 1 else 20)


def with_distributed_sampler(rank, size):
    data = training.vectors(20)
    sampler = DistributedSampler(data, num_replicas=size, rank=rank)
    loader = DataLoader(data, batch_size=BATCH, sampler=sampler)
    return training.train(rank, size, target_batch=25, micro_batch=5, shard_data=True, val_loader=loader)


def with_replacement(rank, size):
    """Evaluate what a sampler draws, another time for each epoch; return the samples that were loaded here."""
    seen = Seen(training.vectors(20))
    loader = DataLoader(seen, batch_size=2, sampler=RandomSampler(seen, replacement=True, num_samples=10))
    training.train(rank, size, target_batch=25, micro_batch=5, shard_data=True, val_loader=loader)
    return seen.loaded


class Masked(nn.Module):
    """Returns its own mean over the samples that a mask keeps, and runs out of memory for more than a few."""

    def __init__(self, least, most):
        super().__init__()
        self.inner, self.least, self.most = training.net(), least, most

    def forward(self, inputs, mask):
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("told to")
        return {"loss": (self.inner(inputs).square().mean(1) * mask).sum() / mask.sum().clamp(min=self.least)}


def masked(rank, size, masks, most, *, least):
    """Train on a window of what each rank's mask keeps; return the evaluation of all, and what it has to be."""
    model, inputs = Masked(least, most[rank]), torch.stack([one for one, _ in training.vectors(8 * size)])
    data = [
        {"inputs": one, "mask": torch.tensor(kept, dtype=torch.float64)}
        for one, kept in zip(inputs.split(8), masks, strict=True)
    ]
    found = training.train(
        rank,
        size,
        model=model,
        loss=None,
        make_loader=lambda rank, *_: data[rank : rank + 1],
        target_batch=8 * size,
        val_loader=data[rank : rank + 1],
    )
    model.most = 8 * size
    exact = model(inputs, torch.cat([one["mask"] for one in data]))["loss"]
    return found["evaluations"][-1][0], exact.item()


class Wide(nn.Module):
    """Takes much memory where it evaluates, and next to nothing in training."""

    def __init__(self):
        super().__init__()
        self.inner = training.net()

    def forward(self, inputs):
        if not self.training:
            inputs = inputs + 0 * inputs.repeat(1, 500).exp().sum(1, keepdim=True)
        return self.inner(inputs)


class Events(autoaccum.Callback):
    def __init__(self):
        self.sizes = []

    def on_oom(self, event, *, step):
        if event.phase == "evaluate":
            self.sizes.append(event.size)


def on_simulated(rank, size, sizes, **arguments):
    events = Events()
    found = training.train(
        rank,
        size,
        model=Wide(),
        target_batch=25,
        micro_batch=5,
        device=autoaccum.Simulated(sizes[rank]),
        memory_limit=None,
        shard_data=True,
        val_loader=DataLoader(training.vectors(40), batch_size=10),
        metrics=functional.cross_entropy,
        callbacks=[events],
        **arguments,
    )
    return {**found, "sizes": events.sizes}


# --- metrics that count for themselves --------------------------------------------------------------------------------


class OfFirst(PearsonCorrCoef):
    """Of the first output and the class: its states are no sums."""

    def update(self, outputs, targets):
        super().update(outputs[:, 0], targets.double())


class Hits:
    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.all = 0

    def update(self, outputs, targets):
        self.right += int((outputs.argmax(1) == targets).sum())
        self.all += len(targets)

    def compute(self):
        return self.right / self.all


class MergedHits(Hits):
    """Counts in Python, and takes in what others have counted."""

    def merge_state(self, others):
        for other in others:
            self.right += other.right
            self.all += other.all


class Averaging(Metric):
    """Keeps a mean of its own, as if ranks had the same number of samples."""

    def __init__(self):
        super().__init__()
        self.add_state("mean", torch.zeros(()), dist_reduce_fx="mean")

    def update(self, outputs, targets):
        self.mean = outputs.mean()

    def compute(self):
        return self.mean


def collection():
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(training.CLASSES),
            "precision": MulticlassPrecision(training.CLASSES),
            "auroc": MulticlassAUROC(training.CLASSES),
        }
    )


METRICS = {
    "collection": collection,
    "wrapped": lambda: ClasswiseWrapper(MulticlassAccuracy(training.CLASSES, average=None)),
    "extremes": lambda: MinMaxMetric(MulticlassAccuracy(training.CLASSES, average="micro")),
    "lists": lambda: MulticlassAUROC(training.CLASSES),
    "no sums": OfFirst,
    "not synchronized": lambda: MulticlassAccuracy(training.CLASSES, sync_on_compute=False),
    "merged": MergedHits,
    "own": Hits,
    "averaging": Averaging,
}
REFUSED = {"own", "averaging"}


def counted(rank, size, kind, batch_size, **arguments):
    return training.train(
        rank,
        size,
        model=training.net(),
        target_batch=25,
        micro_batch=5,
        epochs=2,
        shard_data=True,
        val_loader=DataLoader(training.vectors(20), batch_size=batch_size),
        metrics={"it": METRICS[kind]()},
        **arguments,
    )
