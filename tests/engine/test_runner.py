"""The runner: one window in, one update out; what its report says; what it refuses."""

import torch
from torch import nn

import autoaccum
from autoaccum._data.transfer import Transfer


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def runner_of(model, plan, **options):
    optimizer = options.pop("optimizer", torch.optim.SGD(model.parameters(), lr=0.1))
    return autoaccum.Runner(model, optimizer, plan, **{"device": "cpu", "loss": nn.CrossEntropyLoss(), **options})


def samples(count):
    torch.manual_seed(1)
    return torch.randn(count, 6), torch.randint(0, 3, (count,))


def test_loss_with_parameters_of_its_own_learns_with_the_model():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs, targets):
            return nn.functional.cross_entropy(outputs * self.scale, targets)

    loss = Scaled()

    def sgd(parameters):
        return torch.optim.SGD(parameters, lr=0.1)

    runner_of(network(), autoaccum.plan(10, 5), loss=loss, optimizer=sgd, loss_reduction="mean").step(samples(10))

    assert loss.scale.item() != 1.0
    assert loss.scale.grad is None


def test_memory_that_runs_out_for_the_first_transfer_of_a_steady_window_makes_its_parts_smaller(monkeypatch):
    most, feed = [12], Transfer.feed

    def feed_what_fits(transfer, window, sizes):
        for size, batch in zip(sizes, feed(transfer, window, sizes), strict=True):
            if size > most[0]:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            yield batch

    runner = runner_of(network(), autoaccum.plan(12, 4))
    runner._step.transfer.copy_always()
    for _ in range(5):
        runner.step(samples(12))
    monkeypatch.setattr(Transfer, "feed", feed_what_fits)
    most[0] = 3

    report = runner.step(samples(12))

    assert runner._runner.engine._is_steady
    assert report.micro_batches == (3, 3, 3, 3)
