"""A run that goes on with other processes: the same samples in the same order, or an error that says why."""

import math

import numpy as np
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

import autoaccum
from support.ranks import expect
from support.ranks.rows import Row, a_few_rows, table
from support.ranks.training import FAR, net, own_loader, vectors

BATCH = 5
# Windows of the first epoch, and of both: 50 samples in windows of 16.
EPOCH, ALL = 4, 8


class OfNumPy:
    def __init__(self, samples):
        self.samples, self.rng = samples, np.random.default_rng(7)

    def __len__(self):
        return math.ceil(self.samples / BATCH)

    def __iter__(self):
        order = self.rng.permutation(self.samples).tolist()
        return iter([order[start : start + BATCH] for start in range(0, self.samples, BATCH)])


def in_batches(samples, **options):
    return DataLoader(samples, batch_size=BATCH, **options)


def seeded(seed):
    return torch.Generator().manual_seed(seed)


def weighted(samples):
    sampler = WeightedRandomSampler(torch.arange(1.0, len(samples) + 1), len(samples))
    return DataLoader(samples, batch_sampler=BatchSampler(sampler, BATCH, drop_last=True))


def two_generators(samples):
    return in_batches(samples, sampler=RandomSampler(samples, generator=seeded(5)), generator=seeded(6))


LOADERS = {
    "in order": in_batches,
    "shuffled": lambda samples: in_batches(samples, shuffle=True),
    "own generator": lambda samples: in_batches(samples, shuffle=True, generator=seeded(7)),
    "workers": lambda samples: in_batches(samples, shuffle=True, num_workers=2),
    "weighted": weighted,
    "two generators": two_generators,
    "of NumPy": lambda samples: DataLoader(samples, batch_sampler=OfNumPy(len(samples))),
}


def loaded(kind, *, dropout=0.0, **given):
    def arguments(rank, size):
        options = {"make_loader": lambda *_: LOADERS[kind](vectors()), "model": net(dropout=dropout), "seed": 4}
        return options | {"micro_batch": 4, "epochs": 2} | given

    return arguments


# --- what goes on -----------------------------------------------------------------------------------------------------


def after_an_epoch(sizes, kind):
    before, after = sizes
    holds = expect.goes_on({"epochs": 1}, sizes=sizes, undisturbed="one process", rounding=FAR, kept=EPOCH)
    return Row(f"a run of {before} goes on with {after} after an epoch, {kind}", loaded(kind), holds=holds)


def one_without_samples(rank, size):
    given = {"data": vectors(12), "make_loader": own_loader([12, 0]), "shard_data": False}
    return given | {"target_batch": 8, "micro_batch": 2}


GOES_ON = [
    *(Row(f"the order of several ranks is that of one process, {kind}", loaded(kind)) for kind in LOADERS),
    *a_few_rows(after_an_epoch, [(1, 2), (2, 1), (2, 3)], ["in order", "own generator", "of NumPy"]),
    Row("a run goes on within an epoch in which one rank has no samples", one_without_samples,
        holds=expect.goes_on({"max_steps": 1}, kept=1)),
    Row("a run between epochs goes on with the generators of its loader", loaded("own generator"),
        holds=expect.goes_on({"epochs": 1}, rounding=FAR, kept=EPOCH)),
    *(
        Row(f"a run within a later epoch goes on with the generator of its sampler, shard_data={shard_data}",
            loaded("of NumPy", shard_data=shard_data, max_steps=stop + 2),
            holds=expect.goes_on({"max_steps": stop}, kept=stop))
        for shard_data, stop in [(True, EPOCH + 2), (False, 2 * EPOCH + 1)]
    ),
    Row("the random state of ranks goes on where the loader draws from it too", loaded("shuffled", dropout=0.3),
        holds=expect.goes_on({"max_steps": 2}, kept=2)),
]  # fmt: skip


# --- what is refused --------------------------------------------------------------------------------------------------


def refused(before, after, *texts):
    """A run of (size, shard_data) cannot go on within an epoch as another."""

    def holds(run):
        run(size=before[0], shard_data=before[1], max_steps=1, checkpoint=run.folder)
        changes = {"size": after[0], "shard_data": after[1], "checkpoint": run.folder}
        for answer in run.answers(**changes):
            assert isinstance(answer, autoaccum.CheckpointError), answer
            assert all(text in str(answer) for text in texts), answer

    return holds


SHARED, OWN = "processes (shard_data=True)", "processes with loaders of their own (shard_data=False)"
REFUSED = [
    Row(f"of {before}, within an epoch, to {after} says what to do", loaded("in order"),
        holds=refused(before, after, *says, "until an epoch ends, or pass resume=False"))
    for before, after, says in [
        ((1, True), (2, True), ["by one process in the middle", f"to 2 {SHARED}"]),
        ((2, True), (1, True), [f"by 2 {SHARED} in the middle", "to one process"]),
        ((1, True), (2, False), ["by one process in the middle", f"to 2 {OWN}"]),
        ((2, True), (3, True), [f"by 2 {SHARED} in the middle", f"to 3 {SHARED}"]),
        ((2, True), (2, False), [f"by 2 {SHARED} in the middle", f"to 2 {OWN}"]),
        ((2, False), (1, True), [f"by 2 {OWN} in the middle", "to one process"]),
        ((2, False), (3, False), [f"by 2 {OWN} in the middle", f"to 3 {OWN}"]),
    ]
]  # fmt: skip


def other_loader(run):
    run(max_steps=1, checkpoint=run.folder)
    for answer in run.answers(checkpoint=run.folder, make_loader=own_generator):
        assert isinstance(answer, autoaccum.CheckpointError), answer
        assert "a loader that has 0 random generators of its own, and this one has 1" in str(answer)


def own_generator(rank, size, samples):
    return LOADERS["own generator"](vectors())


ROWS = table(__file__, *GOES_ON, *REFUSED, Row("another loader is refused", loaded("in order"), holds=other_loader))


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)
