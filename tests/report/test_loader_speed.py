import random
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from autoaccum._report.loader_speed import first_batches, listen_to, samples_of

DATA = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))


class Slow:
    """A loader whose batches take their time."""

    def __init__(self, batches, seconds):
        self.batches, self.seconds = batches, seconds

    def __iter__(self):
        for _ in range(self.batches):
            time.sleep(self.seconds)
            yield torch.zeros(4, 2), torch.zeros(4)


def test_the_speed_is_that_of_its_batches():
    heard = listen_to(Slow(100, 0.1), for_s=1.0)

    assert 10 < heard.samples_per_s <= 40
    assert heard.first_batch_s >= 0.1
    assert heard.samples == 4 * heard.batches


def test_it_is_given_up_when_the_time_is_over():
    started = time.perf_counter()

    listen_to(Slow(1000, 0.02), for_s=0.1)

    assert time.perf_counter() - started < 5


def test_a_loader_of_one_batch_has_no_speed():
    assert listen_to([(torch.zeros(4), torch.zeros(4))]).samples_per_s is None


@pytest.mark.parametrize("loader", [[], iter([torch.zeros(2)]), (torch.zeros(2) for _ in range(3))])
def test_nothing_is_heard_of_loaders_that_are_empty_or_would_lose_their_batches(loader):
    assert listen_to(loader) is None


def test_a_generator_keeps_its_first_batch():
    loader = (torch.full((1,), float(n)) for n in range(3))

    listen_to(loader)

    assert next(loader).item() == 0.0


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

    heard = listen_to(loader)

    assert states(generator) == before
    assert heard.batches == 5


def test_an_epoch_after_it_is_the_one_that_would_have_come():
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    torch.manual_seed(1)
    expected = [targets.tolist() for _, targets in loader]
    torch.manual_seed(1)

    listen_to(loader)

    assert [targets.tolist() for _, targets in loader] == expected


def test_workers_that_stand_between_epochs_stay():
    loader = DataLoader(DATA, batch_size=4, num_workers=1, persistent_workers=True)
    list(loader)
    standing = loader._iterator

    heard = listen_to(loader)

    assert loader._iterator is standing
    assert heard.workers == 1
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
        (Slow(3, 0.0), None),
    ],
)
def test_an_epochs_samples_are_told_where_the_loader_says(loader, samples):
    assert samples_of(loader, 6) == samples


def test_the_first_batch_can_be_had_without_a_trace():
    loader = DataLoader(DATA, batch_size=4, shuffle=True)
    before = torch.get_rng_state()

    (first,) = first_batches(loader, 1)

    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first[0], next(iter(loader))[0])


@pytest.mark.parametrize("loader", [iter([1, 2]), []])
def test_what_can_be_had_once_or_never_gives_no_first_batch(loader):
    assert first_batches(loader, 1) == []
