"""The runner: one window in, one update out; what its report says; what it refuses."""

import copy

import pytest
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


def test_one_window_makes_exactly_one_update():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))

    report = runner_of(model, autoaccum.plan(100, 37), optimizer=optimizer).step(samples(100))

    assert steps == [1]
    assert report.micro_batches == (34, 33, 33)
    assert (report.step, report.samples, report.oom_events, report.skipped) == (1, 100, 0, False)


def test_report_says_the_loss_before_the_update_and_the_norm_before_clipping():
    model = network()
    window = samples(20)
    loss = nn.functional.cross_entropy(model(window[0]), window[1])
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()

    report = runner_of(model, autoaccum.plan(20, 7), clip_grad_norm=1e-4).step(window)

    assert report.loss == pytest.approx(loss.item(), rel=1e-5)
    assert report.grad_norm == pytest.approx(norm.item(), rel=1e-5)
    assert report.elapsed_s > 0


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


def test_loss_that_is_not_a_number_from_the_start_is_refused_before_it_spreads():
    model = network()
    before = copy.deepcopy(model.state_dict())
    inputs, targets = samples(10)
    inputs[3, 2] = float("nan")

    with pytest.raises(autoaccum.InvalidInputError, match="not finite from the start"):
        runner_of(model, autoaccum.plan(10, 5)).step((inputs, targets))

    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_fused_optimizer_that_fails_is_never_taken_for_unharmed():
    model = network()
    runner = runner_of(
        model, autoaccum.plan(10, 5), optimizer=torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    )
    runner.step(samples(10))

    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    runner.optimizer.register_step_pre_hook(fail)

    with pytest.raises(autoaccum.StateDamagedError):
        runner.step(samples(10))


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

    assert runner._engine._is_steady
    assert report.micro_batches == (3, 3, 3, 3)
