"""A DataLoader that collates what the split would collate is refused; one whose batches count otherwise is told of."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

import autoaccum
from autoaccum._data.loaders import check_loader
from autoaccum.errors import InvalidInputError

SAMPLES = [(torch.zeros(4), 0) for _ in range(12)]


def collate(samples):
    return default_collate(samples)


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


def test_fit_tells_it_once(capsys):
    loader = DataLoader(torch.randn(12, 4), batch_size=6, collate_fn=lambda rows: torch.stack(rows)[None])

    class Model(torch.nn.Linear):
        def forward(self, rows):
            return super().forward(rows).square().mean()

    autoaccum.fit(Model(4, 2), loader, 2, epochs=2, device="cpu")

    assert capsys.readouterr().err.count("the loader makes batches of 6 (batch_size)") == 1


class Reusing:
    """Writes each batch into the tensors of the one before."""

    def __iter__(self):
        inputs, targets = torch.empty(4, 3), torch.empty(4, 1)
        for _ in range(6):
            yield inputs.normal_(), targets.normal_()


class InTurn:
    """Writes each batch into a part of one tensor that no batch of the same window is in."""

    def __iter__(self):
        inputs, targets = torch.empty(16, 3), torch.empty(16, 1)
        for number in range(6):
            rows = slice(4 * (number % 4), 4 * (number % 4) + 4)
            yield inputs[rows].normal_(), targets[rows].normal_()


class Writing(nn.Linear):
    """Writes into its inputs."""

    def forward(self, inputs):
        return super().forward(inputs.mul_(2.0))


@pytest.mark.parametrize("target_batch", [6, 8, 24])
def test_loader_that_writes_each_batch_into_the_one_before_is_refused_where_windows_hold_several(target_batch):
    with pytest.raises(autoaccum.InvalidInputError, match=r"into the tensors of the batch before.*clone\(\)"):
        trained(nn.Linear(3, 1), Reusing(), target_batch)


@pytest.mark.parametrize("target_batch", [2, 4])
def test_loader_that_writes_each_batch_into_the_one_before_trains_where_each_is_used_up_first(target_batch):
    assert len(trained(nn.Linear(3, 1), Reusing(), target_batch).history) == 24 // target_batch


def test_loader_that_writes_into_memory_of_no_batch_that_waits_trains():
    assert len(trained(nn.Linear(3, 1), InTurn(), 8).history) == 3


def test_batches_that_the_model_has_written_into_are_no_fault_of_the_loader():
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(6)]

    assert len(trained(Writing(3, 1), batches, 6).history) == 4


def trained(model, loader, target_batch):
    return autoaccum.fit(model, loader, target_batch, loss=nn.MSELoss(), micro_batch=2, device="cpu", progress=False)
