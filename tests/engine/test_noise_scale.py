"""The gradient noise scale is unbiased for every cut and every loss, and measuring it changes no gradient."""

import itertools
import math

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._engine.noise_scale import NoiseScale
from autoaccum._system.notices import Notices  # an argument
from support.faults.modes import FailAt
from support.models.small import a_few_of
from support.ranks.noise import Distance

D = 12
MEAN = torch.full((D,), 0.3, dtype=torch.float64)
DEVIATION = torch.linspace(0.5, 1.5, D, dtype=torch.float64)
# Of the gradient of one sample where the parameter is 0, which is minus the sample.
VARIANCE, SQUARED_NORM = float((DEVIATION**2).sum()), float((MEAN**2).sum())


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
    def __init__(self):
        super().__init__(1, Notices(silent=True))
        self.spreads = []

    def learn(self, spread, samples):
        self.spreads.append(spread)
        super().learn(spread, samples)


def runner_of(model, sizes, loss, *, lr=0.0, **options):
    plan = autoaccum.plan(sum(sizes), max(sizes)) if isinstance(sizes, tuple) else sizes
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = {"device": "cpu", "precision": "fp32", "noise_scale": 1} | options
    return autoaccum.Runner(model, optimizer, plan, loss=loss, **settings)


def recorded(runner):
    runner._runner._noise = runner._runner.engine._micro_batches._noise = Recorded()
    return runner._runner._noise


def batches(number, samples, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(number):
        noise = torch.randn(samples, D, dtype=torch.float64, generator=generator)
        yield MEAN + DEVIATION * noise, torch.zeros(samples)


def assert_within_four_errors(found, expected):
    error = torch.tensor(found).std() / math.sqrt(len(found))
    assert abs(sum(found) / len(found) - expected) < 4 * error


CUTS = {"equal": (24, 8), "unequal": (24, 7), "cut in two": (25, 24), "single samples": (9, 1)}


@pytest.mark.parametrize(("loss", "cut"), a_few_of(LOSSES, CUTS))
def test_estimate_is_within_four_standard_errors(loss, cut):
    samples, most = CUTS[cut]
    runner = runner_of(Distance(), autoaccum.plan(samples, most), LOSSES[loss])
    noise = recorded(runner)

    for batch in batches(60, samples):
        runner.step(batch)

    assert_within_four_errors([spread.variance for spread in noise.spreads], VARIANCE)
    assert_within_four_errors(
        [spread.squared_norm - spread.variance / samples for spread in noise.spreads], SQUARED_NORM
    )


def trained(*, every, fails=None, steps=4, **options):
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


def test_memory_that_runs_out_in_a_measured_window_changes_no_gradient():
    plain, *_ = trained(every=2)

    found, reports, _ = trained(every=2, fails=2)

    assert reports[1].oom_events == 1
    torch.testing.assert_close(found, plain, rtol=1e-12, atol=1e-12)


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
