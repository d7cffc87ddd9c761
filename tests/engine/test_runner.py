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


def test_report_says_the_learning_rates_of_its_update():
    model = network()
    groups = [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2].parameters(), "lr": torch.tensor(0.25)}]
    optimizer = torch.optim.Adam(groups)
    runner = runner_of(model, autoaccum.plan(10, 5), optimizer=optimizer)

    first = runner.step(samples(10))
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.param_groups[1]["lr"].fill_(0.0625)
    second = runner.step(samples(10))

    assert (first.learning_rates, second.learning_rates) == ((0.5, 0.25), (0.125, 0.0625))


def test_hand_made_plan_is_used_as_it_is():
    report = runner_of(network(), autoaccum.Plan(10, (7, 1, 2))).step(samples(10))

    assert report.micro_batches == (7, 1, 2)


@pytest.mark.parametrize(("count", "cut"), [(3, (3,)), (9, (5, 4)), (11, (4, 4, 3))])
def test_window_of_another_size_is_cut_evenly_within_the_plans_micro_batch(count, cut):
    report = runner_of(network(), autoaccum.plan(10, 5)).step(samples(count))

    assert report.micro_batches == cut


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


def test_lost_device_is_said_and_not_tried_again():
    calls = []

    def poisoned(outputs, targets):
        calls.append(1)
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    runner = runner_of(network(), autoaccum.plan(10, 5), loss=poisoned, loss_reduction="mean")

    with pytest.raises(autoaccum.DeviceLostError, match="new one"):
        runner.step(samples(10))

    assert len(calls) == 1


def test_window_of_one_sample_that_batchnorm_refuses_says_how_to_leave_it_out():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))

    with pytest.raises(ValueError, match="more than 1 value") as caught:
        runner_of(model, autoaccum.plan(10, 5)).step(samples(1))

    assert "drop_last=True" in caught.value.__notes__[0]


def with_batchnorm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))


def test_rest_of_one_sample_that_batchnorm_refuses_says_that_memory_ran_out_windows_before():
    def picky(outputs, targets):
        if len(outputs) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return nn.functional.cross_entropy(outputs, targets)

    runner = runner_of(with_batchnorm(), autoaccum.plan(10, 10), loss=picky, loss_reduction="mean")
    for _ in range(2):
        assert runner.step(samples(10)).micro_batches == (2, 2, 2, 2, 2)

    with pytest.raises(autoaccum.DoesNotFitError, match="one sample alone is refused: Expected more than 1 value"):
        runner.step(samples(5))


def test_rest_of_one_sample_that_batchnorm_refuses_is_explained_where_memory_never_ran_out():
    runner = runner_of(with_batchnorm(), autoaccum.Plan(10, (9, 1)))

    with pytest.raises(ValueError, match="more than 1 value") as caught:
        runner.step(samples(10))

    assert "the micro-batches 9+1 of this window leave one of a single sample" in caught.value.__notes__[0]


def test_other_errors_of_single_samples_stay_themselves_after_memory_ran_out():
    def picky(outputs, targets):
        if len(outputs) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        if len(seen) == 10:
            raise ValueError("a mistake in the loss")
        seen.append(1)
        return nn.functional.cross_entropy(outputs, targets)

    seen = []
    runner = runner_of(nn.Linear(6, 3), autoaccum.plan(10, 10), loss=picky, loss_reduction="mean")
    runner.step(samples(10))

    with pytest.raises(ValueError, match="a mistake in the loss"):
        runner.step(samples(10))


def test_size_that_a_kernel_refuses_is_taken_smaller_like_lack_of_memory():
    def picky(outputs, targets):
        if len(outputs) > 4:
            raise RuntimeError("Expected canUse32BitIndexMath(input) to be true")
        return nn.functional.cross_entropy(outputs, targets)

    report = runner_of(network(), autoaccum.plan(10, 10), loss=picky, loss_reduction="mean").step(samples(10))

    assert report.micro_batches == (4, 3, 3)


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
