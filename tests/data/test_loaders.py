"""A DataLoader that collates what the split would collate is refused; one whose batches count otherwise is told of."""

from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, default_collate

import autoaccum
from autoaccum._data.loaders import check_loader, unlike_batch_size
from autoaccum._data.splits import piece_of
from autoaccum.errors import InvalidInputError

SAMPLES = [(torch.zeros(4), 0) for _ in range(12)]


def collate(samples):
    return default_collate(samples)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(SAMPLES)


@pytest.mark.parametrize("given", [{}, {"collate_fn": collate}], ids=["default", "twice"])
def test_loader_that_collates_already_is_refused_everywhere(given):
    split, loader = autoaccum.ListOfSamples(collate), DataLoader(SAMPLES, batch_size=4, **given)
    model = torch.nn.Linear(4, 2)
    runner = autoaccum.Runner(model, None, autoaccum.plan(4, 4), split=split)
    calls = {
        "loader": partial(autoaccum.fit, model, loader, 4, split=split),
        "val_loader": partial(autoaccum.fit, model, [SAMPLES], 4, val_loader=loader, split=split),
        "loader collates": partial(autoaccum.windows, loader, 4, split=split),
        "but loader": partial(autoaccum.preflight, model, SAMPLES, 4, loader=loader, split=split),
        "loader collates them": partial(runner.evaluate, loader),
    }
    for named, call in calls.items():
        with pytest.raises(
            InvalidInputError, match=rf"{named}.* already, with (default_)?collate; pass collate_fn=list"
        ):
            call()
    for fine in (DataLoader(SAMPLES, batch_size=4, collate_fn=list), DataLoader([SAMPLES], batch_size=None), [SAMPLES]):
        check_loader("loader", fine, split)


def told(loader, split=None):
    return unlike_batch_size(loader, piece_of(next(iter(loader)), split), split)


def test_flattened_rows_and_time_first_batches_are_told_of():
    flattened = DataLoader(
        SAMPLES, batch_size=4, collate_fn=lambda some: {"ids": torch.cat([x for x, _ in some])[None]}
    )
    time_first = DataLoader(SAMPLES, batch_size=3, collate_fn=lambda some: torch.stack([x for x, _ in some], 1))

    assert told(flattened).startswith(
        "the loader makes batches of 4 (batch_size), and its first one counts as 1 sample by"
    )
    assert "split=" in told(flattened)
    assert "batches of 3 (batch_size), and its first one counts as 4 samples" in told(time_first)
    assert told(time_first, autoaccum.Along(1)) is None


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(SAMPLES, batch_size=5),
        DataLoader(SAMPLES, batch_size=100),  # its only batch is shorter
        DataLoader(Stream(), batch_size=100),
        DataLoader(SAMPLES, batch_size=100, sampler=torch.utils.data.SubsetRandomSampler([1, 2])),
        DataLoader(SAMPLES, batch_sampler=[[0, 1], [2]]),
        DataLoader(TensorDataset(torch.zeros(3, 2, 4)), batch_size=None),
        [torch.zeros(3, 4)],
    ],
)
def test_ordinary_loaders_are_not_told_of(loader):
    assert told(loader) is None


def test_fit_tells_it_once(capsys):
    loader = DataLoader(torch.randn(12, 4), batch_size=6, collate_fn=lambda rows: torch.stack(rows)[None])

    class Model(torch.nn.Linear):
        def forward(self, rows):
            return super().forward(rows).square().mean()

    autoaccum.fit(Model(4, 2), loader, 2, epochs=2, device="cpu")

    assert capsys.readouterr().err.count("the loader makes batches of 6 (batch_size)") == 1
