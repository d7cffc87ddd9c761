"""NaN in the middle of a run is said with its step, and never takes the place of the last finite checkpoint."""

import pytest
import torch
from torch import nn

import autoaccum
from autoaccum._engine.finiteness import Finiteness
from autoaccum._records import DeviceScalar, StepReport
from autoaccum._system.lease import Lease
from put_together import training_step

BAD = 4  # the window whose inputs are not finite


def batches(windows=8, bad=BAD, value=float("nan")):
    torch.manual_seed(0)
    for number in range(1, windows + 1):
        inputs = torch.randn(4, 3)
        yield inputs * (value if number == bad else 1.0), torch.randn(4, 2)


class Once:
    """A loader that can be read often."""

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


class Freezes(autoaccum.Callback):
    """Changes what is trained just before the window that is not finite."""

    def __init__(self, model):
        self.model = model

    def on_step(self, report, *, epoch):
        self.model.bias.requires_grad_(report.step != BAD - 1)


@pytest.mark.parametrize(("on_nan", "steps"), [("warn", 8), ("stop", None)])
def test_window_after_a_change_of_the_model_is_held_to_on_nan_and_not_taken_for_the_first(on_nan, steps):
    model = nn.Linear(3, 2)

    if steps is None:
        with pytest.raises(autoaccum.NotFiniteError, match=f"step {BAD}: not finite"):
            fit(model, on_nan=on_nan, callbacks=[Freezes(model)])
    else:
        assert fit(model, on_nan=on_nan, callbacks=[Freezes(model)]).steps == steps


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


def test_optimizer_state_that_becomes_infinite_is_not_kept(tmp_path, capsys):
    class Breaks(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            if report.step == 2:
                next(iter(optimizer.state.values()))["exp_avg_sq"][0] = float("inf")

    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())

    fit(model, Once(lambda: batches(bad=0)), optimizer=optimizer, callbacks=[Breaks()], checkpoint=tmp_path)

    assert "the optimizer's exp_avg_sq of parameter 0" in lines(capsys, "no checkpoint is written")[0]


def test_gradient_that_is_not_finite_is_said_although_the_loss_is(capsys):
    # The square root's slope at 0 is infinite.
    def loss(outputs, targets):
        return (outputs * 0.0).abs().sqrt().sum(1).mean() + (outputs - targets).square().mean()

    def slope(outputs, targets):
        return loss(outputs, targets) if calls.append(1) or len(calls) > 2 else outputs.square().mean()

    calls = []
    fit(loss=slope, loss_reduction="mean", clip_grad_norm=1.0, loader=Once(lambda: batches(bad=0)))

    assert "not finite: the gradient's norm=" in lines(capsys, "WARNING")[0]


def report(step, loss=1.0, *, skipped=False, norm=None):
    losses = {"loss": DeviceScalar(loss)}
    return StepReport(step, 4, (4,), 0, 0.1, None, skipped, losses, None if norm is None else DeviceScalar(norm))


def test_windows_that_the_scaler_skips_are_no_alarm_but_50_in_a_row_are_said(capsys):
    watch = Finiteness(training_step(nn.Linear(3, 2)), "stop", is_first=True, is_alone=True)

    for step in range(1, 130):
        watch.see(report(step, float("inf"), skipped=step != 20, norm=float("nan")) if step != 20 else report(20))

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("autoaccum: step 70: the gradient scaler has skipped 50 updates in a row")


class OnDevice(torch.Tensor):
    """A number of a device that is asked only with a wait."""

    read = 0

    @property
    def device(self):
        return torch.device("xpu")

    def __float__(self):
        OnDevice.read += 1
        return super().__float__()


def test_numbers_of_a_device_without_events_are_read_together_and_at_the_end(capsys):
    watch = Finiteness(training_step(nn.Linear(3, 2)), "warn", is_first=True, is_alone=True)

    for step in range(1, 65):
        watch.see(report(step, torch.tensor(float("nan") if step > 60 else 1.0).as_subclass(OnDevice)))
    read_before = OnDevice.read
    watch.finish()

    assert (read_before, OnDevice.read) == (0, 64)
    assert "step 61: not finite" in capsys.readouterr().err


def test_run_that_has_lost_its_folder_ends_also_where_no_checkpoint_would_be_written(tmp_path, monkeypatch):
    made, begin, seen = [], Lease.__init__, []
    monkeypatch.setattr(Lease, "__init__", lambda lease, folder: (begin(lease, folder), made.append(lease))[0])

    class Loses(autoaccum.Callback):
        def on_step(self, report, *, epoch):
            seen.append(report.step)
            if report.step == BAD + 1:
                (tmp_path / ".lease-00000001").unlink()
                made[0].is_lost = True  # as its thread finds out

    with pytest.raises(autoaccum.CheckpointInUseError):
        fit(checkpoint=tmp_path, callbacks=[Loses()])

    assert seen[-1] == BAD + 1
