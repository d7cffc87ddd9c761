"""What is said of BatchNorm in a window that is cut, and how its momentum is set right and put back."""

import pytest
import torch
from torch import nn

import autoaccum
from support.models.small import logged

MOMENTUM = 0.1


def layer(**options):
    """A layer whose running mean is far from 0, so that it is seen how fast it is forgotten."""
    norm = nn.BatchNorm1d(3, dtype=torch.float64, **{"momentum": MOMENTUM} | options)
    if norm.running_mean is not None:
        norm.running_mean.copy_(torch.tensor([1.0, -2.0, 30.0]))
        norm.running_var.copy_(torch.tensor([4.0, 0.5, 9.0]))
    return norm


def runner_of(*layers, sizes, mode="rescale", **options):
    return autoaccum.Runner(
        nn.Sequential(nn.Identity(), *layers),
        lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        autoaccum.Plan(sum(sizes), sizes),
        **{"loss": nn.MSELoss(), "batchnorm": mode, "device": "cpu"} | options,
    )


def step(runner, inputs):
    runner.step((inputs, torch.zeros_like(inputs)))


def train(norm, inputs, sizes, mode="rescale", **options):
    step(runner_of(norm, sizes=sizes, mode=mode, **options), inputs)


# --- the momentum ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["micro_batch", "window"])
@pytest.mark.parametrize("sizes", [(12,), (6, 6), (5, 7), (2, 10), (2,) * 6], ids=str)
@pytest.mark.parametrize("momentum", [0.0, 0.01, 0.9, 1.0])
def test_window_forgets_as_much_as_one_update_with_the_whole_batch(sizes, momentum, scope):
    """Of zeros all that is seen is how much of the old value is left, which is exactly 1 - momentum."""
    norm, inputs = layer(momentum=momentum), torch.zeros(12, 3, dtype=torch.float64)
    expected = norm.running_mean * (1 - momentum), norm.running_var * (1 - momentum)

    train(norm, inputs, sizes, loss_scope=scope)

    torch.testing.assert_close((norm.running_mean, norm.running_var), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fails", [False, True])
def test_momentum_is_put_back_to_the_last_bit(fails):
    def fail(_, __, outputs):
        if fails and layers[2].momentum != 1 / 3:
            raise RuntimeError("in the middle")

    layers = [layer(momentum=value) for value in (0.1, 0.37, 1 / 3)]
    runner = runner_of(*layers, sizes=(4, 8))
    layers[-1].register_forward_hook(fail)
    inputs = torch.randn(12, 3, dtype=torch.float64)

    if fails:
        with pytest.raises(RuntimeError, match="in the middle"):
            step(runner, inputs)
    else:
        step(runner, inputs)

    assert [norm.momentum for norm in layers] == [0.1, 0.37, 1 / 3]


# --- what is said ----------------------------------------------------------------------------------------------------


def said(*layers, sizes=(6, 6), mode="keep", steps=1):
    with logged() as lines:
        runner = runner_of(*layers, sizes=sizes, mode=mode)
        for _ in range(steps):
            step(runner, torch.randn(12, 3, dtype=torch.float64))
    return [line for line in lines if line.startswith("BatchNorm:")]


def test_number_of_layers_what_differs_and_what_to_do_are_said_once():
    (line,) = said(layer(), layer(), layer().eval(), sizes=(5, 7), steps=2)

    assert "2 layers in training mode normalise by each micro-batch's own mean and variance" in line
    assert "5 to 7 samples" in line
    for remedy in ("batchnorm='rescale'", "GroupNorm", "LayerNorm", "frozen"):
        assert remedy in line


def test_the_difference_is_said_though_only_windows_without_checks_are_cut(caplog):
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 4))
    data = torch.utils.data.TensorDataset(torch.randn(192, 64), torch.randint(4, (192,)))
    loader = torch.utils.data.DataLoader(data, batch_size=64)  # of windows of 128 and 64, in turn

    with caplog.at_level("INFO", logger="autoaccum"):
        result = autoaccum.fit(model, loader, 128, epochs=4, device=autoaccum.Simulated("180KiB"), progress="lines")

    assert [report.micro_batches for report in result.history[2:]] == [(64, 64), (64,)] * 3
    assert sum("BatchNorm: 1 layer" in line for line in caplog.messages) == 1
