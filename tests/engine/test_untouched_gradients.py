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
