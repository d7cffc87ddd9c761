"""NaN in the middle of a run is said with its step, and never takes the place of the last finite checkpoint."""

import pytest
import torch
from torch import nn

import autoaccum
from support.models.small import runner_of

BAD = 4  # the window whose inputs are not finite


def batches(windows=8, bad=BAD, value=float("nan")):
    torch.manual_seed(0)
    for number in range(1, windows + 1):
        inputs = torch.randn(4, 3)
        yield inputs * (value if number == bad else 1.0), torch.randn(4, 2)


class Once:
    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return self.make()


def fit(model=None, loader=None, **options):
    torch.manual_seed(1)
    settings = {"device": "cpu", "micro_batch": 4, "progress": False, "precision": "fp32"} | options
    return autoaccum.fit(model or nn.Linear(3, 2), Once(batches) if loader is None else loader, 4, **settings)


def lines(capsys, word):
    return [line for line in capsys.readouterr().err.splitlines() if word in line]


def content(path):
    return torch.load(path / "state.pt", weights_only=True)


def is_finite(path):
    return all(bool(tensor.isfinite().all()) for tensor in content(path)["modules"][0]["state"].values())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_loss_that_is_not_finite_is_said_once_with_its_step_also_without_progress(capsys, value):
    result = fit(loader=Once(lambda: batches(value=value)))

    (line,) = lines(capsys, "WARNING")
    assert f"step {BAD}: not finite: loss=" in line
    assert result.steps == 8


def test_last_finite_checkpoint_outlives_every_later_window(tmp_path, capsys):
    result = fit(checkpoint=tmp_path, checkpoint_every=1)

    kept = sorted(tmp_path.glob("step-*"))
    assert [content(path)["windows"] for path in kept] == [BAD - 2, BAD - 1]
    assert all(map(is_finite, kept))
    assert result.checkpoint == kept[-1]
    (line,) = lines(capsys, "no checkpoint is written")
    assert f"step {BAD}: no checkpoint is written, since it would hold NaN or infinity (weight, bias" in line
    assert str(kept[-1]) in line


def test_stop_raises_in_the_window_itself_and_leaves_the_last_finite_checkpoint(tmp_path, capsys):
    with pytest.raises(autoaccum.NotFiniteError, match=f"step {BAD}: not finite: loss=nan"):
        fit(on_nan="stop", checkpoint=tmp_path, checkpoint_every=2)

    (kept,) = tmp_path.glob("step-*")
    assert content(kept)["windows"] == 2
    assert is_finite(kept)
    assert "is saved in" not in capsys.readouterr().err


class Masked(nn.Module):
    """A model with a mask of -inf, a statistic that has not begun, and caches that it makes later."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        self.register_buffer("cache", None)
        self.register_buffer("grown", torch.empty(0), persistent=False)
        self.best = nn.Parameter(torch.tensor(float("inf")), requires_grad=False)

    def forward(self, inputs):
        self.cache = self.grown = torch.full((2,), float("-inf"))
        return self.linear(inputs)


class InfiniteState(torch.optim.SGD):
    """An optimizer whose state begins infinite, as a least value so far does."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter].setdefault("least", torch.full_like(parameter, float("inf")))
        return super().step(closure)


def test_what_was_infinite_at_the_beginning_blocks_no_checkpoint_also_after_a_resume(tmp_path, capsys):
    for epochs in (1, 2):
        result = fit(
            Masked(),
            Once(lambda: batches(windows=3, bad=0)),
            optimizer=lambda parameters: InfiniteState(parameters, lr=0.1),
            checkpoint=tmp_path,
            checkpoint_every=1,
            epochs=epochs,
        )

    assert content(result.checkpoint)["windows"] == 6
    assert "WARNING" not in capsys.readouterr().err


def test_gradient_that_is_not_finite_is_said_although_the_loss_is(capsys):
    # The square root's slope at 0 is infinite.
    def loss(outputs, targets):
        return (outputs * 0.0).abs().sqrt().sum(1).mean() + (outputs - targets).square().mean()

    def slope(outputs, targets):
        return loss(outputs, targets) if calls.append(1) or len(calls) > 2 else outputs.square().mean()

    calls = []
    fit(loss=slope, loss_reduction="mean", clip_grad_norm=1.0, loader=Once(lambda: batches(bad=0)))

    assert "not finite: the gradient's norm=" in lines(capsys, "WARNING")[0]


def test_infinite_norm_to_clip_to_measures_and_never_multiplies():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3))
    model[0].bias.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))
    runner = runner_of(model, clip_grad_norm=torch.inf)

    report = runner.step((torch.randn(8, 4), torch.arange(8) % 3))

    assert report.grad_norm == torch.inf
    assert not any(parameter.isnan().any() for parameter in model.parameters())
    assert all(model[1].weight.isfinite().flatten())
