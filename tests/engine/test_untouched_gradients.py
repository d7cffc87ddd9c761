"""What changes `.grad` between the micro-batches of a window is refused, and not trained with."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._system.notices import Notices

MEDDLING = {
    "clears them": lambda model, loss: model.zero_grad(),
    "fills them with zeros": lambda model, loss: model.zero_grad(set_to_none=False),
    "goes backward itself": lambda model, loss: loss.requires_grad and loss.backward(retain_graph=True),
}


def model_and_window():
    torch.manual_seed(0)
    return nn.Linear(3, 2), (torch.randn(12, 3), torch.randint(2, (12,)))


def stepped(model, window, loss=functional.cross_entropy):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"loss": loss, "loss_reduction": "mean", "device": "cpu", "notices": Notices(silent=True)}
    return autoaccum.Runner(model, optimizer, autoaccum.plan(12, 4), **settings).step(window)


def fitted(model, window, loss):
    return autoaccum.fit(
        model, [window], target_batch=12, micro_batch=4, loss=loss, loss_reduction="mean", device="cpu"
    )


LOOPS = {"Runner": stepped, "fit": fitted}


@pytest.mark.parametrize("meddle", MEDDLING.values(), ids=MEDDLING)
@pytest.mark.parametrize("loop", LOOPS)
def test_loss_that_changes_gradients_between_micro_batches_is_refused(meddle, loop):
    model, window = model_and_window()
    before = model.weight.detach().clone()

    def loss(outputs, targets):
        value = functional.cross_entropy(outputs, targets)
        meddle(model, value)
        return value

    with pytest.raises(autoaccum.InvalidInputError, match=r"changed \.grad .* do this between windows"):
        LOOPS[loop](model, window, loss)
    assert torch.equal(model.weight, before)
    assert model.weight.grad is None


def test_hook_that_clears_what_earlier_micro_batches_added_is_refused():
    _, window = model_and_window()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    model[1].weight.register_hook(lambda gradient: model[0].zero_grad())

    with pytest.raises(autoaccum.InvalidInputError, match="a hook cleared or replaced"):
        stepped(model, window)


def test_hooks_after_accumulation_and_scaling_hooks_may_run_for_each_micro_batch():
    """Of both the user is told; the ones are refused by `Accumulator` alone, and the others are exact."""
    (model, window), (plain, _) = model_and_window(), model_and_window()
    calls = []
    model.weight.register_post_accumulate_grad_hook(lambda parameter: calls.append(parameter.grad.add_(0.0)))
    model.bias.register_hook(lambda gradient: gradient * 2.0)
    functional.cross_entropy(plain(window[0]), window[1]).backward()

    stepped(model, window)

    assert len(calls) == 3
    torch.testing.assert_close(model.weight, plain.weight - 0.1 * plain.weight.grad)
    torch.testing.assert_close(model.bias, plain.bias - 0.2 * plain.bias.grad)


class Joined(nn.Module):
    """Joins two of its parameters, so that their gradients are parts of one tensor (timm's attention has biases so)."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.first, self.second = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))

    def forward(self, inputs):
        return functional.linear(inputs, self.weight, torch.cat((self.first, self.second)))


@pytest.mark.parametrize("loop", ["Runner", "fit", "Accumulator"])
def test_gradients_that_are_parts_of_one_tensor_are_no_change(loop):
    torch.manual_seed(0)
    model, window = Joined(), (torch.randn(12, 3), torch.randint(4, (12,)))
    expected = torch.autograd.grad(functional.cross_entropy(model(window[0]), window[1]), list(model.parameters()))
    before = [parameter.detach().clone() for parameter in model.parameters()]

    if loop == "Accumulator":
        accumulator = autoaccum.Accumulator(model, micro_batch=4, loss=functional.cross_entropy, device="cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        accumulator.backward(window)
        optimizer.step()
    elif loop == "Runner":
        stepped(model, window)
    else:
        autoaccum.fit(
            model, [window], 12, micro_batch=4, loss=functional.cross_entropy, device="cpu", precision="fp32",
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )  # fmt: skip

    for old, new, gradient in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(old - new.detach(), 0.1 * gradient)


def test_hook_that_changes_a_part_of_one_tensor_is_refused():
    torch.manual_seed(0)
    model, window = Joined(), (torch.randn(12, 3), torch.randint(4, (12,)))

    def change(gradient):
        if model.first.grad is not None:
            model.first.grad.mul_(2.0)

    model.weight.register_hook(change)

    with pytest.raises(autoaccum.InvalidInputError, match="a hook changed"):
        stepped(model, window)
