"""The gradient noise scale is unbiased for every cut and every loss, and measuring it changes no gradient."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._data.batches import Window, as_window
from autoaccum._engine.noise_scale import NoiseScale, Spread, shuffled
from autoaccum._system.notices import Notices
from faults import FailAt

D = 12
MEAN = torch.full((D,), 0.3, dtype=torch.float64)
DEVIATION = torch.linspace(0.5, 1.5, D, dtype=torch.float64)
# Of the gradient of one sample where the parameter is 0, which is minus the sample.
VARIANCE, SQUARED_NORM = float((DEVIATION**2).sum()), float((MEAN**2).sum())


class Distance(nn.Module):
    """Half the squared distance of a sample to its parameter: the gradient is known, and so is its covariance."""

    def __init__(self):
        super().__init__()
        self.center = nn.Parameter(torch.zeros(D, dtype=torch.float64))

    def forward(self, inputs):
        return 0.5 * (self.center - inputs).square().sum(1)


def of_pair(outputs, targets):
    return outputs.sum(), torch.ones_like(outputs).sum()


LOSSES = {
    "mean": lambda outputs, targets: outputs.mean(),
    "sum": lambda outputs, targets: outputs.sum(),
    "each": lambda outputs, targets: outputs,
    "pair": of_pair,
    "two": [lambda model, batch: 0.25 * model(batch[0]).mean(), lambda model, batch: 0.75 * model(batch[0]).mean()],
    "named": lambda outputs, targets: {"one": 0.25 * outputs.mean(), "other": 0.75 * outputs.mean()},
}


class Recorded(NoiseScale):
    """Keeps what it learns."""

    def __init__(self):
        super().__init__(1, Notices(silent=True))
        self.spreads = []

    def learn(self, spread, samples):
        self.spreads.append(spread)
        super().learn(spread, samples)


def runner_of(model, sizes, loss, *, lr=0.0, **options):
    plan = autoaccum.plan(sum(sizes), max(sizes)) if isinstance(sizes, tuple) else sizes
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {"device": "cpu", "precision": "fp32", "noise_scale": 1, "notices": Notices(silent=True)} | options
    return autoaccum.Runner(model, optimizer, plan, loss=loss, **settings)


def recorded(runner):
    """Have a runner keep what it learns of noise."""
    runner._noise = runner._engine._careful._noise = Recorded()
    return runner._noise


def batches(number, samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        noise = torch.randn(samples, D, dtype=torch.float64, generator=generator)
        yield MEAN + DEVIATION * noise, torch.zeros(samples)


def assert_within_four_errors(found, expected):
    error = torch.tensor(found).std() / math.sqrt(len(found))
    assert abs(sum(found) / len(found) - expected) < 4 * error


@pytest.mark.parametrize(
    ("samples", "most"), [(24, 8), (24, 7), (25, 24), (9, 1)], ids=["equal", "unequal", "cut in two", "single samples"]
)
@pytest.mark.parametrize("loss", LOSSES)
def test_estimate_is_within_four_standard_errors(loss, samples, most):
    runner = runner_of(Distance(), autoaccum.plan(samples, most), LOSSES[loss])
    noise = recorded(runner)

    for batch in batches(60, samples):
        runner.step(batch)

    assert_within_four_errors([spread.variance for spread in noise.spreads], VARIANCE)
    assert_within_four_errors(
        [spread.squared_norm - spread.variance / samples for spread in noise.spreads], SQUARED_NORM
    )


def squared_norm_of(model, loss, part):
    model.zero_grad()
    loss(model(part[0]), part[1]).backward()
    return float(sum(parameter.grad.square().sum() for parameter in model.parameters()))


def test_estimate_is_that_of_the_definition_where_targets_count_unequally():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 11)).double()
    tokens = torch.randint(11, (10, 7))
    targets = tokens.roll(-1, 1)
    for row in range(10):
        targets[row, : row % 6] = -100

    def loss(outputs, targets):
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=-100)

    runner = runner_of(model, autoaccum.plan(10, 4), loss)
    noise = recorded(runner)

    report = runner.step((tokens, targets))

    first = shuffled(as_window((tokens, targets)), 1).cut(0, report.micro_batches[0])
    part, whole = squared_norm_of(model, loss, first), squared_norm_of(model, loss, (tokens, targets))
    small, big = (10 * int((one != -100).sum()) / int((targets != -100).sum()) for one in (first[1], targets))
    assert small != report.micro_batches[0]
    (spread,) = noise.spreads
    assert spread.variance == pytest.approx((part - whole) / (1 / small - 1 / big), rel=1e-9)
    assert spread.squared_norm == pytest.approx(whole, rel=1e-9)


def trained(*, every, fails=None, steps=4, **options):
    """Parameters, reports and the noise scale after some windows."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(D, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    runner = runner_of(model, autoaccum.plan(12, 5), nn.MSELoss(), lr=0.1, noise_scale=every, **options)
    reports = []
    for number, (inputs, _) in enumerate(batches(steps, 12)):
        batch = (inputs, inputs.sum(1, keepdim=True))
        if number + 1 == fails:
            with FailAt(17):
                reports.append(runner.step(batch))
        else:
            reports.append(runner.step(batch))
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]), reports, runner.noise_scale


