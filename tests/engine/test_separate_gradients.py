"""Gradients taken aside: dropped with a failed micro-batch, and the same sums, bit for bit, where all goes well."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from autoaccum._engine.separate_gradients import Aside


class Tied(nn.Module):
    """One matrix used twice, by a reentrant checkpoint too: its gradient arrives in two shares."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)
        self.last.weight = self.first.weight
        self.head = nn.Linear(5, 2)

    def forward(self, inputs):
        hidden = checkpoint(self.first, inputs.requires_grad_(), use_reentrant=True)
        return self.head(self.last(torch.tanh(hidden)))


def backward(model, inputs):
    model(inputs.clone()).square().mean().backward()
    model(inputs.clone()).abs().mean().backward()  # a second loss on the same micro-batch


def gradients_of(model):
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


def test_sums_are_bit_for_bit_those_of_autograd():
    torch.manual_seed(0)
    model, batches = Tied(), torch.randn(3, 7, 5)
    for batch in batches:
        backward(model, batch)
    expected = gradients_of(model)
    model.zero_grad()

    for batch in batches:
        with Aside(list(model.parameters())):
            backward(model, batch)

    assert all(torch.equal(*pair) for pair in zip(gradients_of(model), expected, strict=True))


def test_what_a_failed_micro_batch_gave_is_dropped():
    torch.manual_seed(0)
    model, batch = Tied(), torch.randn(7, 5)
    backward(model, batch)
    before, kept = gradients_of(model), [parameter.grad for parameter in model.parameters()]

    def fail():
        with Aside(list(model.parameters())):
            backward(model, batch)
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        fail()

    assert all(parameter.grad is grad for parameter, grad in zip(model.parameters(), kept, strict=True))
    assert all(torch.equal(*pair) for pair in zip(gradients_of(model), before, strict=True))
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_parameters_without_a_share_keep_what_they_have():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model[0](torch.ones(1, 2)).sum().backward()

    with Aside(list(model.parameters())):
        model[1](torch.ones(1, 2)).sum().backward()

    assert torch.equal(model[0].weight.grad, torch.ones(2, 2))
    assert torch.equal(model[1].weight.grad, torch.ones(2, 2))


def test_sparse_shares_are_added_too():
    model = nn.Embedding(4, 2, sparse=True)
    model(torch.tensor([1])).sum().backward()

    with Aside(list(model.parameters())):
        model(torch.tensor([1, 3])).sum().backward()

    assert model.weight.grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 0.0, 1.0]


def test_frozen_parameters_are_left_alone():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)

    with Aside(list(model.parameters())):
        model(torch.ones(1, 2)).sum().backward()

    assert model.bias.grad is None
    assert torch.equal(model.weight.grad, torch.ones(2, 2))
