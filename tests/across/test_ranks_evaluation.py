"""Evaluation on several ranks: each its part, and together what one process finds over the whole loader."""

import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, RandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import ClasswiseWrapper, Metric, MetricCollection, MinMaxMetric, PearsonCorrCoef
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassPrecision

import autoaccum
from support.models.small import a_few_of
from support.ranks import expect, training
from support.ranks.rows import THREE, Place, Row, a_few_rows, table
from support.ranks.training import CLASSES, Seen, net, texts, vectors

BATCH = 3
WINDOWS = {"target_batch": 25, "micro_batch": 5}

# --- loaders ----------------------------------------------------------------------------------------------------------


def loaded(samples, **options):
    return DataLoader(samples, **{"batch_size": BATCH} | options)


LOADERS = {
    "in order": lambda samples, rank: loaded(samples),
    "dropping": lambda samples, rank: loaded(samples, drop_last=True),
    "in one": lambda samples, rank: loaded(samples, batch_size=len(samples)),
    "shuffled": lambda samples, rank: loaded(samples, shuffle=True, generator=torch.Generator().manual_seed(rank)),
    "shuffled by all": lambda samples, rank: loaded(samples, shuffle=True),
    "with workers": lambda samples, rank: loaded(samples, shuffle=True, num_workers=1),
}
# The same batches in every process, none of which is cut.
ALIKE = ("in order", "dropping")


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

    return OfTokens(CLASSES, average="micro", ignore_index=-100)


def evaluated(kind, *, samples=lambda rank: 20, **given):
    """Train and evaluate; tell which samples were loaded for that."""

    def arguments(rank, size):
        seen = Seen(texts(samples(rank), seed=5))
        metrics = {"mean": training.mean_size, "accuracy": accuracy, "torchmetrics": flat_accuracy()}
        metrics |= {"of batch": accuracy_of_batch} if kind in ALIKE else {}
        options = {"loss": "tokens, found out", "epochs": 2, "val_loader": LOADERS[kind](seen, rank)}
        return WINDOWS | options | {"metrics": metrics, "told": seen.loaded, "seed": 0} | given

    return arguments


def of_loader(kind, size):
    def counts(found):
        assert found[0]["evaluations"][0]["samples"] == (18 if kind == "dropping" else 20)

    claim = f"a loader ({kind}) of everything on every of {size} ranks is counted once"
    return Row(claim, evaluated(kind), (Place(size),), expect.as_alone(also=counts))


def each_once(found):
    assert sorted(itertools.chain.from_iterable(one["told"] for one in found)) == list(range(20))
    assert [len(one["told"]) for one in found] == [8, 6, 6]


def drawn(rank, size):
    """What a sampler draws, another time for each epoch."""
    seen = Seen(vectors(20))
    loader = DataLoader(seen, batch_size=2, sampler=RandomSampler(seen, replacement=True, num_samples=10))
    return WINDOWS | {"val_loader": loader, "told": seen.loaded}


def drawn_once(found):
    assert [len(one["told"]) for one in found] == [6, 4]


def all_by_each(found):
    assert found[0]["evaluations"][0]["samples"] == 40


def distributed(rank, size):
    data = vectors(20)
    loader = DataLoader(data, batch_size=BATCH, sampler=DistributedSampler(data, num_replicas=size, rank=rank))
    return WINDOWS | {"val_loader": loader}


OF_LOADERS = [
    *a_few_rows(of_loader, LOADERS, [2, 3]),
    *(
        Row(f"each sample is loaded by one rank, {kind}", evaluated(kind, epochs=1), (THREE,),
            expect.outcomes(each_once))
        for kind in ("in order", "shuffled", "shuffled by all")
    ),
    Row("what a sampler draws is drawn once for all", drawn, holds=expect.outcomes(drawn_once)),
    Row(
        "every rank evaluates its own loader where nothing is shared out", evaluated("in order", shard_data=False),
        holds=expect.outcomes(all_by_each),
    ),
    Row(
        "loaders of other lengths are refused where each is to have everything",
        evaluated("in order", samples=lambda rank: 12 if rank == 1 else 20), (THREE,),
        expect.refused("the val_loader of rank 1 has "),
    ),
    Row(
        "a loader that is shared out already is refused", distributed,
        holds=expect.refused("every rank's val_loader, but this one's DistributedSampler already does"),
    ),
]  # fmt: skip


# --- memory -----------------------------------------------------------------------------------------------------------


class Wide(nn.Module):
    """Takes much memory where it evaluates, and next to nothing in training."""

    def __init__(self):
        super().__init__()
        self.inner = net()

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


