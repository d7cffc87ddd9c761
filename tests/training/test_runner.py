"""The runner: one window in, one update out; what its report says; what it refuses."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from support.faults.places import Fault
from support.models.small import runner_of


def test_loss_with_parameters_of_its_own_learns_with_the_model():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, outputs, targets):
            return nn.functional.cross_entropy(outputs * self.scale, targets)

    loss = Scaled()
    runner = runner_of(
        nn.Linear(6, 3), lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss=loss, loss_reduction="mean"
    )

    runner.step((torch.randn(8, 6), torch.arange(8) % 3))

    assert loss.scale.item() != 1.0
    assert loss.scale.grad is None


class Scripted(nn.Module):
    """Has parts that were compiled by TorchScript, whose tables of buffers and parameters are no dictionaries."""

    def __init__(self, fails_at):
        super().__init__()
        self.body = torch.jit.script(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)))
        self.fails = Fault(fails_at - 1)

    def forward(self, inputs):
        found = self.body(inputs)
        self.fails()
        return found


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize("fails_at", [2, 7])
def test_what_a_failed_window_wrote_is_put_back_in_scripted_modules(fails_at):
    model, data = Scripted(fails_at), [(torch.randn(12, 6), torch.randn(12, 4))] * 4

    options = {"loss": functional.mse_loss, "loss_reduction": "mean", "micro_batch": 6, "progress": False}
    result = autoaccum.fit(model, data, 12, device="cpu", **options)

    assert result.oom_events == 1
    made = sum(len(report.micro_batches) for report in result.history)
    assert model.body[1].num_batches_tracked == made


def test_module_that_is_swapped_in_between_two_windows_keeps_no_gradients(capsys):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    runner = autoaccum.Runner(model, torch.optim.SGD(model.parameters(), lr=0.1), autoaccum.plan(8, 4), device="cpu")
    batch = torch.randn(8, 4), torch.randint(2, (8,))
    for _ in range(5):
        runner.step(batch)
    model[1] = nn.Linear(4, 2)

    runner.step(batch)

    assert model[1].weight.grad is None
    assert "2 parameters that need a gradient are not in the optimizer" in capsys.readouterr().err


class Scaled(nn.Module):
    """A module that has no parts, until it gets one."""

    def __init__(self):
        super().__init__()
        self.weight, self.adapter = nn.Parameter(torch.ones(4)), None

    def forward(self, inputs):
        inputs = inputs * self.weight
        return inputs if self.adapter is None else inputs + self.adapter(inputs)


def test_gradients_of_a_part_that_a_module_gets_later_are_added_and_put_back_as_any_other():
    model = nn.Sequential(Scaled())
    loss, batch = nn.MSELoss(), (torch.randn(8, 4), torch.randn(8, 4))
    accumulator = autoaccum.Accumulator(model, loss=loss, device="cpu", micro_batch=4)
    for _ in range(5):
        accumulator.backward(batch)
    del model[0].adapter
    model[0].adapter = nn.Linear(4, 4)
    model.zero_grad()
    loss(model(batch[0]), batch[1]).backward()
    expected = [2 * parameter.grad for parameter in model.parameters()]
    model.zero_grad()

    accumulator.backward(batch)
    handle = model.register_forward_pre_hook(Fault(1))
    accumulator.backward(batch)
    handle.remove()

    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_loss_of_a_pair_that_is_a_mapping_computes_nothing_twice():
    model = nn.Linear(4, 4)
    runner = autoaccum.Runner(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        autoaccum.plan(8, 4),
        loss=lambda outputs, targets: {"loss": (outputs - targets).square().mean(), "far": (outputs - targets).max()},
        loss_reduction="mean",
        device="cpu",
    )

    reports = [runner.step((torch.randn(8, 4), torch.randn(8, 4))) for _ in range(6)]

    assert [report.recomputed_samples for report in reports] == [0] * 6
    assert all("far" in report.losses for report in reports)


class Counting(nn.Linear):
    """Counts its forward passes in a buffer."""

    def __init__(self):
        super().__init__(4, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, inputs):
        self.passes += 1
        return super().forward(inputs)


def test_buffers_of_a_module_that_comes_later_are_put_back_after_a_check_of_the_loss():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(12, 4), loss=lambda outputs, _: outputs.square().mean())
    batch = torch.randn(12, 4), torch.randint(2, (12,))
    for _ in range(3):
        runner.step(batch)
    model[1] = Counting()

    runner.step(batch)

    assert model[1].passes == 3


def test_frozen_weights_of_eight_bits_are_watched():
    class Quantised(nn.Linear):
        def __init__(self):
            super().__init__(6, 4)
            weight = torch.randn(6, 4).to(torch.float8_e4m3fn)
            self.frozen = nn.Parameter(weight, requires_grad=False)

        def forward(self, inputs):
            return super().forward(inputs) + inputs @ self.frozen.float()

    data = [(torch.randn(12, 6), torch.randn(12, 4))] * 4

    result = autoaccum.fit(Quantised(), data, 12, loss=functional.mse_loss, micro_batch=6, device="cpu", progress=False)

    assert result.steps == 4


@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("kind", ["pair", "mapping"])
def test_scripted_model_is_called_as_any_other(kind):
    model = torch.jit.script(nn.Linear(6, 4))
    inputs, targets = torch.randn(12, 6), torch.randn(12, 4)
    batch = (inputs, targets) if kind == "pair" else {"input": inputs, "targets": targets}
    loss = functional.mse_loss if kind == "pair" else lambda outputs, batch: (outputs - batch["targets"]).abs().mean()

    result = autoaccum.fit(model, [batch], 12, loss=loss, micro_batch=6, device="cpu", progress=False)

    assert result.steps == 1
