"""A loss, a batch or a model that is passed as another convention wants it is refused in words, before anything."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum.errors import InvalidInputError
from support.models.small import assert_bitwise, state_of

MOST_CHARS = 3 * 120


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(), nn.Linear(4, 1))


def samples():
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(1)), torch.ones(8, 1)


def squares(outputs, targets):
    return (outputs - targets).square().mean()


def of_model(model, batch):
    return squares(model(batch[0]), batch[1])


def by_runner(model, loss, batch, forward=None):
    optimizer = torch.optim.Adam(model.parameters())
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(8, 3), loss=loss, forward=forward, device="cpu")
    runner.step(batch)


def by_evaluation(model, loss, batch, forward=None):
    optimizer = torch.optim.Adam(model.parameters())
    runner = autoaccum.Runner(model, optimizer, autoaccum.plan(8, 3), loss=loss, forward=forward, device="cpu")
    runner.evaluate([batch])


def by_fit(model, loss, batch, forward=None):
    autoaccum.fit(model, [batch], target_batch=8, loss=loss, forward=forward, device="cpu", progress=False)


def by_accumulator(model, loss, batch, forward=None):
    autoaccum.Accumulator(model, loss=loss, forward=forward, device="cpu").backward(batch)


WAYS = pytest.mark.parametrize(
    "train", [by_runner, by_evaluation, by_fit, by_accumulator], ids=lambda way: way.__name__
)


def refused(train, loss, batch, model=None):
    """What a refused call says, after checking that it left model, random state and gradients as they were."""
    model = model or network()
    before, random_state = state_of(model), torch.get_rng_state()
    with pytest.raises(InvalidInputError) as caught:
        train(model, loss, batch)
    assert_bitwise(state_of(model), before)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert len(str(caught.value)) <= MOST_CHARS
    return str(caught.value)


@pytest.mark.parametrize(
    ("losses", "found"),
    [
        ([squares, functional.l1_loss], "squares failed with them (unsupported operand"),
        ([nn.MSELoss()], "MSELoss failed with them ("),
        ([lambda a, b: (a - b).mean()], "<lambda> failed with them (unsupported operand"),
        ([lambda a, b: b.size()], "<lambda> failed with them ('tuple' object has no attribute 'size')"),
        ([lambda a, b: functional.mse_loss(a, b) / 2], "<lambda> failed with them ("),
    ],
    ids=["function", "module", "arithmetic", "attribute", "call"],
)
def test_list_of_losses_of_outputs_is_refused_with_what_lists_hold(losses, found):
    said = refused(by_runner, losses, samples())

    assert said.startswith(f"losses of a list are called with (model, batch), and {found}")
    assert "loss=lambda outputs, targets: {" in said
    assert "in the list lambda model, batch: " in said


@WAYS
@pytest.mark.parametrize("loss", [of_model, lambda a, b: a(b[0])], ids=["by name", "by its call"])
def test_loss_of_the_model_alone_is_refused_with_how_it_is_passed(train, loss):
    said = refused(train, loss, samples())

    assert "a loss is called with (outputs, targets), and " in said
    assert "pass a loss of (model, batch) in a list: loss=[" in said


def mapping():
    inputs, targets = samples()
    return {"x": inputs, "y": targets}


@WAYS
def test_mapping_whose_entries_the_model_does_not_take_is_refused_with_what_it_takes(train):
    said = refused(train, squares, mapping())

    assert "a batch is a mapping of 'x', 'y', whose entries go to the model by name" in said
    assert "Sequential.forward takes (input)" in said


def test_what_is_said_of_a_mapping_works():
    said = refused(by_runner, squares, mapping())
    forward, loss = re.search(r"pass forward=(.*) and loss=(.*)$", said).groups()
    names = {"criterion": squares}

    by_runner(network(), eval(loss, names), mapping(), forward=eval(forward, names))  # noqa: S307 - its own words


class OfTwo(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1))

    def forward(self, inputs, mask):
        return (inputs * mask) @ self.weight


def test_pair_for_a_model_of_two_inputs_is_refused_with_what_it_takes():
    inputs, targets = samples()

    said = refused(by_runner, squares, ((inputs, torch.ones(8, 3)), targets), OfTwo())

    assert "OfTwo.forward takes (inputs, mask)" in said
    assert said.endswith("pass forward=lambda model, batch: model(*batch[0])")


class Wrong(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 1))

    def forward(self, inputs):
        return len(inputs @ self.weight, 1)


@pytest.mark.parametrize(
    ("loss", "batch"),
    [(squares, samples()), ([of_model], samples()), (squares, {"inputs": samples()[0]})],
    ids=["pair", "list of losses", "mapping"],
)
def test_error_of_the_model_itself_arrives_as_it_is(loss, batch):
    with pytest.raises(TypeError, match=r"len\(\) takes exactly one argument"):
        by_runner(Wrong(), loss, batch)


@pytest.mark.parametrize("loss", [lambda outputs, targets: len(outputs, 1), [lambda model, batch: len(model, 1)]])
def test_error_of_the_loss_itself_arrives_as_it_is(loss):
    with pytest.raises(TypeError, match=r"len\(\) takes exactly one argument"):
        by_runner(network(), loss, samples())


def test_inputs_and_targets_apart_are_refused_with_how_they_are_passed():
    model = network()
    accumulator = autoaccum.Accumulator(model, loss=squares, device="cpu")
    runner = autoaccum.Runner(model, torch.optim.SGD(model.parameters()), autoaccum.plan(8, 3), device="cpu")

    with pytest.raises(
        InvalidInputError, match=re.escape("pass inputs and targets as one: backward((inputs, targets))")
    ):
        accumulator.backward(*samples())
    with pytest.raises(InvalidInputError, match=re.escape("step takes one batch, and got 2 arguments")):
        runner.step(*samples())

    assert all(parameter.grad is None for parameter in model.parameters())


def test_loss_in_place_of_a_batch_is_refused_with_what_backward_takes():
    model = network()
    accumulator = autoaccum.Accumulator(model, loss=squares, device="cpu")

    with pytest.raises(InvalidInputError, match="backward takes the batch"):
        accumulator.backward(squares(model(samples()[0]), samples()[1]))


def test_functions_with_arguments_of_their_own_are_restarted_and_batched():
    @autoaccum.find_executable_micro_batch(target=4)
    def train(micro_batch, accumulation_steps, config, *, rate):
        return micro_batch, accumulation_steps, config, rate

    def scaled(batch, factor, *, shift):
        return batch * factor + shift

    assert train("config", rate=2) == (4, 1, "config", 2)
    assert autoaccum.batched(scaled)(torch.ones(3), 2, shift=1).tolist() == [3, 3, 3]
    assert autoaccum.batched(scaled)(torch.ones(0), 2, shift=1).tolist() == []
