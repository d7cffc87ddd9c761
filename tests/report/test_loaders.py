import random
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

import autoaccum
from autoaccum._report import loaders
from autoaccum._report.loaders import first_batches, samples_of

DATA = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))


def test_it_is_given_up_when_the_time_is_over(monkeypatch):
    monkeypatch.setattr(loaders, "_LONGEST_S", 0.1)

    def batches():
        for _ in range(1000):
            time.sleep(0.02)
            yield torch.zeros(4)

    class Slow:
        def __iter__(self):
            return batches()

    assert 1 <= len(first_batches(Slow(), 1000)) < 500


@pytest.mark.parametrize("loader", [[], iter([torch.zeros(2)]), (torch.zeros(2) for _ in range(3))])
def test_loaders_that_are_empty_or_would_lose_their_batches_give_none(loader):
    assert first_batches(loader, 1) == []


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
def test_a_loader_that_has_a_place_to_resume_from_keeps_it():
    first, resumed = (StatefulDataLoader(DATA, batch_size=4) for _ in range(2))
    batches = iter(first)
    next(batches)
    resumed.load_state_dict(first.state_dict())

    autoaccum.preflight(
        nn.Linear(2, 20), next(iter(DataLoader(DATA, 4))), 20, loss=nn.CrossEntropyLoss(), device="cpu", loader=resumed
    )

    assert torch.equal(next(iter(resumed))[0], next(batches)[0])


def states(generator):
    return [
        torch.get_rng_state().tolist(),
        random.getstate(),
        np.random.get_state()[1].tolist(),  # noqa: NPY002 - the user's global generator
        generator.get_state().tolist(),
    ]


@pytest.mark.parametrize("own", [True, False])
def test_every_random_state_is_left_as_it_was(own):
    generator = torch.Generator().manual_seed(3)
    loader = DataLoader(DATA, batch_size=4, shuffle=True, generator=generator if own else None)
    before = states(generator)

    drawn = first_batches(loader, 8)

    assert states(generator) == before
    assert len(drawn) == 5
    assert torch.equal(drawn[0][0], next(iter(loader))[0])


def test_workers_that_stand_between_epochs_stay():
    loader = DataLoader(DATA, batch_size=4, num_workers=1, persistent_workers=True)
    list(loader)
    standing = loader._iterator

    first_batches(loader, 2)

    assert loader._iterator is standing
    assert len(list(loader)) == 5


class Endless(IterableDataset):
    def __iter__(self):
        while True:
            yield torch.zeros(2)


@pytest.mark.parametrize(
    ("loader", "samples"),
    [
        (DataLoader(DATA, batch_size=6), 20),
        (DataLoader(DATA, batch_size=6, drop_last=True), 18),
        ([torch.zeros(6)] * 3, 18),
        (DataLoader(Endless(), batch_size=6), None),
        (object(), None),
    ],
)
def test_an_epochs_samples_are_told_where_the_loader_says(loader, samples):
    assert samples_of(loader, 6) == samples