def on_rank_1(size_of_memory):
    def arguments(rank, size):
        events, memory = Events(), autoaccum.Simulated(size_of_memory if rank == 1 else "1MiB")
        given = {"model": Wide(), "device": memory, "memory_limit": None, "callbacks": [events], "told": events.sizes}
        loader = DataLoader(vectors(40), batch_size=10)
        return WINDOWS | given | {"val_loader": loader, "metrics": functional.cross_entropy}

    return arguments


def only_rank_1_cuts(found):
    assert [bool(one["told"]) for one in found] == [False, True]


OF_MEMORY = [
    Row(
        "a rank without memory for a batch takes its part in smaller cuts", on_rank_1("200KiB"),
        holds=expect.as_alone(also=only_rank_1_cuts),
    ),
    Row(
        "a rank on which not one sample can be evaluated ends all", on_rank_1("20KiB"),
        holds=expect.ends_on(1, autoaccum.DoesNotFitError, text=""),
    ),
]  # fmt: skip


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
            "accuracy": MulticlassAccuracy(CLASSES),
            "precision": MulticlassPrecision(CLASSES),
            "auroc": MulticlassAUROC(CLASSES),
        }
    )


METRICS = {
    "collection": collection,
    "wrapped": lambda: ClasswiseWrapper(MulticlassAccuracy(CLASSES, average=None)),
    "extremes": lambda: MinMaxMetric(MulticlassAccuracy(CLASSES, average="micro")),
    "lists": lambda: MulticlassAUROC(CLASSES),
    "no sums": OfFirst,
    "not synchronized": lambda: MulticlassAccuracy(CLASSES, sync_on_compute=False),
    "merged": MergedHits,
}
REFUSED = {"a Hits, keeps a count of its own": Hits, "averages its state 'mean'": Averaging}


def counted(metric, batch_size=BATCH):
    def arguments(rank, size):
        loader = DataLoader(vectors(20), batch_size=batch_size)
        return WINDOWS | {"epochs": 2, "val_loader": loader, "metrics": {"it": metric()}}

    return arguments


OF_METRICS = [
    *a_few_rows(
        lambda kind, batch_size: Row(
            f"a metric with a count of its own ({kind}) is that of all samples, {batch_size} at once",
            counted(METRICS[kind], batch_size), (THREE,),
        ),
        METRICS, [3, 20],  # with 20 all but one rank have no samples
    ),
    *(
        Row(f"a metric is refused before training: it {why}", counted(metric), holds=expect.refused("metric 'it'", why))
        for why, metric in REFUSED.items()
    ),
]  # fmt: skip

ROWS = table(__file__, *OF_LOADERS, *OF_MEMORY, *OF_METRICS)


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)


# --- what ranks with less could not see of a loss ---------------------------------------------------------------------


class Masked(nn.Module):
    """Returns its own mean over the samples that a mask keeps, and runs out of memory for more than a few."""

    def __init__(self, least, most):
        super().__init__()
        self.inner, self.least, self.most = net(), least, most

    def forward(self, inputs, mask):
        if len(inputs) > self.most:
            raise torch.OutOfMemoryError("told to")
        return {"loss": (self.inner(inputs).square().mean(1) * mask).sum() / mask.sum().clamp(min=self.least)}


def masked(rank, size, masks, most, *, least):
    """Train on a window of what each rank's mask keeps; return the evaluation of all, and what it has to be."""
    model, inputs = Masked(least, most[rank]), torch.stack([one for one, _ in vectors(8 * size)])
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
    return found["evaluations"][-1]["loss"], exact.item()


MASKS = {
    "nothing on the first": [[0] * 8, [1, 0, 0, 1, 1, 0, 0, 1]],
    "nothing on the second": [[1, 1, 0, 1, 0, 0, 1, 1], [0] * 8],
    "one on the first": [[0, 0, 0, 0, 0, 0, 0, 1], [0, 1, 1, 1, 1, 0, 1, 0]],
}


@pytest.mark.filterwarnings("ignore:autoaccum")
@pytest.mark.parametrize(("most", "masks", "least"), a_few_of([(2, 2), (1, 2), (8, 3)], MASKS, [0, 1]))
def test_what_ranks_with_less_could_not_see_of_a_loss_is_taken_from_others(rank_pool, most, masks, least):
    for found, exact in rank_pool.run("across.test_ranks_evaluation:masked", MASKS[masks], most, least=least, size=2):
        assert found == pytest.approx(exact, rel=1e-9)
