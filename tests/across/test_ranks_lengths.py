"""Ranks that are to have the same data, and have not, are told before a sample is used twice."""

import random

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

import autoaccum
from support.ranks import expect
from support.ranks.rows import Row, table
from support.ranks.training import Seen, vectors

WINDOWS = {"target_batch": 25, "micro_batch": 5}


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


LOADERS = {
    "indices": lambda samples, rank: DataLoader(samples, batch_size=7, shuffle=True),
    "list": lambda samples, rank: list(DataLoader(samples, batch_size=7)),
    "stream": lambda samples, rank: DataLoader(Stream(samples), batch_size=7),
    "own order": lambda samples, rank: DataLoader(samples, batch_size=7, sampler=OwnOrder(samples, rank)),
}


def trains(kind, of_rank_1=40):
    def arguments(rank, size):
        loader = LOADERS[kind](vectors(of_rank_1 if rank == 1 else 40), rank)
        return WINDOWS | {"make_loader": lambda *_: loader, "seed": -rank}

    return arguments


def evaluates(kind):
    return lambda rank, _: WINDOWS | {"val_loader": LOADERS[kind](vectors(40), rank)}


def seen(rank, size):
    samples = Seen(vectors(50))
    loader = LOADERS["own order"](samples, rank)
    return WINDOWS | {"make_loader": lambda *_: loader, "told": samples.loaded}


def each_once(found):
    assert sorted(found[0]["told"] + found[1]["told"]) == list(range(50))


def divided(name):
    """A sampler that says by an attribute that it gives each rank its own samples."""

    def arguments(rank, size):
        sampler = OwnOrder(vectors(50), 0)
        setattr(sampler, name, size)
        return WINDOWS | {"make_loader": lambda *_: DataLoader(vectors(50), batch_size=7, sampler=sampler)}

    return arguments


def divided_unsaid(rank, size):
    loader = DataLoader(vectors(100), batch_size=7, sampler=range(rank, 100, size))
    return WINDOWS | {"make_loader": lambda *_: loader}


def as_mapping(samples):
    inputs, targets = default_collate(samples)
    return {"inputs": inputs, "targets": targets}


def as_triples(samples):
    return [*default_collate(samples), torch.zeros(len(samples))]


def wider(samples):
    inputs, targets = default_collate(samples)
    return [torch.cat([inputs, inputs], 1), targets]


def unlike(collate):
    """Batches of another structure on rank 1."""

    def arguments(rank, size):
        options = {"batch_size": 4, "collate_fn": collate if rank == 1 else default_collate}
        loader = DataLoader(vectors(24)[12 * rank :][:12], **options)
        return {"make_loader": lambda *_: loader, "target_batch": 8, "micro_batch": 2, "shard_data": False}

    return arguments


def goes_on_with_other_data(run):
    run(max_steps=1, data=vectors(60), checkpoint=run.folder)
    for answer in run.answers(max_steps=2, data=vectors(75), checkpoint=run.folder):
        assert isinstance(answer, autoaccum.CheckpointError), answer
        assert "in the middle of an epoch with a loader of 9 batches per epoch, and this one has 11" in str(answer)


ROWS = table(
    __file__,
    Row("data of another length are refused at the start", trains("indices", of_rank_1=70),
        holds=expect.refused("the loader of rank 1 has ", "and that of rank 0 ", "with shard_data=True")),
    *(
        Row(f"a {kind} is refused where each rank is to take its part and {gives.__name__}", gives(kind),
            holds=expect.refused("shard_data=True takes a torch DataLoader over a dataset with indices",
                                 "leave shard_data out"))
        for kind in ("list", "stream") for gives in (trains, evaluates)
    ),
    Row("the order of rank 0 is that of all, where every rank has its own", seen, holds=expect.outcomes(each_once)),
    *(
        Row(f"a sampler that has divided the data is refused, by its {name}", divided(name),
            holds=expect.refused("shard_data=True splits the samples of every rank's loader, but this one's OwnOrder "
                                 "already does"))
        for name in ("num_replicas", "_world_size")
    ),
    Row("a sampler that has divided the data unsaid is refused by what it gives", divided_unsaid,
        holds=expect.ends((autoaccum.RankFailedError,), (
            autoaccum.InvalidInputError, "the sampler gives rank 1 no sample that rank 0 has, so it already does"))),
    Row("data of another length are no data to go on with", WINDOWS, holds=goes_on_with_other_data),
    *(
        Row(f"batches of another structure on one rank end all with its error, {collate.__name__}", unlike(collate),
            holds=expect.ends_on(1, RuntimeError if collate is wider else autoaccum.InvalidInputError, text=""))
        for collate in (as_mapping, as_triples, wider)
    ),
)  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_ranks(rank_pool, row, tmp_path):
    row.check(rank_pool, tmp_path)
