"""How often windows run for their weights, and weights that are not waited for: what they are, forms of losses show."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.nn import functional

import autoaccum
from autoaccum._loss import graph_reader, window_weights
from support.losses.gradients import assert_full_batch_gradient


@pytest.fixture
def counts():
    """Of passes: in a model, attributes would be put back."""
    return Counter()


@pytest.fixture
def model(counts):
    model = nn.Linear(10, 4).double()
    model.register_forward_pre_hook(lambda *_: counts.update(["forward"]))
    model.weight.register_hook(lambda _: counts.update(["backward"]))
    return model


def accumulator_of(model, loss, micro_batch):
    return autoaccum.Accumulator(
        model, closure=lambda batch: loss(model, batch), micro_batch=micro_batch, device="cpu", precision="fp32"
    )


def two_means(model, inputs):
    """Divided by what the loader does not count."""
    outputs, kept = model(inputs), (inputs[:, :2] > 0).double()
    return sum((outputs[:, n].square() * kept[:, n]).sum() / kept[:, n].sum() for n in range(2))


def test_divisors_that_no_count_predicts_are_learned_by_forward_passes_first_and_no_window_is_made_again(model, counts):
    accumulator = accumulator_of(model, two_means, 20)
    for _ in range(5):
        accumulator.backward(torch.randn(60, 10).double())

    counts.clear()
    accumulator.backward(torch.randn(60, 10).double())

    assert counts == {"forward": 2 * 3, "backward": 3}


def test_weight_that_changes_from_step_to_step_is_followed_in_one_pass_each(model, counts):
    factor = 0.0

    def loss(model, batch):
        outputs = model(batch[0])
        return functional.cross_entropy(outputs, batch[1]) + factor * outputs.square().sum(1).mean()

    accumulator = accumulator_of(model, loss, 4)
    for step in range(1, 12):
        factor = min(1.0, step / 10)
        counts.clear()
        accumulator.backward((torch.randn(12, 10).double(), torch.randint(4, (12,))))
        assert counts["forward"] == 3 or step & (step - 1) == 0  # and those of a check


def test_window_that_is_made_again_draws_what_it_drew_before(model):
    drawn = []

    def loss(model, batch):
        drawn.append(torch.rand(()).item())
        return two_means(model, functional.dropout(batch, 0.5))

    accumulator_of(model, loss, 20).backward(torch.randn(60, 10).double())

    assert drawn[-3:] == drawn[-6:-3]


def entropy(outputs, targets):
    """A function of the user's own."""
    return functional.cross_entropy(outputs, targets)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), entropy])
def test_nothing_that_counts_in_a_micro_batch_makes_no_nan_where_weights_are_not_waited_for(monkeypatch, loss):
    """As on a GPU, where they are tensors."""
    monkeypatch.setattr(graph_reader, "_on_host", lambda value: value.detach().reshape(()).double())
    monkeypatch.setattr(window_weights, "weight_at_once", lambda _: None)
    inputs, targets = torch.randn(12, 10).double(), torch.randint(4, (12,))
    targets[4:8] = -100

    assert_full_batch_gradient(nn.Linear(10, 4).double(), loss, (inputs, targets), (4, 4, 4))
