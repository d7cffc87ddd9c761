"""Trainings of ranks whose loaders should be the same and are not, for tests of several ranks."""

import random

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from support.ranks import faults, training

# On rank 1 and on the others.
LENGTHS = (40, 70)


class Stream(IterableDataset):
    def __init__(self, samples):
        self.samples = samples

    def __iter__(self):
        return iter(self.samples)


class OwnOrder(Sampler):
    """Draws from a generator of which nobody knows."""

    def __init__(self, samples, seed):
        self.chance, self.size = random.Random(seed), len(samples)  # noqa: S311 - a test

    def __iter__(self):
        return iter(self.chance.sample(range(self.size), self.size))

    def __len__(self):
        return self.size


def by_indices(samples, rank):
    return DataLoader(samples, batch_size=7, shuffle=True)


def a_list(samples, rank):
    return list(DataLoader(samples, batch_size=7))


def stream(samples, rank):
    return DataLoader(Stream(samples), batch_size=7)


def own_order(samples, rank):
    return DataLoader(samples, batch_size=7, sampler=OwnOrder(samples, rank))


LOADERS = {made.__name__: made for made in (by_indices, a_list, stream, own_order)}


def loader_of(kind, rank, lengths=LENGTHS):
    return LOADERS[kind](training.vectors(lengths[0] if rank == 1 else lengths[1]), rank)


def train(rank, size, kind, lengths=LENGTHS, *, drop_last=False):
    torch.manual_seed(0)
    arguments = {"target_batch": 25, "micro_batch": 5, "shard_data": True, "drop_last": drop_last}

    def make_loader(rank, size, samples):
        return loader_of(kind, rank, lengths)

    return training.heard(rank, size, model=training.net(), make_loader=make_loader, data=[], **arguments)


def loaded(rank, size, kind):
    samples = faults.Seen(training.vectors(50))
    model = training.net()
    training.train(
        rank, size, model=model, make_loader=lambda *_: LOADERS[kind](samples, rank), target_batch=25, shard_data=True
    )
    return samples.loaded


def divided(rank, size, name):
    """Train where a sampler says by an attribute that it gives each rank its own samples, or gives them unsaid."""
    samples = training.vectors(50 if name else 100)
    if name is None:
        sampler = range(rank, len(samples), size)
    else:
        sampler = OwnOrder(samples, 0)
        setattr(sampler, name, size)
    loader = DataLoader(samples, batch_size=7, sampler=sampler)
    return training.train(rank, size, make_loader=lambda *_: loader, target_batch=25, shard_data=True)


def evaluate(rank, size, kind, lengths=LENGTHS):
    return training.train(
        rank,
        size,
        model=training.net(),
        target_batch=25,
        micro_batch=5,
        shard_data=True,
        val_loader=loader_of(kind, rank, lengths),
    )


def as_mapping(samples):
    inputs, targets = default_collate(samples)
    return {"inputs": inputs, "targets": targets}


def as_triples(samples):
    return [*default_collate(samples), torch.zeros(len(samples))]


def wider(samples):
    inputs, targets = default_collate(samples)
    return [torch.cat([inputs, inputs], 1), targets]


STRUCTURES = {made.__name__: made for made in (as_mapping, as_triples, wider)}


def unlike(rank, size, kind):
    """Train where rank 1 has batches of another structure than the others."""
    collate = STRUCTURES[kind] if rank == 1 else default_collate
    samples = training.vectors(24)
    return training.train(
        rank,
        size,
        make_loader=lambda *_: DataLoader(samples[12 * rank :][:12], batch_size=4, collate_fn=collate),
        target_batch=8,
        micro_batch=2,
    )


def resume(rank, size, folder, lengths):
    """Train half an epoch, and go on with data of another length."""
    for samples, steps in zip(lengths, (1, 2), strict=True):
        torch.manual_seed(0)
        training.train(
            rank,
            size,
            model=training.net(),
            data=training.vectors(samples),
            target_batch=25,
            micro_batch=5,
            max_steps=steps,
            shard_data=True,
            checkpoint=folder,
        )
