"""Trainings that go on with another number of processes; alone where `size` is 1."""

import math

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, WeightedRandomSampler

from support.ranks import training
from support.ranks.faults import Seen

TARGET, BATCH = 16, 5


def in_order(samples):
    return DataLoader(samples, batch_size=BATCH)


def shuffled(samples):
    return DataLoader(samples, batch_size=BATCH, shuffle=True)


def own_generator(samples):
    return DataLoader(samples, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(7))


def workers(samples):
    return DataLoader(samples, batch_size=BATCH, shuffle=True, num_workers=2)


def weighted(samples):
    sampler = WeightedRandomSampler(torch.arange(1.0, len(samples) + 1), len(samples))
    return DataLoader(samples, batch_sampler=BatchSampler(sampler, BATCH, drop_last=True))


def two_generators(samples):
    sampler = RandomSampler(samples, generator=torch.Generator().manual_seed(5))
    return DataLoader(samples, batch_size=BATCH, sampler=sampler, generator=torch.Generator().manual_seed(6))


class OfNumPy:
    def __init__(self, samples):
        self.samples, self.rng = samples, np.random.default_rng(7)

    def __len__(self):
        return math.ceil(self.samples / BATCH)

    def __iter__(self):
        order = self.rng.permutation(self.samples).tolist()
        return iter([order[start : start + BATCH] for start in range(0, self.samples, BATCH)])


def of_numpy(samples):
    return DataLoader(samples, batch_sampler=OfNumPy(len(samples)))


MADE = (in_order, shuffled, own_generator, workers, weighted, two_generators, of_numpy)
LOADERS = {made.__name__: made for made in MADE}


def train(
    rank,
    size,
    folder,
    *,
    kind,
    steps,
    shard_data=True,
    samples=training.SAMPLES,
    epochs=2,
    dropout=0.0,
    **arguments,
):
    seen = Seen(training.vectors(samples))
    model = training.net(dropout=dropout)
    torch.manual_seed(4 + rank)
    found = training.train(
        rank,
        size,
        model=model,
        make_loader=lambda *_: LOADERS[kind](seen),
        target_batch=TARGET,
        micro_batch=4,
        epochs=epochs,
        shard_data=shard_data,
        checkpoint=folder,
        max_steps=steps,
        **arguments,
    )
    return {**found, "loaded": seen.loaded}