def test_windows_between_are_measured_by_none_and_gradients_stay_the_same():
    plain, reports, none = trained(every=False)
    measured, sampled, noise = trained(every=2)

    assert none is None
    assert [report.noise_scale is not None for report in sampled] == [False, True, False, True]
    assert sampled[-1].noise_scale == noise > 0
    assert not any(report.noise_scale for report in reports)
    torch.testing.assert_close(measured, plain, rtol=1e-12, atol=1e-12)  # samples are in another order


def test_memory_that_runs_out_in_a_measured_window_changes_no_gradient():
    plain, *_ = trained(every=2)

    found, reports, _ = trained(every=2, fails=2)

    assert reports[1].oom_events == 1
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


def test_overflow_is_passed_over():
    noise = NoiseScale(1, Notices(silent=True))
    noise.learn(Spread(2.0, 1.0), 10)
    before = noise.state_dict()

    noise.learn(Spread(math.inf, math.inf), 10)
    noise.learn(Spread(math.nan, 1.0), 10)

    assert noise.state_dict() == before


@pytest.mark.parametrize(
    ("spread", "text"),
    [
        (None, "not measured: one window in 5 is"),
        (Spread(100.0, 1.0), "mean gradient is lost in its noise, so the scale is far above the target batch 100"),
        (Spread(-1.0, 1.0), "noise is lost in their gradient, so the scale is far below the target batch 100"),
        (Spread(100.0, 1.1), "about 1,000 samples, 10 times the target batch 100: a larger batch would still pay"),
        (Spread(100.0, 2.0), "about 100 samples, 1 times the target batch 100: the batch is about as large as pays"),
        (Spread(1.0, 1.01), "about 1 samples, 0.01 times the target batch 100: a smaller batch would need fewer"),
    ],
)
def test_summary_says_whether_a_larger_batch_pays(spread, text):
    noise = NoiseScale(5, Notices(silent=True))
    if spread is not None:
        noise.learn(spread, 100)

    assert text in noise.summary(100, "SGD")
    assert "own is not measured" not in noise.summary(100, "SGD")
    assert spread is None or noise.samples is None or "; AdamW's own is not" in noise.summary(100, "AdamW")


def test_window_that_fits_at_once_is_cut_in_two_and_that_is_said_once():
    notices = Notices(silent=True)
    runner = runner_of(Distance(), autoaccum.plan(10, 10), LOSSES["mean"], noise_scale=2, notices=notices)

    cuts = [runner.step(batch).micro_batches for batch in batches(4, 10)]

    assert cuts == [(10,), (5, 5), (10,), (5, 5)]
    assert sum("cut in two to be measured" in text for text in notices.texts) == 1
    assert runner.plan.micro_batches == (10,)


def test_batchnorm_is_warned_of_and_no_window_is_cut_for_it():
    notices = Notices(silent=True)
    model = nn.Sequential(nn.Linear(D, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)).double()
    runner = runner_of(model, autoaccum.plan(10, 10), nn.MSELoss(), notices=notices)

    for inputs, _ in batches(2, 10):
        assert runner.step((inputs, inputs[:, :1])).micro_batches == (10,)

    assert sum("BatchNorm computes its statistics from each micro-batch" in text for text in notices.texts) == 1
    assert sum("are not cut in two to be measured" in text for text in notices.texts) == 1


def test_samples_of_a_measured_window_come_in_random_order():
    inputs = torch.arange(40.0)[:, None].repeat(1, D).double()
    seen = []
    model = Distance()
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0][:, 0].tolist()))
    runner = runner_of(model, autoaccum.plan(40, 10), LOSSES["each"], noise_scale=2, loss_reduction="mean")
    runner.step((inputs, torch.zeros(40)))
    ordered = len(seen)

    runner.step((inputs, torch.zeros(40)))

    assert sorted(itertools.chain(*seen[ordered:])) == list(range(40))
    assert all(len({int(number) // 10 for number in part}) > 1 for part in seen[ordered:])


@pytest.mark.parametrize(
    "window",
    [
        Window([{"x": torch.zeros(4, 3), "num_items_in_batch": 12}]),
        Window([torch.zeros(2, 3), torch.zeros(2, 4)]),
        Window([torch.zeros(3, 4)], autoaccum.Along(1)),
    ],
    ids=["count", "pieces", "split"],
)
def test_order_stays_where_another_would_change_more(window):
    assert shuffled(window, 1) is window


def test_scale_of_a_scaler_divides_out():
    found = []
    for precision in ("fp32", "fp16"):  # which touches nothing in this model but the scale of its loss
        runner = runner_of(Distance(), autoaccum.plan(12, 5), LOSSES["mean"], precision=precision)
        for batch in batches(3, 12):
            runner.step(batch)
        found.append(runner.noise_scale)

    assert found[0] is not None
    assert found[1] == pytest.approx(found[0], rel=1e-12)
