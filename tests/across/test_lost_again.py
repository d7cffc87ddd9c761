"""Promises that were broken once: a size of 1 for good, endless epochs, a lost newest checkpoint, a silent warning."""

import logging

import pytest
import torch
from torch import nn

import autoaccum


def test_widest_samples_that_always_run_first_do_not_end_the_search_at_one():
    def pairs(widths):
        return [(torch.randn(8, width), torch.randint(2, (8,))) for width in widths]

    model = nn.Sequential(
        nn.Unflatten(1, (-1, 1)), nn.Linear(1, 64), nn.Tanh(), nn.AdaptiveAvgPool2d((1, 2)), nn.Flatten()
    )
    loader = pairs([400, 100] * 30 + [400, 400] * 6)

    result = autoaccum.fit(model, loader, 16, device=autoaccum.Simulated("64MiB"), progress=False, max_steps=36)

    assert result.history[-1].micro_batches == (8, 8)


class Leaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.passes = nn.Linear(4, 2), 0

    def forward(self, features):
        self.passes += 1
        if self.passes > 30:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.")
        return self.layer(features)


@pytest.mark.filterwarnings("ignore")
def test_epoch_of_which_nothing_fits_any_more_ends_the_training():
    loader = [(torch.randn(2, 4), torch.randint(2, (2,))) for _ in range(1)]

    with pytest.raises(autoaccum.DoesNotFitError, match="no sample of epoch"):
        autoaccum.fit(
            Leaks(), loader, 2, loss=nn.CrossEntropyLoss(), device="cpu", max_steps=100, micro_batch=2,
            on_too_large="skip", progress=False,
        )  # fmt: skip


def train(folder, **options):
    torch.manual_seed(0)
    loader = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(2)]
    return autoaccum.fit(
        nn.Linear(4, 2), loader, 4, device="cpu", checkpoint=folder, checkpoint_every=1, progress=False, **options
    )


def test_equal_losses_leave_the_best_checkpoint_where_it_was_after_a_resume(tmp_path):
    options = {"val_loader": [(torch.zeros(4, 4), torch.tensor([0, 1, 0, 1]))], "metrics": None, "val_every": 1}
    optimizer = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.0)}
    first = train(tmp_path, max_steps=4, **options, **optimizer)

    second = train(tmp_path, max_steps=6, **options, **optimizer)

    assert second.best_checkpoint == first.best_checkpoint


def test_best_checkpoint_that_is_damaged_is_not_the_best(tmp_path):
    options = {"val_loader": [(torch.randn(4, 4), torch.tensor([0, 1, 0, 1]))], "val_every": 1}
    options["optimizer"] = lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, maximize=True
    )  # the first is the best
    first = train(tmp_path, max_steps=6, **options)
    (first.best_checkpoint / "state.pt").write_bytes(b"")

    second = train(tmp_path, max_steps=7, **options)

    assert second.best_checkpoint != first.best_checkpoint


def test_nan_is_a_warning_for_whoever_handles_the_lines(caplog):
    windows = [(torch.randn(4, 4), torch.randint(2, (4,))) for _ in range(4)]
    windows[2] = (windows[2][0] * float("nan"), windows[2][1])

    with caplog.at_level(logging.WARNING, logger="autoaccum"):
        autoaccum.fit(nn.Linear(4, 2), windows, 4, device="cpu", progress=False)

    assert [record.levelno for record in caplog.records if "not finite" in record.getMessage()] == [logging.WARNING]


def test_handler_that_fails_ends_no_training():
    class Broken(logging.Handler):
        def emit(self, record):
            raise ConnectionError("the collector is gone")

    handler = Broken()
    logging.getLogger("autoaccum").addHandler(handler)
    try:
        result = autoaccum.fit(
            nn.Linear(4, 2), [(torch.randn(4, 4), torch.randint(2, (4,)))] * 2, 4, device="cpu", progress="lines"
        )
    finally:
        logging.getLogger("autoaccum").removeHandler(handler)

    assert result.steps == 2


def costing(found):
    class Costly(autoaccum.ListOfSamples):
        def cost(self, batch):
            return found

    samples = [(torch.randn(4), torch.tensor(number % 2)) for number in range(4)]
    split = Costly(torch.utils.data.default_collate)
    return autoaccum.fit(nn.Linear(4, 2), [samples] * 2, 4, split=split, device="cpu", progress=False)


@pytest.mark.parametrize("found", [torch.tensor(3), 0.003, 3])
def test_cost_of_a_split_is_any_number(found):
    assert costing(found).steps == 2


@pytest.mark.parametrize("found", [None, float("nan"), -1, "much"])
def test_cost_that_is_no_number_is_refused(found):
    with pytest.raises(autoaccum.InvalidInputError, match="cost returned"):
        costing(found)


def test_functions_with_arguments_of_their_own_are_restarted_and_batched():
    @autoaccum.find_executable_micro_batch(target=4)
    def train(micro_batch, accumulation_steps, config, *, rate):
        return micro_batch, accumulation_steps, config, rate

    def scaled(batch, factor, *, shift):
        return batch * factor + shift

    assert train("config", rate=2) == (4, 1, "config", 2)
    assert autoaccum.batched(scaled)(torch.ones(3), 2, shift=1).tolist() == [3, 3, 3]
    assert autoaccum.batched(scaled)(torch.ones(0), 2, shift=1).tolist() == []
