"""Activations of former versions compute what today's do, and keep other tensors for the gradient."""

import sys

import pytest
import torch
from torch import nn

from folders import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

from of_their_time import FormerHSwish, FormerReLU6, with_former_activations


def inputs():
    return torch.linspace(-5, 9, 57, dtype=torch.float64).requires_grad_()


def kept_by(module, given):
    """The values that are kept for the gradient, each storage once."""
    kept = {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    given = given * 1.0  # an output of another layer, as a normalisation's
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = module(given)
    return outputs, sum(kept.values())


@pytest.mark.parametrize(
    ("former", "todays", "fewer"),
    [(FormerReLU6(), nn.ReLU6(inplace=True), 0), (FormerHSwish(), nn.Hardswish(), -57)],
    ids=["ReLU6", "HSwish"],
)
def test_former_activation_computes_the_same(former, todays, fewer):
    one, other = inputs(), inputs()

    outputs, kept = kept_by(former, one)
    expected, kept_today = kept_by(todays, other)
    outputs.square().sum().backward()
    expected.square().sum().backward()

    torch.testing.assert_close(outputs, expected)
    torch.testing.assert_close(one.grad, other.grad)
    assert kept_today - kept == fewer


def test_activations_of_a_model_are_replaced():
    model = with_former_activations(nn.Sequential(nn.Sequential(nn.ReLU6(inplace=True), nn.ReLU6()), nn.Hardswish()))

    assert [type(one) for one in model.modules() if not isinstance(one, nn.Sequential)] == [
        FormerReLU6,
        nn.ReLU6,
        FormerHSwish,
    ]
